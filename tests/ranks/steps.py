"""`python -m tests.ranks.steps WHAT FILE`: one rank of a world that takes training steps in every way that fits it.

No ring and no files of data: a teacher's state is a row of a table, by token, so that it is the same however rows are
cut into microbatches and ranks. WHAT is a family of models, or `briefly`. Rank 0 writes what came of each way to FILE,
as tensors by `<way>/<what>`.

Of float64 all is float64 here. Models cast parts of themselves to float32 whatever their weights are (Gemma's and
Qwen3.5's norms, the routing of experts, the delta rule), and what is cast has its gradient summed over rows in float32:
in one process too, another cut of the rows gave another sum, by 1e-7. `Float64Stays` leaves the cast out.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from student.data import MicroBatch, MicroBatchPlan, Sample, TokenDataset, build_microbatch
from student.load import LoadedStudent, prepare_student
from student.loss import Head, KDLoss
from student.model import DistilledStudent, evaluate
from student.optim import AdamWSettings, StudentOptimizer
from student.parallel.ranks import Ranks, launched
from student.parallel.sharding import shard_fully
from student.parallel.shares import Share, Shares
from student.parallel.vocabulary import VocabGroup, VocabShard, shard_vocabulary
from tests.tiny_models import TOKENIZER_VOCAB, tiny_model

#: Sequences of a step, however they are cut: 26 samples make two whole steps of 12 and one of 2 an epoch.
SEQUENCES_A_STEP, NUM_SAMPLES, NUM_STEPS = 12, 26, 4
TEACHER_WIDTH = 24
CLIP_NORM = 0.8
LR = 1e-2
OPTIMIZER = AdamWSettings(weight_decay=0.01)
FAMILIES = ("qwen3", "llama", "gemma3", "qwen3_5_moe")
#: Taken in every world, by the first and the last accumulation: heads that are tied, and experts.
BRIEFLY = ("qwen3", "qwen3_5_moe")
#: By the first and the last accumulation only.
SLOW = ("qwen3_5_moe",)
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train: how the world is used. `batch`: sequences of a microbatch."""

    family: str
    dtype: str
    world: int
    fsdp: bool = False
    vocab: int = 1
    batch: int = SEQUENCES_A_STEP
    checkpointing: bool = False

    @property
    def accum(self) -> int:
        return SEQUENCES_A_STEP // (self.batch * self.world)

    @property
    def name(self) -> str:
        marks = f"{'-fsdp' * self.fsdp}{f'-vocab{self.vocab}' * (self.vocab > 1)}{'-ckpt' * self.checkpointing}"
        return f"{self.family}-{self.dtype}-world{self.world}-batch{self.batch}{marks}"


def ways(world: int, *, family: str | None) -> Iterator[Way]:
    """Of a family: dtypes, accumulation, FSDP and vocabulary groups, each with each. None: a few ways of some."""
    vocabs = [size for size in (1, 2, 3, 4) if world % size == 0]
    batches = [batch for batch in (12, 6, 4, 3, 1) if SEQUENCES_A_STEP % (batch * world) == 0]
    ends = (batches[0], batches[-1])
    families, dtypes = (BRIEFLY, ("fp64",)) if family is None else ((family,), tuple(DTYPES))
    for chosen, dtype, fsdp, vocab, batch in itertools.product(families, dtypes, (False, True), vocabs, batches):
        if batch in ends or not (family is None or chosen in SLOW):
            yield Way(family=chosen, dtype=dtype, world=world, fsdp=fsdp, vocab=vocab, batch=batch)
    if family in (None, "llama"):
        yield Way(family="llama", dtype="fp64", world=world, fsdp=True, batch=batches[0], checkpointing=True)


