"""Runs over UCX within a host: found without being asked for, and a teacher's end noticed over each of its transports.

That the curve is the one of the other transports, to the bit: tests/system/test_layouts.py.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.processes import Command, Student, Teacher
from tests.ucx.conftest import UCX_WAYS, Inputs


@pytest.fixture
def processes() -> Iterator[list[Command]]:
    """What a test appends here is gone after it."""
    started: list[Command] = []
    yield started
    for command in started:
        command.end()


def start(
    inputs: Inputs, processes: list[Command], cwd: Path, *arguments: object, env: dict[str, str]
) -> tuple[Teacher, Student]:
    """A teacher that offers nothing but ucx, and its student."""
    teacher = Teacher(inputs.teacher, "--transport", "ucx", cwd=cwd, env=env)
    processes.append(teacher)
    student = Student(
        *("--student", inputs.student, "--data", inputs.data, "--teacher", teacher.endpoint),
        *("--batch-size", 4, "--max-length", 48, "--precision", "fp32", "--deterministic", "--threads", 1, *arguments),
        out=cwd / "out",
        cwd=cwd,
        env=env,
    )
    processes.append(student)
    return teacher, student


def test_a_teacher_that_offers_nothing_but_ucx_is_used_by_a_student_that_was_told_nothing(
    inputs: Inputs, processes: list[Command], tmp_path: Path
) -> None:
    _, student = start(inputs, processes, tmp_path, "--steps", 2, env={})
    student.succeed()
    assert list(student.summary["transports"].values()) == ["ucx"]
    assert "transport ucx (auto: nothing else is left; not shm (" in student.errors


@pytest.mark.parametrize(
    ("way", "number"),
    [
        ("tcp", signal.SIGKILL),
        ("shared memory", signal.SIGSTOP),
        pytest.param("tcp", signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param("shared memory", signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_a_run_ends_with_exit_3_and_a_checkpoint_when_its_only_teacher_is_killed_or_stopped(
    inputs: Inputs, processes: list[Command], tmp_path: Path, way: str, number: signal.Signals
) -> None:
    # The second: long enough for the first handshake on a machine that has other work.
    timeouts = ("--peer-timeout", 3, "--teacher-timeout", 15)
    teacher, student = start(inputs, processes, tmp_path, "--steps", 100_000, *timeouts, env=UCX_WAYS[way])
    student.until_step(5)
    teacher.send(number)
    assert student.wait() == 3, student.tail()
    assert student.checkpoints
