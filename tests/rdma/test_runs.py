"""Teacher and trainer as processes with RDMA between them: the curve of shm, and a teacher's end is noticed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.rdma.devices import RC, RUNS
from tests.rdma.forks import Forked
from tests.rdma.runs import NUM_STEPS, Inputs, Student, Teacher

Start = Callable[..., Any]


def test_a_distillation_over_rc_has_the_curve_of_shm_to_the_bit(
    start: Start, inputs: Inputs, say: Callable[[str], None]
) -> None:
    teacher = start(Teacher, inputs, name="teacher", env=RUNS.teacher_env(RC))
    endpoint = teacher.until_ready()
    assert "ucx+rdma" in teacher.log, "between machines, auto would take it"
    runs, sent = {}, {}
    for name in ("shm", "ucx"):
        before = RUNS.sent()
        flags = ("--teacher", endpoint, "--transport", name)
        runs[name] = start(Student, inputs, *flags, name=name, env=RUNS.student_env(RC))
        assert runs[name].wait() == 0, runs[name].log
        assert runs[name].transports == [name]
        sent[name] = RUNS.sent() - before
    assert len(runs["ucx"].curve) == NUM_STEPS
    assert runs["ucx"].curve == runs["shm"].curve
    payload_bytes = runs["ucx"].state_bytes
    say(f"distillation: {payload_bytes} bytes of states; over shm {sent['shm']}, over rc {sent['ucx']}")
    assert sent["shm"].packets == 0
    assert sent["ucx"].holds(payload_bytes)


def expect_lost(student: Student) -> None:
    """Exit 3, with a checkpoint, although the teacher said nothing of its end."""
    assert student.wait() == 3, student.log
    assert student.checkpoints
    assert "Traceback" not in student.log


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["SIGKILL", "SIGSTOP"])
def test_a_run_whose_teacher_is_killed_or_stopped_in_the_middle_of_a_transfer_ends_with_exit_3(
    start: Start, inputs: Inputs, number: signal.Signals
) -> None:
    teacher = start(Teacher, inputs, name="teacher", env=RUNS.teacher_env(RC))
    student = start(
        *(Student, inputs, "--teacher", teacher.until_ready(), "--transport", "ucx", "--steps", 100_000),
        *("--peer-timeout", 15, "--teacher-timeout", 60),
        name="student",
        env=RUNS.student_env(RC),
    )
    student.until(lambda: student.steps_taken >= 2, "step 2")
    # A fill takes a second now, and what waits is a fifth of one: it is on its way.
    with RUNS.disturbed("rate", "3mbit"):
        student.until(lambda: RUNS.waiting_bytes() >= 65536, "a fill was in the cable")
        teacher.send(number)
        expect_lost(student)


def test_a_ring_that_has_all_it_asked_for_notices_that_its_teacher_was_killed(start: Start, inputs: Inputs) -> None:
    teacher = start(Teacher, inputs, name="teacher", env=RUNS.teacher_env(RC))
    flags = ("tests.rdma.idle_student", teacher.until_ready(), inputs.teacher)
    student = start(Forked, *flags, name="student", env=RUNS.student_env(RC))
    student.until((student.cwd / "idle").exists, "it was idle")
    teacher.send(signal.SIGKILL)
    assert student.wait() == 0, student.log
