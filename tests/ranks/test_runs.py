"""Whole runs of `student.train` on several ranks: the same curve as alone, and the same end on every rank."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.ranks.conftest import StartWorld
from tests.system.conftest import Inputs
from tests.system.processes import curve

#: Rounding of fp32 sums in another order, over a whole run.
TOLERANCE = 1e-4
SUMS = ("lm_loss", "kd", "loss", "grad_norm")
EXACT = ("step", "epoch", "position", "rows", "samples", "lr")


def assert_same_curve(out: Path, wanted: list[dict[str, Any]]) -> None:
    found = curve(out)
    assert [[step[name] for name in EXACT] for step in found] == [[step[name] for name in EXACT] for step in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        for name in SUMS:
            assert math.isclose(ours[name], theirs[name], rel_tol=TOLERANCE), (ours["step"], name)


@pytest.mark.case(41)
@pytest.mark.case(42)
@pytest.mark.case(43)
@pytest.mark.parametrize(
    ("size", "accum", "flags"),
    [
        pytest.param(2, 1, (), id="replicated"),
        pytest.param(2, 2, ("--fsdp", "--gradient-checkpointing"), id="fsdp"),
        pytest.param(2, 1, ("--vocab-parallel", 2), id="vocabulary", marks=pytest.mark.slow),
        pytest.param(4, 1, ("--fsdp", "--vocab-parallel", 2), id="fsdp and vocabulary", marks=pytest.mark.slow),
    ],
)
def test_ranks_train_as_one_process_does(
    one_rank_curve: list[dict[str, Any]],
    endpoint: str,
    start_world: StartWorld,
    size: int,
    accum: int,
    flags: tuple[object, ...],
) -> None:
    """Cases 41 and 42 among it: in the seventh step two samples are left, so that some rank has none."""
    world = start_world("--teacher", endpoint, *flags, size=size, accum=accum)
    world.succeed()
    assert_same_curve(world.out, one_rank_curve)
    assert world.summary["ending"] == "finished"
    assert world.summary["ranks"] == size
    model = transformers.AutoModelForCausalLM.from_pretrained(world.out / "model")
    assert model.config.vocab_size == model.get_output_embeddings().weight.shape[0]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="a teacher on each", marks=pytest.mark.slow),
        pytest.param(("--fsdp", "--ring-depth", 2), id="one cut over them"),
    ],
)
def test_a_teacher_in_the_ranks_own_processes_gives_the_same_curve(
    one_rank_curve: list[dict[str, Any]], inputs: Inputs, start_world: StartWorld, flags: tuple[object, ...]
) -> None:
    """With FSDP the teacher is cut too, and the ranks make its passes together, those without a row with them."""
    world = start_world("--layout", "colocated", "--teacher", inputs.teacher, *flags, size=2, accum=2)
    world.succeed()
    assert_same_curve(world.out, one_rank_curve)
