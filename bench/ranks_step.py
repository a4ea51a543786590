"""What ranks cost a step: the same step of a small student by one process, and by several that exchange.

Four ways, one after the other within each round, so that they meet the same machine. `alone`: one process with all
sequences of the step. `apart`: every rank with its part of them, without any exchange: what several processes cost each
other on this machine by being there. `summed`: as that, and gradients are summed once a step. `fsdp`: weights,
gradients and optimizer cut over the ranks.

And the loss by itself, with whole heads and with heads that are cut over the ranks.

Shapes: N rows, H hidden of both models, V vocabulary.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from student.load import prepare_student
from student.loss import Head, KDLoss
from student.model import DistilledStudent
from student.optim import AdamWSettings, StudentOptimizer
from student.parallel.ranks import Launch, Ranks
from student.parallel.sharding import shard_fully
from student.parallel.shares import Shares

#: Of a rank that waits for the others.
TIMEOUT_S = 300.0
STEP_WAYS = ("alone", "apart", "summed", "fsdp")
LOSS_WAYS = ("whole heads", "cut heads")
#: Before what is measured: memory is touched for the first time, and FSDP makes its buffers.
WARMUP_ROUNDS = 2
#: The student of the step: 8.1 million parameters, half of them in embedding and head.
HIDDEN, LAYERS, VOCAB, TOKENS = 256, 4, 8192, 256


@dataclass(frozen=True)
class Times:
    """`wall_s`: of the slowest rank. `cpu_s`: of all ranks, what carries the exchange among it."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True, kw_only=True)
class Work:
    """rows, hidden_size, vocab_size: of the loss. batch_size: sequences of a step, of all ranks."""

    ranks: int
    rounds: int
    rows: int
    hidden_size: int
    vocab_size: int
    batch_size: int


def measure(work: Work) -> dict[str, list[Times]]:
    """Of each way, a value a round."""
    found: Any = multiprocessing.get_context("spawn").SimpleQueue()
    # They meet at a file: a port that was free a moment ago may be somebody else's when the first rank listens.
    with tempfile.TemporaryDirectory(prefix="disaggkd-ranks-") as directory:
        spawn(_rank, (work, directory, found), nprocs=work.ranks)  # type: ignore[no-untyped-call]
    times: dict[str, list[Times]] = found.get()
    return times


def _rank(rank: int, work: Work, directory: str, found: Any) -> None:
    torch.set_num_threads(1)
    patience = timedelta(seconds=TIMEOUT_S)
    address = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=work.ranks, timeout=patience)
    launch = Launch(rank=rank, world_size=work.ranks, local_rank=rank, restarts=0)
    ranks = Ranks(launch, device=torch.device("cpu"), timeout_s=TIMEOUT_S, wants_groups=True)
    ways = _loss_ways(rank, work) | _step_ways(work, ranks)
    times: dict[str, list[Times]] = {name: [] for name in ways}
    for _ in range(WARMUP_ROUNDS + work.rounds):
        for name, act in ways.items():
            times[name].append(_timed(act, takes_part=name != "alone" or rank == 0))
    if rank == 0:
        found.put({name: values[WARMUP_ROUNDS:] for name, values in times.items()})
    ranks.part()


def _timed(act: Callable[[], None], *, takes_part: bool) -> Times:
    """takes_part: this rank does it; otherwise it waits, asleep, for those that do."""
    dist.barrier()
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    if takes_part:
        act()
    own = torch.tensor([time.perf_counter() - begin_s, time.process_time() - begin_cpu_s], dtype=torch.float64)
    all_own = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(all_own, own)
    return Times(max(float(row[0]) for row in all_own), sum(float(row[1]) for row in all_own))


# ---- the loss ------------------------------------------------------------------------------------------------------


