"""A teacher process that is to end does, whatever became of its threads; and a signal ends it at any moment."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.system.conftest import Start
from tests.system.processes import Teacher, check_refusal, curve

ENDING = "tests.system.ending_teacher"


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raises", "the thread that talks to students ended: Unspeakable; nothing is answered any more"),
        ("locked", "the thread that talks to students ended, and another one hangs: it ends as it is (Unspeakable)"),
    ],
)
def test_a_teacher_whose_io_thread_died_ends_and_its_students_go_to_others(
    quiet_curve: list[dict[str, Any]], start_teacher: Start, start_student: Start, how: str, text: str
) -> None:
    dying = start_teacher(command=(ENDING, how))
    student = start_student("--teacher", dying.endpoint, "--teacher-timeout", 100000)
    check_refusal(dying, 1, "teacher.serve: error: ", text)
    start_teacher("--listen", dying.endpoint)
    student.succeed()
    assert curve(student.out) == quiet_curve


def test_sigterm_ends_a_teacher_whose_forward_pass_never_returns(start_teacher: Start, start_student: Start) -> None:
    wedged = start_teacher(command=(ENDING, "wedged"))
    start_student("--teacher", wedged.endpoint)
    wedged.until(lambda: "wedged\n" in wedged.errors, "a pass began")
    wedged.send(signal.SIGTERM)
    check_refusal(wedged, 1, "teacher.serve: error: it was to end, and a thread of it hangs")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGHUP, 129), (signal.SIGTERM, 0), (signal.SIGINT, 0)], ids=lambda one: str(one)
)
def test_each_signal_drains_a_teacher(start_teacher: Start, number: signal.Signals, code: int) -> None:
    teacher = start_teacher()
    teacher.send(number)
    assert teacher.wait() == code, teacher.tail()
    assert teacher.errors.endswith("teacher.serve: draining\n")


def test_a_hangup_that_the_starter_ignores_does_not_end_a_teacher(start_teacher: Start) -> None:
    teacher = start_teacher(command=(ENDING, "nohup"))
    teacher.send(signal.SIGHUP)
    # Of two that wait the hangup comes first: it would decide the code.
    teacher.send(signal.SIGTERM)
    assert teacher.wait() == 0, teacher.tail()


@pytest.mark.parametrize("moment", ["import", "load"])
@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGINT, "interrupted"),
        (signal.SIGTERM, "stopped by SIGTERM"),
        (signal.SIGHUP, "stopped by SIGHUP"),
    ],
    ids=lambda one: one.name if isinstance(one, signal.Signals) else "",
)
def test_a_signal_during_the_start_ends_a_teacher_with_its_own_code_and_one_line(
    start_teacher: Start, moment: str, number: signal.Signals, words: str
) -> None:
    """No import that it broke is taken for another error."""
    teacher: Teacher = start_teacher(command=(ENDING, f"{moment}-{number:d}"), wait=False)
    assert teacher.wait() == 128 + number, teacher.tail()
    assert teacher.errors.splitlines()[-1] == f"teacher.serve: {words}"
    assert "Traceback" not in teacher.errors
    assert "error" not in teacher.errors
    assert not teacher.is_ready