class Float64Stays(TorchFunctionMode):
    """Within it no tensor of float64 is cast to float32."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype is torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
        return func(*args, **kwargs)


class Samples(TokenDataset):
    """Uneven samples of random tokens; of some only the last row counts."""

    def __init__(self) -> None:
        generator = np.random.default_rng(5)
        self.lengths = generator.integers(3, 14, NUM_SAMPLES)
        self._tokens = [generator.integers(1, TOKENIZER_VOCAB, length).astype(np.uint32) for length in self.lengths]
        self.row_counts = np.where(np.arange(NUM_SAMPLES) % 3 == 0, 1, self.lengths - 1)

    @property
    def num_samples(self) -> int:
        return NUM_SAMPLES

    def sample(self, sample_id: int) -> Sample:
        length = int(self.lengths[sample_id])
        return Sample(self._tokens[sample_id], ((length - 1 - int(self.row_counts[sample_id]), length - 1),))


def normal(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def teacher_states(batch: MicroBatch, dtype: torch.dtype) -> Tensor:
    table = normal(1, TOKENIZER_VOCAB, TEACHER_WIDTH, dtype=dtype)
    ids = batch.input_ids.flatten()[batch.row_index]
    return table[ids]


def distilled(way: Way, ranks: Ranks) -> tuple[DistilledStudent, LoadedStudent, VocabShard | None]:
    model = tiny_model(way.family, seed=3, dtype=DTYPES[way.dtype])
    student = prepare_student(model, None, source=way.family)
    shard, first, last = None, 0, TOKENIZER_VOCAB
    if way.vocab > 1:
        assert ranks.vocab_mesh is not None
        shard = shard_vocabulary(student, VocabGroup.of(ranks.vocab_mesh))
        first, last = shard.start, shard.stop
    weight = normal(2, TOKENIZER_VOCAB, TEACHER_WIDTH, dtype=DTYPES[way.dtype]) / 5
    module = DistilledStudent(
        model,
        student.head_spec,
        loss=KDLoss("jsd", temperature=2.0, kd_weight=0.7, ce_weight=0.3, workspace_bytes=1 << 22),
        teacher_head=Head(weight=weight[first:last], vocab_start=first),
        precision="fp64" if way.dtype == "fp64" else "fp32",
        gradient_checkpointing=way.checkpointing,
        vocab=shard,
    )
    if way.fsdp:
        kept = () if shard is None else shard.parameters
        shard_fully(module, model, ranks, mixed_precision=False, reshard_after_forward=True, kept=kept)
    return module, student, shard


def take_steps(way: Way, ranks: Ranks) -> dict[str, Tensor]:
    """Gradients of the first step; losses, norms, held-out loss and weights after NUM_STEPS; whole on every rank.

    Of one process also `reach`: how far AdamW carries an error of the gradients into each weight."""
    dataset = Samples()
    module, student, shard = distilled(way, ranks)
    vocab = {} if shard is None else dict.fromkeys(shard.parameters, shard.num_columns)
    shares = Shares(module, ranks, vocab=vocab)
    optimizer = StudentOptimizer(shares.locals(), OPTIMIZER)
    reach = {name: torch.zeros(share.local.shape, dtype=torch.float64) for name, share in shares.by_name.items()}
    plan = MicroBatchPlan(
        row_counts=dataset.row_counts,
        lengths=dataset.lengths,
        batch_size=way.batch,
        grad_accum=way.accum,
        max_steps=NUM_STEPS,
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
    losses, norms = [], []
    found: dict[str, Tensor] = {}
    for step in plan.steps():
        shares.zero_grad()
        loss = 0.0
        for planned in step.microbatches:
            batch = build_microbatch(dataset, planned)
            out = module(
                **batch.inputs("cpu"), teacher_hidden=teacher_states(batch, DTYPES[way.dtype]), num_rows=step.num_rows
            )
            out.loss.backward()
            loss += float(out.loss.detach()) / way.vocab
        shares.collect_gradients()
        if step.step == 1:
            found |= {f"gradients/{name}": whole_of(share, share.local.grad) for name, share in shares.by_name.items()}
        norms.append(shares.clip(max_norm=CLIP_NORM))
        losses.append(sum(row[0] for row in ranks.gather_floats([loss])))
        optimizer.step(lr=LR)
        for name, of_weight in reach.items():
            of_weight += reach_of_step(optimizer.state_tensors()[f"exp_avg_sq.{name}"], step.step)
    found["loss"] = torch.tensor(losses, dtype=torch.float64)
    found["norm"] = torch.tensor(norms, dtype=torch.float64)
    mine = [build_microbatch(dataset, replace(p, seq=None)) for p in next(iter(plan.steps())).microbatches]
    found["held_out"] = torch.tensor([held_out(module, mine, ranks, way)], dtype=torch.float64)
    found |= {f"weights/{name}": whole_of(share, share.local) for name, share in shares.by_name.items()}
    if way.world == 1:
        found |= {f"reach/{name}": of_weight for name, of_weight in reach.items()}
    assert student.model.training
    return found


def reach_of_step(exp_avg_sq: Tensor, step: int) -> Tensor:
    """At most how far a step moves each weight for an error of the gradient, as part of the gradient's norm.

    AdamW moves a weight by lr m / (sqrt(v) + eps), both averages of gradients up to now. An error d in each of them
    changes m by d at most and sqrt(v) too, and m is at most 2 sqrt(v) in the first steps: in all 3 lr d / (sqrt(v) +
    eps). Of a gradient near 0 that is a whole step: its sign may be any. Where there is none (tokens that do not occur)
    nothing moves."""
    v = exp_avg_sq.double() / (1 - OPTIMIZER.beta2**step)
    return torch.where(v > 0, 3 * LR * math.sqrt(float(v.sum())) / (v.sqrt() + OPTIMIZER.eps), 0.0)


def whole_of(share: Share, local: Tensor | None) -> Tensor:
    assert local is not None
    whole = share.as_whole(local.detach())
    # A copy: gradients are scaled in place afterwards.
    return (whole.full_tensor() if isinstance(whole, DTensor) else whole).clone()


def held_out(module: DistilledStudent, batches: list[MicroBatch], ranks: Ranks, way: Way) -> float:
    def sum_over_ranks(nats: float, num_rows: int) -> tuple[float, int]:
        rows = ranks.gather_floats([nats / way.vocab, num_rows])
        return sum(row[0] for row in rows), int(sum(row[1] for row in rows))

    return evaluate(module, batches, device="cpu", sum_over_ranks=sum_over_ranks).nats_per_row


def main() -> None:
    torch.set_num_threads(1)
    launch = launched()
    assert launch is not None
    family, out = None if sys.argv[1] == "briefly" else sys.argv[1], sys.argv[2]
    found: dict[str, Tensor] = {}
    worlds: dict[int, Ranks] = {}
    for way in ways(launch.world_size, family=family):
        if way.vocab not in worlds:
            worlds[way.vocab] = Ranks(
                launch, device=torch.device("cpu"), timeout_s=600, vocab_parallel=way.vocab, wants_groups=True
            )
        # A pass that is computed anew, in the backward pass, is computed outside of the mode.
        with Float64Stays() if way.dtype == "fp64" and not way.checkpointing else nullcontext():
            results = take_steps(way, worlds[way.vocab])
        found |= {f"{way.name}/{what}": value.clone() for what, value in results.items()}
    if launch.rank == 0:
        save_file(found, out)
    next(iter(worlds.values())).part()


if __name__ == "__main__":
    main()
