"""A step whose gradient is not finite: who is to blame is said, and the run can go on without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.poisoned import NUM_SAMPLES, POISONED_SAMPLE, build_poisoned_teacher, write_poisoned_data
from tests.system.conftest import Start
from tests.system.processes import Student, check_refusal

BATCH = 4


@pytest.fixture(scope="module")
def teacher_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_poisoned_teacher(tmp_path_factory.mktemp("poisoned") / "teacher")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_poisoned_data(tmp_path_factory.mktemp("ids") / "train.jsonl")


def lines(student: Student) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    text = (student.out / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


@pytest.mark.parametrize("divergence", ["forward_kl", "tvd"])
def test_states_that_are_not_finite_end_the_run_and_it_can_go_on_without_them(
    teacher_model: Path, data: Path, start_teacher: Start, start_student: Start, divergence: str
) -> None:
    teacher = start_teacher(model=teacher_model)
    flags = ("--data", data, "--steps", NUM_SAMPLES // BATCH, "--batch-size", BATCH, "--grad-accum", 1)
    flags += ("--teacher", teacher.endpoint, "--divergence", divergence)
    student = start_student(*flags)
    check_refusal(
        student, 1, "the gradient norm is nan", "the teacher's states or logits are not finite", "--max-left-out 1"
    )
    taken = len(lines(student))
    assert taken < NUM_SAMPLES // BATCH
    assert f"{POISONED_SAMPLE}" in student.errors.splitlines()[-1].split("samples [")[1].split("]")[0]
    again = start_student(*flags, "--resume")
    check_refusal(again, 1, f"step {taken + 1}: ", "the step was not taken")
    resumed = start_student(*flags, "--resume", "--max-left-out", 1)
    resumed.succeed()
    steps = lines(resumed)
    assert [step["step"] for step in steps] == list(range(1, NUM_SAMPLES // BATCH + 1))
    assert [step["samples_left_out"] for step in steps] == [BATCH * (step["step"] == taken + 1) for step in steps]
    assert (steps[taken]["kd"], steps[taken]["grad_norm"]) == (None, None)
    assert resumed.summary["samples_skipped"] == {"not_finite": BATCH}
    assert resumed.summary["samples_trained"] == NUM_SAMPLES - BATCH
    assert resumed.summary["samples_expected"] == NUM_SAMPLES
    quiet = start_student(*flags, "--max-left-out", 1, out="at-once")
    quiet.succeed()
    assert (quiet.out / "model" / "model.safetensors").read_bytes() == (
        resumed.out / "model" / "model.safetensors"
    ).read_bytes(), "whether it was resumed or not"
