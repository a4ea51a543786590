"""A step whose gradient is not finite on one rank is left out by all of them, or ends all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.poisoned import NUM_SAMPLES, POISONED_SAMPLE, build_poisoned_teacher, write_poisoned_data
from tests.ranks.conftest import StartWorld
from tests.system.conftest import Start
from tests.system.processes import check_refusal

STEP = 4  # samples of all ranks


@pytest.mark.parametrize("flags", [(), ("--fsdp",), ("--vocab-parallel", 2)], ids=["plain", "fsdp", "vocabulary"])
def test_all_ranks_leave_the_same_step_out_or_end(
    tmp_path: Path, start_teacher: Start, start_world: StartWorld, flags: tuple[object, ...]
) -> None:
    teacher = start_teacher(model=build_poisoned_teacher(tmp_path / "teacher"))
    common = (
        *("--data", write_poisoned_data(tmp_path / "ids.jsonl"), "--teacher", teacher.endpoint, *flags),
        *("--steps", NUM_SAMPLES // STEP, "--batch-size", STEP // 2),
    )
    world = start_world(*common, size=2)
    assert world.wait() == [1, 1]
    check_refusal(world.first, 1, "the teacher's states or logits are not finite", "--max-left-out 1")
    taken = len((world.out / "metrics.jsonl").read_text().splitlines())
    resumed = start_world(*common, "--resume", "--max-left-out", 1, size=2)
    resumed.succeed()
    steps = [json.loads(line) for line in (world.out / "metrics.jsonl").read_text().splitlines()]
    assert [step["samples_left_out"] for step in steps] == [STEP if step["step"] == taken + 1 else 0 for step in steps]
    assert len(steps) == NUM_SAMPLES // STEP
    summary = json.loads((world.out / "summary.json").read_text())
    assert (summary["samples_skipped"], summary["samples_trained"]) == ({"not_finite": STEP}, NUM_SAMPLES - STEP)
    assert str(POISONED_SAMPLE) in resumed.first.errors.split("samples [")[1].split("]")[0]