def _loss_ways(rank: int, work: Work) -> dict[str, Callable[[], None]]:
    width = -(-work.vocab_size // work.ranks)
    start, stop = min(rank * width, work.vocab_size), min((rank + 1) * width, work.vocab_size)
    cut = {"vocab_group": dist.group.WORLD, "group_rows": [work.rows] * work.ranks}
    ways: Sequence[tuple[int, int, dict[str, Any]]] = [(0, work.vocab_size, {}), (start, stop, cut)]
    return {
        name: _loss_way(work, first, last, options)
        for name, (first, last, options) in zip(LOSS_WAYS, ways, strict=True)
    }


def _loss_way(work: Work, first: int, last: int, options: dict[str, Any]) -> Callable[[], None]:
    """Loss and gradients of this rank's rows, by the columns [first, last) of both heads."""
    generator = torch.Generator().manual_seed(1)
    shape = (work.rows, work.hidden_size)
    student_NH = torch.randn(shape, generator=generator).to(torch.bfloat16).requires_grad_()
    teacher_NH = torch.randn(shape, generator=generator).to(torch.bfloat16)
    weight_VH = torch.randn(last - first, work.hidden_size, generator=generator) / 20
    trained_VH = weight_VH.clone().requires_grad_()
    labels_N = torch.randint(work.vocab_size, (work.rows,), generator=generator)
    heads = [Head(weight=weight, vocab_start=first) for weight in (trained_VH, weight_VH)]
    loss = KDLoss(kd_weight=0.9, ce_weight=0.1, workspace_bytes=256 * 2**20)

    def act() -> None:
        student_NH.grad = trained_VH.grad = None
        out = loss(student_NH, heads[0], teacher_NH, heads[1], labels_N, all_rows=True, **options)
        torch.autograd.backward(out.loss)

    return act


# ---- the step ------------------------------------------------------------------------------------------------------


def _step_ways(work: Work, ranks: Ranks) -> dict[str, Callable[[], None]]:
    part, unseen = work.batch_size // work.ranks, Ranks.alone(ranks.device)
    ways = {"alone": (work.batch_size, unseen), "apart": (part, unseen), "summed": (part, ranks), "fsdp": (part, ranks)}
    return {name: _step_way(work, *way, fsdp=name == "fsdp") for name, way in ways.items()}


def _step_way(work: Work, batch_size: int, ranks: Ranks, *, fsdp: bool) -> Callable[[], None]:
    """Forward, fused loss, backward, the gradients of all ranks, clipping, AdamW."""
    model = _model()
    teacher_head = Head(weight=_normal(2, VOCAB, HIDDEN) / HIDDEN**0.5)
    module = DistilledStudent(
        model,
        prepare_student(model, None, source="the bench").head_spec,
        loss=KDLoss(kd_weight=0.9, ce_weight=0.1),
        teacher_head=teacher_head,
    )
    if fsdp:
        shard_fully(module, model, ranks, mixed_precision=True, reshard_after_forward=True)
    shares = Shares(module, ranks)
    optimizer = StudentOptimizer(shares.locals(), AdamWSettings())
    num_rows = batch_size * TOKENS
    generator = torch.Generator().manual_seed(3 + ranks.rank)
    inputs = {
        "input_ids": torch.randint(VOCAB, (batch_size, TOKENS), generator=generator),
        "position_ids": torch.arange(TOKENS).expand(batch_size, TOKENS),
        "labels": torch.randint(VOCAB, (num_rows,), generator=generator),
        "row_index": torch.arange(num_rows),
        "teacher_hidden": _normal(4, num_rows, HIDDEN).to(torch.bfloat16),
    }

    def act() -> None:
        shares.zero_grad()
        torch.autograd.backward(module(**inputs, num_rows=work.batch_size * TOKENS).loss)
        shares.collect_gradients()
        shares.clip(max_norm=1.0)
        optimizer.step(lr=1e-4)

    return act


def _model() -> Any:
    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=TOKENS,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=0,
        bos_token_id=None,
    )
    torch.manual_seed(1)
    auto: Any = transformers.AutoModelForCausalLM
    return auto.from_config(config, dtype=torch.float32).train()


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
