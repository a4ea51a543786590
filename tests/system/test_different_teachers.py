"""A run has one teacher model: which one is never left to who answers first."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tests.system.conftest import Start
from tests.system.processes import check_refusal, check_untouched, curve, holding
from tests.tiny_models import build_tiny_checkpoint


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("other") / "model", "qwen3", seed=9, hidden_size=48)


def test_a_run_does_not_begin_with_replicas_of_different_models(
    endpoint: str, other_model: Path, start_teacher: Start, start_student: Start
) -> None:
    other = start_teacher(model=other_model)
    student = start_student("--teacher", f"{endpoint},{other.endpoint}")
    check_refusal(student, 2, "the replicas serve different models: ", endpoint, other.endpoint, "allowed: one model")
    check_untouched(student)


def test_a_resumed_run_waits_for_its_own_teacher_whoever_answers_first(
    quiet_curve: list[dict[str, Any]], endpoint: str, other_model: Path, start_teacher: Start, start_student: Start
) -> None:
    student = start_student("--teacher", endpoint, "--checkpoint-every", 5, command=holding(7))
    student.until_held_at(7)
    student.send(signal.SIGTERM)
    student.let_go()
    assert student.wait() == 143
    other, port = start_teacher(model=other_model), free_port()
    resumed = start_student(
        *("--teacher", f"{other.endpoint},tcp://127.0.0.1:{port}", "--checkpoint-every", 5, "--resume")
    )
    resumed.until(lambda: "--resume: the teacher's fingerprint was " in resumed.errors, "the other one was refused")
    start_teacher(port=port)
    resumed.succeed()
    assert curve(student.out) == quiet_curve
