"""`python -m tests.planner.moved_bytes FILE`: one rank of a world, which counts the bytes that a training step moves.

Real students, FSDP, vocabulary groups and sums of gradients over gloo; every collective that torch is asked for is
caught on its way, and counted by what a rank must receive of it at least. Rank 0 writes FILE as JSON: bytes by way.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from student.load import prepare_student
from student.loss import Head, KDLoss
from student.model import DistilledStudent
from student.parallel.ranks import Ranks, launched
from student.parallel.sharding import shard_fully
from student.parallel.shares import Shares
from student.parallel.vocabulary import VocabGroup, shard_vocabulary
from tests.tiny_models import TOKENIZER_VOCAB, tiny_model

WORLD = 4
SEQUENCES, TOKENS, TEACHER_WIDTH = 2, 24, 48
NUM_MICROBATCHES = 2
#: Every window of keep fits into the one, and none into the other.
WORKSPACES = {"keep": 1 << 26, "recompute": 300_000}


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a step is made."""

    tied: bool
    fsdp: bool
    precision: str = "bf16"
    checkpointing: bool = False
    vocab: int = 1
    mode: str = "keep"

    @property
    def name(self) -> str:
        return "-".join(f"{key}={value}" for key, value in vars(self).items())


def ways() -> Iterator[Way]:
    for tied, precision in itertools.product((False, True), ("bf16", "fp32")):
        yield Way(tied=tied, fsdp=False, precision=precision)
        yield Way(tied=tied, fsdp=True, precision=precision)
        yield Way(tied=tied, fsdp=True, precision=precision, checkpointing=True)
        for fsdp, mode in itertools.product((False, True), WORKSPACES):
            yield Way(tied=tied, fsdp=fsdp, precision=precision, vocab=2, mode=mode)


class Counted(TorchDispatchMode):
    """Within it collectives are counted. `received`: bytes that this rank receives at the least."""

    def __init__(self) -> None:
        super().__init__()
        self.received = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            self.received += received_bytes(func.name().removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))


def received_bytes(name: str, args: tuple[Any, ...]) -> float:
    """A sum over ranks is a scatter of parts that are summed, and a gathering of the sums."""
    if name == "_allgather_base_":
        gathered, own = args[:2]
        return float(gathered.nbytes - own.nbytes)
    if name == "_reduce_scatter_base_":
        own, parts = args[:2]
        return float(parts.nbytes - own.nbytes)
    if name == "allreduce_":
        (tensor,) = args[0]
        size = dist.ProcessGroup.unbox(args[1]).size()
        return 2 * tensor.nbytes * (size - 1) / size
    raise AssertionError(f"c10d::{name} is not counted")


def step(way: Way, ranks: Ranks) -> float:
    model = tiny_model("qwen3", seed=3, tie_word_embeddings=way.tied, num_hidden_layers=3)
    student = prepare_student(model, None, source="qwen3")
    shard, first, last = None, 0, TOKENIZER_VOCAB
    if way.vocab > 1:
        assert ranks.vocab_mesh is not None
        shard = shard_vocabulary(student, VocabGroup.of(ranks.vocab_mesh))
        first, last = shard.start, shard.stop
    dtype = torch.bfloat16 if way.precision == "bf16" else torch.float32
    module = DistilledStudent(
        model,
        student.head_spec,
        loss=KDLoss("forward_kl", kd_weight=0.7, ce_weight=0.3, workspace_bytes=WORKSPACES[way.mode]),
        teacher_head=Head(weight=torch.randn(TOKENIZER_VOCAB, TEACHER_WIDTH)[first:last].to(dtype), vocab_start=first),
        precision=way.precision,  # type: ignore[arg-type]
        gradient_checkpointing=way.checkpointing,
        vocab=shard,
    )
    if way.fsdp:
        shard_fully(
            module,
            model,
            ranks,
            mixed_precision=way.precision == "bf16",
            reshard_after_forward=True,
            kept=() if shard is None else shard.parameters,
        )
    shares = Shares(module, ranks, vocab={} if shard is None else dict.fromkeys(shard.parameters, shard.num_columns))
    module.train()
    with Counted() as counted:
        for _ in range(NUM_MICROBATCHES):
            ids_BS = torch.randint(1, TOKENIZER_VOCAB, (SEQUENCES, TOKENS))
            out = module(
                input_ids=ids_BS,
                position_ids=torch.arange(TOKENS).expand_as(ids_BS),
                labels=ids_BS.flatten(),
                row_index=torch.arange(ids_BS.numel()),
                teacher_hidden=torch.randn(ids_BS.numel(), TEACHER_WIDTH).to(dtype),
            )
            out.loss.backward()
        shares.collect_gradients()
    return counted.received


def main() -> None:
    torch.set_num_threads(1)
    launch = launched()
    assert launch is not None
    worlds = {
        vocab: Ranks(launch, device=torch.device("cpu"), timeout_s=120, vocab_parallel=vocab, wants_groups=True)
        for vocab in (1, 2)
    }
    found = {way.name: step(way, worlds[way.vocab]) for way in ways()}
    if launch.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    worlds[1].part()


if __name__ == "__main__":
    main()
