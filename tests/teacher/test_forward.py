"""Requests in, states out: batched and padded equals alone, and nothing runs or returns that was not asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ring.core.errors import LocalProtocolError, RemoteProtocolError
from ring.core.messages import HeadRequest, TokenRequest, WireDtype
from ring.determinism import fix_kernels
from teacher.fingerprint import head_sha256
from teacher.forward import TeacherModel
from teacher.load import prepare
from tests.tiny_models import FAMILIES, MAX_POSITIONS, TOKENIZER_VOCAB, tiny_model, tiny_tokenizer


@lru_cache
def teacher_of(family: str, dtype: torch.dtype = torch.float64) -> TeacherModel:
    return prepare(tiny_model(family, dtype=dtype), tiny_tokenizer().get_vocab(), name=family)


def request_of(*documents: Sequence[int], rows: Sequence[tuple[int, int]] | None = None) -> TokenRequest:
    tokens = [token for document in documents for token in document]
    return TokenRequest(
        token_ids=np.array(tokens, dtype="<u4").tobytes(),
        doc_lengths=tuple(len(document) for document in documents),
        row_ranges=tuple([(0, len(tokens))] if rows is None else rows),
        input_hash=b"",
    )


def document(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, TOKENIZER_VOCAB, length)]


def alone(family: str, tokens: Sequence[int], dtype: torch.dtype = torch.float64) -> Tensor:
    """The oracle: one document by itself through the body of a fresh model, all of it."""
    model = tiny_model(family, dtype=dtype)
    with torch.no_grad():
        states: Tensor = getattr(model, model.base_model_prefix)(torch.tensor([list(tokens)])).last_hidden_state[0]
    return states


@contextmanager
def batches_seen(teacher: TeacherModel) -> Iterator[list[tuple[int, int]]]:
    """The [rows, tokens] of every batch that the body runs."""
    seen: list[tuple[int, int]] = []
    embedding = teacher.split.model.get_input_embeddings()
    handle = embedding.register_forward_pre_hook(lambda _module, arguments: seen.append(tuple(arguments[0].shape)))
    try:
        yield seen
    finally:
        handle.remove()


def pieces_agree(pieces: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert [piece.shape for piece in pieces] == [part.shape for part in expected]
    for piece, part in zip(pieces, expected, strict=True):
        # Norms and rotary tables work in fp32 inside, also in an fp64 model.
        torch.testing.assert_close(piece, part, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_batched_and_padded_documents_equal_each_document_alone(family: str, deterministic: bool) -> None:
    lengths = [[3, 70, 1], [12], [33, 2], [64]]
    documents = [[document(n, 10 * i + j) for j, n in enumerate(row)] for i, row in enumerate(lengths)]
    teacher = teacher_of(family)
    with batches_seen(teacher) as seen:
        answers = teacher.forward_requests([request_of(*row) for row in documents], deterministic=deterministic)
    assert len(seen) == (4 if deterministic else 1)
    for pieces, row in zip(answers, documents, strict=True):
        pieces_agree(pieces, [alone(family, tokens) for tokens in row])


@pytest.mark.parametrize("family", ["qwen3_5_moe", "gemma3"])
def test_passes_split_by_max_batch_tokens_give_the_same_states(family: str) -> None:
    documents = [document(n, n) for n in (40, 3, 25, 25, 9, 31)]
    requests = [request_of(*documents[:3]), request_of(*documents[3:])]
    teacher = teacher_of(family)
    for deterministic in (False, True):
        with batches_seen(teacher) as seen:
            answers = teacher.forward_requests(requests, max_batch_tokens=64, deterministic=deterministic)
        assert len(seen) > 2
        assert all(rows * tokens <= 64 for rows, tokens in seen)
        pieces_agree(answers[0] + answers[1], [alone(family, tokens) for tokens in documents])


def test_rows_that_count_come_back_in_order_cut_at_document_boundaries() -> None:
    documents = [document(10, 1), document(7, 2), document(5, 3)]
    rows = [(2, 4), (4, 5), (8, 14), (15, 22)]
    pieces = teacher_of("qwen3").forward_requests([request_of(*documents, rows=rows)])[0]
    first, second, third = (alone("qwen3", tokens) for tokens in documents)
    pieces_agree(pieces, [first[2:4], first[4:5], first[8:10], second[0:4], second[5:7], third[0:5]])
    assert sum(len(piece) for piece in pieces) == sum(end - start for start, end in rows)


def test_a_range_over_three_documents_gives_a_piece_for_each() -> None:
    documents = [document(3, 1), document(2, 2), document(4, 3)]
    pieces = teacher_of("llama").forward_requests([request_of(*documents, rows=[(2, 6)])])[0]
    first, second, third = (alone("llama", tokens) for tokens in documents)
    pieces_agree(pieces, [first[2:3], second[0:2], third[0:1]])


def test_documents_without_a_row_that_counts_are_never_run() -> None:
    teacher = teacher_of("qwen3")
    documents = [document(50, 1), document(6, 2), document(40, 3)]
    with batches_seen(teacher) as seen:
        answers = teacher.forward_requests([request_of(*documents, rows=[(52, 55)]), request_of(*documents, rows=[])])
    assert seen == [(1, 5)], "the middle document up to its last row that counts, and nothing else"
    pieces_agree(answers[0], [alone("qwen3", documents[1])[2:5]])
    assert answers[1] == []


def test_another_document_of_the_request_changes_nothing() -> None:
    teacher = teacher_of("qwen3_5_moe", torch.float32)
    mine, one, other = document(9, 1), document(9, 2), document(9, 3)
    first, second = teacher.forward_requests([request_of(mine, one), request_of(mine, other)], deterministic=True)
    torch.testing.assert_close(first[0], second[0], atol=1e-6, rtol=1e-5)
    assert (first[1] - second[1]).abs().max() > 0.1


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_moe"])
def test_deterministic_answers_do_not_depend_on_the_neighbours_to_the_bit(family: str) -> None:
    teacher = teacher_of(family, torch.bfloat16)
    mine = request_of(document(21, 1), document(5, 2))
    by_itself = teacher.forward_requests([mine], deterministic=True)[0]
    crowd = [request_of(document(60, 3)), mine, request_of(document(2, 4), document(3, 5))]
    in_a_crowd = teacher.forward_requests(crowd, deterministic=True)[1]
    assert all(torch.equal(one, other) for one, other in zip(by_itself, in_a_crowd, strict=True))


def test_fixed_kernels_run_every_family() -> None:
    threads, algorithms = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        fix_kernels(num_threads=1)
        assert torch.are_deterministic_algorithms_enabled()
        for family in FAMILIES:
            one, other = (
                teacher_of(family).forward_requests([request_of(document(9, 1))], deterministic=True) for _ in "ab"
            )
            assert torch.equal(one[0][0], other[0][0])
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(algorithms)


def test_pieces_are_slices_of_one_output_without_a_copy() -> None:
    teacher = teacher_of("llama", torch.bfloat16)
    requests = [request_of(document(9, 1), rows=[(1, 3), (5, 9)]), request_of(document(12, 2))]
    pieces = [piece for answer in teacher.forward_requests(requests) for piece in answer]
    assert len({piece.untyped_storage().data_ptr() for piece in pieces}) == 1
    assert all(piece.is_contiguous() and piece.dtype == torch.bfloat16 for piece in pieces)


def test_few_rows_of_a_long_pass_do_not_keep_its_output_alive() -> None:
    teacher = teacher_of("llama")
    [[piece]] = teacher.forward_requests([request_of(document(40, seed=1), rows=[(37, 39)])])
    assert piece.untyped_storage().nbytes() == piece.nbytes
    [pieces] = teacher.forward_requests([request_of(document(40, seed=1), rows=[(0, 15), (20, 39)])])
    kept = {piece.untyped_storage().data_ptr(): piece.untyped_storage().nbytes() for piece in pieces}
    assert sum(kept.values()) <= 2 * sum(piece.nbytes for piece in pieces)


def test_an_output_is_freed_once_its_pieces_are_dropped() -> None:
    teacher = teacher_of("llama")
    requests = [request_of(document(n, n)) for n in (40, 30)]
    outputs: list[StorageWeakRef] = []

    def remember(_module: object, _arguments: object, output: Any) -> None:
        outputs.append(StorageWeakRef(output.last_hidden_state.untyped_storage()))

    handle = teacher.split.body.register_forward_hook(remember)
    try:
        answers = teacher.iter_forward(requests, max_batch_tokens=40)
        _, pieces = next(answers)
        assert [output.expired() for output in outputs] == [False]
        del pieces[0]
        assert [output.expired() for output in outputs] == [True]
        next(answers)
        assert [output.expired() for output in outputs] == [True, True]
    finally:
        handle.remove()


def test_requests_come_back_as_soon_as_they_are_whole() -> None:
    teacher = teacher_of("qwen3")
    requests = [request_of(document(20, 1), document(60, 2)), request_of(document(50, 3)), request_of([5], rows=[])]
    with batches_seen(teacher) as seen:
        done_after = {index: len(seen) for index, _ in teacher.iter_forward(requests, max_batch_tokens=60)}
    assert done_after == {2: 0, 1: 2, 0: 3}


def test_logits_are_never_computed_and_router_logits_never_returned() -> None:
    teacher = teacher_of("qwen3_5_moe")
    outputs: list[Any] = []

    def refuse(*_: object) -> None:
        raise AssertionError("the head ran")

    handles = [
        teacher.split.head.register_forward_pre_hook(refuse),
        teacher.split.body.register_forward_hook(lambda _module, _arguments, output: outputs.append(output)),
    ]
    try:
        teacher.forward_requests([request_of(document(9, 1))])
    finally:
        for handle in handles:
            handle.remove()
    assert [name for name, value in outputs[0].items() if value is not None] == ["last_hidden_state"]


def test_the_model_is_frozen() -> None:
    model = tiny_model("qwen3").train().requires_grad_(True)
    teacher = prepare(model, tiny_tokenizer().get_vocab(), name="tiny")
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not teacher.forward_requests([request_of([1, 2, 3])])[0][0].requires_grad


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [6.0] * 8,
    "partial_rotary_factor": 1.0,
}


def test_a_longrope_model_never_mixes_short_and_long_documents() -> None:
    # Its frequencies follow the longest row of the batch: padding a short document to a long one would change it.
    config = transformers.Phi3Config(
        vocab_size=TOKENIZER_VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=MAX_POSITIONS,
        original_max_position_embeddings=16,
        rope_parameters=LONGROPE,
        initializer_range=0.15,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
    documents = [document(n, n) for n in (10, 16, 17, 40)]
    # The last document counts in its first ten tokens only, and is still a long one.
    rows = [(0, 10 + 16 + 17 + 10)]
    expected = []
    for tokens in documents:
        with torch.no_grad():
            expected.append(model.model(torch.tensor([tokens])).last_hidden_state[0])
    expected[3] = expected[3][:10]
    teacher = prepare(model, tiny_tokenizer().get_vocab(), name="tiny")
    assert teacher.length_thresholds == (16,)
    with batches_seen(teacher) as seen:
        pieces = teacher.forward_requests([request_of(*documents, rows=rows)])[0]
    assert sorted(seen) == [(2, 16), (2, 40)]
    pieces_agree(pieces, expected)


BAD_REQUESTS: dict[str, Callable[[], TokenRequest]] = {
    "token id 320; allowed: 0..319": lambda: request_of([5, TOKENIZER_VOCAB]),
    "token id 4294967295; allowed: 0..319": lambda: request_of([2**32 - 1]),
    "document of 129 tokens; allowed: at most 128": lambda: request_of(document(MAX_POSITIONS + 1, 0)),
    "token_ids: 6 bytes; allowed: a multiple of 4": lambda: with_fields(request_of([1]), token_ids=b"123456"),
    "1 documents of 3 tokens in all": lambda: with_fields(request_of([1, 2]), doc_lengths=(3,)),
    "2 documents of 2 tokens in all, the shortest of 0": lambda: with_fields(request_of([1, 2]), doc_lengths=(2, 0)),
    "2 documents of 2 tokens in all, the shortest of -1": lambda: with_fields(request_of([1, 2]), doc_lengths=(3, -1)),
    "0 documents of 0 tokens": lambda: request_of(),
    r"row range \[0, 4\) after 0": lambda: request_of([1, 2, 3], rows=[(0, 4)]),
    r"row range \[-1, 2\) after 0": lambda: request_of([1, 2, 3], rows=[(-1, 2)]),
    r"row range \[1, 1\) after 0": lambda: request_of([1, 2, 3], rows=[(1, 1)]),
    r"row range \[1, 3\) after 2": lambda: request_of([1, 2, 3], rows=[(0, 2), (1, 3)]),
    r"row range \[0, 1\) after 3": lambda: request_of([1, 2, 3], rows=[(2, 3), (0, 1)]),
}


def with_fields(request: TokenRequest, **fields: Any) -> TokenRequest:
    named = ("token_ids", "doc_lengths", "row_ranges", "input_hash")
    return TokenRequest(**({name: getattr(request, name) for name in named} | fields))


@pytest.mark.parametrize("message", BAD_REQUESTS)
def test_a_bad_request_is_refused_before_anything_runs(message: str) -> None:
    teacher = teacher_of("qwen3")
    with batches_seen(teacher) as seen, pytest.raises(RemoteProtocolError, match=message):
        teacher.forward_requests([request_of([1, 2, 3]), BAD_REQUESTS[message]()])
    assert seen == []


def test_a_document_longer_than_a_pass_may_be_is_refused() -> None:
    request = request_of(document(33, 1))
    with pytest.raises(RemoteProtocolError, match="document of 33 tokens; allowed: at most 32"):
        teacher_of("qwen3").check_request(request, max_batch_tokens=32)
    teacher_of("qwen3").check_request(request, max_batch_tokens=33)


def test_padded_input_ids_are_those_with_an_embedding() -> None:
    teacher = prepare(tiny_model(vocab_size=384), tiny_tokenizer().get_vocab(), name="padded")
    assert len(teacher.forward_requests([request_of([383])])[0][0]) == 1
    with pytest.raises(RemoteProtocolError, match=r"token id 384; allowed: 0\.\.383"):
        teacher.forward_requests([request_of([384])])


@pytest.mark.case(40)
def test_no_wire_dtype_loses_range() -> None:
    # Case 40: 70144 is a bf16 number, and infinity in fp16.
    assert torch.tensor(70144.0).to(torch.bfloat16).isfinite()
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert WireDtype.FP16 not in teacher_of("llama", dtype).wire_dtypes
    teacher = teacher_of("llama", torch.bfloat16)
    assert teacher.wire_dtypes[0] is WireDtype.BF16
    with pytest.raises(LocalProtocolError, match="fp16"):
        teacher.forward_requests([request_of([1])], wire_dtypes=[WireDtype.FP16])
    with pytest.raises(LocalProtocolError, match="for 2 requests"):
        teacher.forward_requests([request_of([1])] * 2, wire_dtypes=[WireDtype.BF16])


@pytest.mark.case(40)
def test_a_state_of_70144_arrives_as_70144() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    # The last norm's weight makes states of any size; one element of a normed row is its largest.
    model.model.norm.weight.data.fill_(2.0**15)
    teacher = prepare(model, tiny_tokenizer().get_vocab(), name="large")
    narrow, wide = teacher.forward_requests(
        [request_of(document(40, 1))] * 2, wire_dtypes=[WireDtype.BF16, WireDtype.FP32]
    )
    assert narrow[0].dtype == torch.bfloat16
    assert wide[0].dtype == torch.float32
    assert wide[0].abs().max() > torch.finfo(torch.float16).max
    assert narrow[0].isfinite().all()
    assert torch.equal(narrow[0].float(), wide[0])


def phi_with_bias() -> TeacherModel:
    config = transformers.PhiConfig(
        vocab_size=TOKENIZER_VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.lm_head.bias.data.copy_(torch.linspace(-1, 1, TOKENIZER_VOCAB))
    return prepare(model, tiny_tokenizer().get_vocab(), name="phi")


def test_a_shard_of_the_head_is_its_columns_and_their_bias() -> None:
    teacher = phi_with_bias()
    weight_CH, bias_C = teacher.head_columns(17, 90)
    assert bias_C is not None
    assert weight_CH.is_contiguous()
    assert torch.equal(weight_CH, teacher.split.model.lm_head.weight[17:90])
    assert torch.equal(bias_C, teacher.split.model.lm_head.bias[17:90])
    assert teacher_of("qwen3").head_columns(0, TOKENIZER_VOCAB)[1] is None


@pytest.mark.parametrize("piece_bytes", [1000, 4096, 10**6])
def test_pieces_of_the_head_add_up_to_its_bytes_and_hash(piece_bytes: int) -> None:
    teacher = phi_with_bias()
    info = teacher.head_info()
    received = bytearray()
    while len(received) < info.num_bytes:
        num_bytes = min(piece_bytes, info.num_bytes - len(received))
        request = HeadRequest(
            vocab_start=0, vocab_end=info.vocab_size, offset=len(received), num_bytes=num_bytes, input_hash=b""
        )
        pieces = teacher.head_piece(request)
        assert sum(len(piece) for piece in pieces) == num_bytes
        for piece in pieces:
            received += piece.numpy().tobytes()
    weight_bytes = info.vocab_size * info.hidden_size * 4
    weight = torch.frombuffer(received[:weight_bytes], dtype=torch.float32).view(info.vocab_size, info.hidden_size)
    bias = torch.frombuffer(received[weight_bytes:], dtype=torch.float32)
    assert torch.equal(weight, teacher.split.weight_VH)
    assert teacher.split.bias_V is not None
    assert torch.equal(bias, teacher.split.bias_V)
    assert head_sha256(weight, bias) == info.sha256 == teacher.head_columns_sha256(0, info.vocab_size)


@pytest.mark.parametrize(
    ("start", "end", "offset", "num_bytes"),
    [(0, 321, 0, 4), (-1, 4, 0, 4), (5, 5, 0, 4), (0, 1, 0, 161), (0, 1, 160, 1), (0, 1, -1, 2), (0, 1, 0, 0)],
)
def test_head_bytes_that_do_not_exist_are_refused(start: int, end: int, offset: int, num_bytes: int) -> None:
    request = HeadRequest(vocab_start=start, vocab_end=end, offset=offset, num_bytes=num_bytes, input_hash=b"")
    with pytest.raises(RemoteProtocolError, match="allowed: not empty, within"):
        teacher_of("qwen3", torch.float32).head_piece(request)
