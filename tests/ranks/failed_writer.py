"""`python -m tests.ranks.failed_writer ROOT`: a rank whose checkpoint fails in the background, and what that leaves."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
import transformers

from student.checkpoint import TrainState
from student.parallel.checkpoint import BackgroundWriter, CheckpointParts
from student.parallel.ranks import Ranks, launched
from tests.ranks.failing import fill_disk

NUM_VALUES = 10_000


def write_two(root: Path, writer: BackgroundWriter) -> list[weakref.ref[torch.Tensor]]:
    """The first fails, which the second finds; returns the host copies of both."""
    copies: list[weakref.ref[torch.Tensor]] = []
    stage = CheckpointParts.staged

    def watched(parts: CheckpointParts) -> CheckpointParts:
        staged = stage(parts)
        copies.append(weakref.ref(staged.tensors["model/weight"]))
        return staged

    CheckpointParts.staged = watched  # type: ignore[method-assign]
    live: Any = CheckpointParts({"model/weight": torch.zeros(NUM_VALUES)}, transformers.LlamaConfig(), None, None)
    for step in (1, 2):
        state = TrainState(step=step, position=step, config_hash="", rng=())
        writer.write(root, state, parts=live, keep=2)
    writer.finish()
    return copies


def main() -> None:
    launch = launched()
    assert launch is not None
    ranks = Ranks(launch, device=torch.device("cpu"), timeout_s=60.0)
    writer = BackgroundWriter(ranks)
    root = Path(sys.argv[1])
    gc.disable()
    if ranks.is_first:  # what is whole on both is written by the first
        fill_disk(after=0, until=1)
    failed, whole = write_two(root, writer)
    assert not (root / "step-00000001").exists()
    assert (root / "step-00000002").exists()
    # Without a collection: of the next one there is not to be a third copy.
    assert failed() is None, gc.get_referrers(failed())
    ranks.wait_for_all()
    gc.collect()
    assert whole() is None
    ranks.part()


if __name__ == "__main__":
    main()
