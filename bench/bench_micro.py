"""`pytest bench/bench_micro.py`: small timings, by pytest-benchmark, of what a change to the code may slow down.

Where `python -m bench` measures the whole against its targets for minutes, these take seconds and are compared with
those of an earlier commit: `--benchmark-autosave`, then `--benchmark-compare --benchmark-compare-fail=median:15%` on a
quiet machine. pytest is imported by nobody who does not ask for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.bench_kd_loss import one_thread
from bench.loss_ways import FLOOR, WAYS, Inputs, LossCase
from planner.input_hash import input_hash
from ring.core.codec import decode, encode
from ring.core.messages import FillId, Request, TokenRequest

if TYPE_CHECKING:
    import pytest
    from pytest_benchmark.fixture import BenchmarkFixture

#: Two windows of rows, and columns enough that products outweigh the calls.
LOSS_CASE = LossCase(rows=256, vocab_size=8192, student_hidden=128, teacher_hidden=256, dtype="bf16")
#: A microbatch of two documents whose second halves count.
NUM_TOKENS = 4096


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every way to the loss that needs no other library. A hook, since a decorator would import pytest."""
    if "way_name" in metafunc.fixturenames:
        metafunc.parametrize("way_name", [way.name for way in WAYS.values() if way.package is None])


def test_loss_step(benchmark: BenchmarkFixture, way_name: str) -> None:
    """Value and both gradients, one thread."""
    benchmark.group = f"loss, {LOSS_CASE.rows} rows x {LOSS_CASE.vocab_size} columns, {LOSS_CASE.dtype}"
    with one_thread():
        inputs = Inputs(LOSS_CASE)
        step = WAYS[way_name].start(inputs)
        benchmark.pedantic(  # type: ignore[no-untyped-call]
            step, setup=inputs.forget_gradients, rounds=10, warmup_rounds=2
        )
    assert (inputs.student_VH.grad is None) == (way_name == FLOOR)


def test_request_encoding(benchmark: BenchmarkFixture) -> None:
    """A request of a whole microbatch, checked field by field."""
    benchmark.group = f"codec, request of {NUM_TOKENS} tokens"
    request = _request()
    assert len(benchmark(encode, request)) > 4 * NUM_TOKENS


def test_request_decoding(benchmark: BenchmarkFixture) -> None:
    """Bounded, checked, and the same request again."""
    benchmark.group = f"codec, request of {NUM_TOKENS} tokens"
    request = _request()
    assert benchmark(decode, encode(request)) == request


def _request() -> Request:
    token_ids = b"".join(number.to_bytes(4, "little") for number in range(NUM_TOKENS))
    half = NUM_TOKENS // 2
    doc_lengths, row_ranges = (half, half), ((half // 2, half), (half + half // 2, NUM_TOKENS))
    payload = TokenRequest(
        token_ids=token_ids,
        doc_lengths=doc_lengths,
        row_ranges=row_ranges,
        input_hash=input_hash(token_ids, doc_lengths, row_ranges),
    )
    return Request(fill=FillId(seq=7, attempt=0, slot=1), payload=payload, time_left_s=60.0)
