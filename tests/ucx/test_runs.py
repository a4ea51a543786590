"""Distillation over each of UCX's transports within a host: the same curve, and a teacher's end is noticed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.ucx.conftest import NUM_STEPS, UCX_WAYS, Inputs, Start, curve, serve, train, transports

#: Whole runs of teacher and student processes: minutes.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def endpoint(start_shared: Start, inputs: Inputs) -> Iterator[str]:
    """Of a teacher that offers every transport."""
    teacher, endpoint = serve(start_shared, inputs, env={})
    yield endpoint
    assert teacher.process.poll() is None, teacher.log


@pytest.fixture(scope="module")
def shm_curve(start_shared: Start, inputs: Inputs, endpoint: str) -> list[dict[str, Any]]:
    student = train(start_shared, inputs, "--teacher", endpoint, "--transport", "shm", name="shm", env={})
    assert student.wait() == 0, student.log
    assert transports(student) == ["shm"]
    return curve(student)


@pytest.mark.parametrize("way", UCX_WAYS)
def test_the_curve_over_ucx_is_the_one_over_shm_to_the_bit(
    start: Start, inputs: Inputs, endpoint: str, shm_curve: list[dict[str, Any]], way: str
) -> None:
    # A student that knows but one way leaves the teacher no other.
    student = train(start, inputs, "--teacher", endpoint, "--transport", "ucx", name="student", env=UCX_WAYS[way])
    assert student.wait() == 0, student.log
    assert transports(student) == ["ucx"]
    assert len(curve(student)) == NUM_STEPS
    assert curve(student) == shm_curve


def test_a_teacher_that_offers_nothing_but_ucx_is_used_by_a_student_that_was_told_nothing(
    start: Start, inputs: Inputs
) -> None:
    _, endpoint = serve(start, inputs, "--transport", "ucx", env={})
    student = train(start, inputs, "--teacher", endpoint, "--steps", 2, name="student", env={})
    assert student.wait() == 0, student.log
    assert transports(student) == ["ucx"]


@pytest.mark.parametrize(
    ("way", "number"),
    [
        ("tcp", signal.SIGKILL),
        ("shared memory", signal.SIGSTOP),
        pytest.param("tcp", signal.SIGSTOP),
        pytest.param("shared memory", signal.SIGKILL),
    ],
)
def test_a_run_ends_with_exit_3_and_a_checkpoint_when_its_only_teacher_is_killed_or_stopped(
    start: Start, inputs: Inputs, way: str, number: signal.Signals
) -> None:
    env = UCX_WAYS[way]
    teacher, endpoint = serve(start, inputs, env=env)
    student = train(
        start,
        inputs,
        *("--teacher", endpoint, "--transport", "ucx", "--steps", 100_000),
        # Long enough for the first handshake on a machine that has other work.
        *("--peer-timeout", 3, "--teacher-timeout", 20),
        name="student",
        env=env,
    )
    metrics = student.cwd / "out" / "metrics.jsonl"
    student.until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 5, "step 5")
    teacher.process.send_signal(number)
    assert student.wait() == 3, student.log
    assert list((student.cwd / "out" / "checkpoints").glob("step-*"))
