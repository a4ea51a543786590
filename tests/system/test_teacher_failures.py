"""R5: teachers that are there and no use. The run ends with a checkpoint, exit code 3, and what each of them said."""

from __future__ import annotations

import re
import signal
from typing import Any

import pytest

from tests.system.conftest import NUM_STEPS, Inputs, Start
from tests.system.processes import Student, curve, parking

FAILING = "tests.system.failing_teacher"


def check_lost(student: Student) -> str:
    """It ended with exit code 3 and a checkpoint of the last step taken; returns its line of error."""
    assert student.wait() == 3, student.tail()
    assert "Traceback" not in student.errors
    taken = student.steps_taken
    assert 0 < taken < NUM_STEPS, "it never goes on without its teacher"
    assert student.checkpoints == [f"step-{taken:08d}"]
    summary = student.summary
    assert summary["ending"].startswith("TeacherLost: ")
    assert (summary["steps"], summary["samples_trained"]) == (taken, curve(student.out)[-1]["position"])
    assert summary["samples_trained"] < summary["samples_expected"]
    assert not (student.out / "model").exists()
    (said,) = [line for line in student.errors.splitlines() if line.startswith("student.train: error: ")]
    return said


def test_the_message_names_every_replica_with_its_own_last_error(
    endpoint: str, quiet_curve: list[dict[str, Any]], start_teacher: Start, start_student: Start
) -> None:
    killed, stopped = start_teacher(), start_teacher()
    student = start_student(
        *("--teacher", killed.endpoint, stopped.endpoint),
        *("--request-timeout", 1, "--peer-timeout", 1, "--teacher-timeout", 6),
        command=parking(10),
    )
    student.until_parked_at(10)
    student.until(lambda: student.errors.count("replica up: ") >= 2, "both are there")
    killed.send(signal.SIGKILL)
    stopped.send(signal.SIGSTOP)
    student.drive_on()
    said = check_lost(student)
    assert re.search(rf"{killed.endpoint} is down, last error: .*(closed|gone|ended)", said), said
    assert re.search(rf"{stopped.endpoint} is .*(not heard from for 1 s|was not filled within 1 s)", said), said
    resumed = start_student("--teacher", endpoint, "--resume")
    resumed.succeed()
    assert curve(resumed.out) == quiet_curve


def test_a_wedged_replica_that_answers_every_ping_is_named(start_teacher: Start, start_student: Start) -> None:
    """It can't keep the run waiting by being alive."""
    wedged = start_teacher(command=(FAILING, "teacher.serve", "wedged", "20"))
    student = start_student(
        *("--teacher", wedged.endpoint, "--request-timeout", 1, "--peer-timeout", 60, "--teacher-timeout", 8)
    )
    said = check_lost(student)
    assert re.search(rf"{wedged.endpoint} is \w+, last error: .*seq \d+ was not filled within 1 s", said), said


def test_a_wedged_replica_costs_nothing_while_another_serves(
    endpoint: str, quiet_curve: list[dict[str, Any]], start_teacher: Start, start_student: Start
) -> None:
    wedged = start_teacher(command=(FAILING, "teacher.serve", "wedged", "0"))
    student = start_student("--teacher", wedged.endpoint, endpoint, "--request-timeout", 1, command=parking(0))
    student.until_parked_at(0)
    student.until(lambda: f"replica up: {wedged.endpoint}" in student.errors, "the wedged one is there")
    student.drive_on()
    student.succeed()
    assert curve(student.out) == quiet_curve
    assert f"{wedged.endpoint} stalled: seq " in student.errors


def test_a_replica_whose_model_fails_is_named_with_the_models_error(start_teacher: Start, start_student: Start) -> None:
    failing = start_teacher(command=(FAILING, "teacher.serve", "raises", "20"))
    student = start_student("--teacher", failing.endpoint, "--teacher-timeout", 3)
    said = check_lost(student)
    assert f"{failing.endpoint} is up, last error: refused seq " in said
    assert "(failed): RuntimeError: the device is out of memory" in said
    assert failing.poll() is None, "it goes on serving those whose requests do not fail"


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raises", "the teacher in this process failed: RuntimeError: the device is out of memory and says so"),
        ("breaks", "it said goodbye: a request that nobody could have meant"),
    ],
)
def test_a_colocated_teacher_that_fails_ends_the_run_at_once_with_its_own_error(
    inputs: Inputs, quiet_curve: list[dict[str, Any]], start_student: Start, how: str, text: str
) -> None:
    """It does not wait for a teacher to come back that can't."""
    arguments = ("--teacher", inputs.teacher, "--layout", "colocated", "--teacher-timeout", 100000)
    student = start_student(*arguments, command=(FAILING, "student.train", how, "21"))
    assert text in check_lost(student)
    resumed = start_student(*arguments, "--resume")
    resumed.succeed()
    assert curve(resumed.out) == quiet_curve


def test_a_colocated_teacher_that_fails_before_the_first_step_is_said_too(inputs: Inputs, start_student: Start) -> None:
    student = start_student(
        *("--teacher", inputs.teacher, "--layout", "colocated", "--teacher-timeout", 100000),
        command=(FAILING, "student.train", "breaks", "0"),
    )
    assert student.wait() == 3
    assert "it said goodbye: a request that nobody could have meant" in student.errors.splitlines()[-1]
