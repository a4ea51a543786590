"""Distillation over each of UCX's transports within a host: the same curve, and a teacher's end is noticed."""

from __future__ import annotations

import signal

import pytest

from tests.ucx.conftest import NUM_STEPS, UCX_WAYS, Inputs, Start, curve, serve, train, transports


@pytest.mark.parametrize("way", UCX_WAYS)
def test_the_curve_over_ucx_is_the_one_over_shm_to_the_bit(start: Start, inputs: Inputs, way: str) -> None:
    env = UCX_WAYS[way]
    _, endpoint = serve(start, inputs, env=env)
    runs = {
        name: train(start, inputs, "--teacher", endpoint, "--transport", name, name=name, env=env)
        for name in ("shm", "ucx")
    }
    for name, student in runs.items():
        assert student.wait() == 0, student.log
        assert transports(student) == [name]
    assert len(curve(runs["ucx"])) == NUM_STEPS
    assert curve(runs["ucx"]) == curve(runs["shm"])


def test_a_teacher_that_offers_nothing_but_ucx_is_used_by_a_student_that_was_told_nothing(
    start: Start, inputs: Inputs
) -> None:
    _, endpoint = serve(start, inputs, "--transport", "ucx", env={})
    student = train(start, inputs, "--teacher", endpoint, "--steps", 2, name="student", env={})
    assert student.wait() == 0, student.log
    assert transports(student) == ["ucx"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("way", UCX_WAYS)
def test_a_run_ends_with_exit_3_and_a_checkpoint_when_its_only_teacher_is_killed_or_stopped(
    start: Start, inputs: Inputs, way: str, number: signal.Signals
) -> None:
    env = UCX_WAYS[way]
    teacher, endpoint = serve(start, inputs, env=env)
    student = train(
        start,
        inputs,
        *("--teacher", endpoint, "--transport", "ucx", "--steps", 100_000),
        *("--peer-timeout", 1, "--teacher-timeout", 1),
        name="student",
        env=env,
    )
    metrics = student.cwd / "out" / "metrics.jsonl"
    student.until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 5, "step 5")
    teacher.process.send_signal(number)
    assert student.wait() == 3, student.log
    assert list((student.cwd / "out" / "checkpoints").glob("step-*"))
