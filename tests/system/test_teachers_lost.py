"""R5, R6, R8: teachers are killed, stopped, restarted and drained during a run, and its curve stays the same."""

from __future__ import annotations

import random
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.witness import held, listening_ports, owners_of, slots_of
from tests.ports import free_port
from tests.seeds import seeds
from tests.system.conftest import NUM_STEPS, Start
from tests.system.processes import curve, holding

#: Enough steps are left after it for the loss of a teacher to be felt, whatever is prefetched.
EARLY = 8

NUM_DEEDS = 15


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_the_only_teacher_is_killed_and_restarted_at_its_port(
    quiet_curve: list[dict[str, Any]], start_teacher: Start, start_student: Start, transport: str
) -> None:
    port = free_port()
    teacher = start_teacher(port=port)
    student = start_student("--teacher", f"tcp://127.0.0.1:{port}", "--transport", transport, command=holding(EARLY))
    student.until_held_at(EARLY)
    teacher.send(signal.SIGKILL)
    assert teacher.wait() == -signal.SIGKILL
    student.let_go()
    student.until(lambda: "replica lost" in student.errors, "it has noticed")
    start_teacher(port=port)
    student.succeed()
    assert curve(student.out) == quiet_curve


def test_one_of_two_teachers_is_killed(
    endpoint: str, quiet_curve: list[dict[str, Any]], start_teacher: Start, start_student: Start
) -> None:
    doomed = start_teacher()
    student = start_student("--teacher", f"{doomed.endpoint},{endpoint}", command=holding(EARLY))
    student.until_held_at(EARLY)
    doomed.send(signal.SIGKILL)
    doomed.wait()
    student.let_go()
    student.succeed()
    assert curve(student.out) == quiet_curve
    assert f"replica lost: {doomed.endpoint}" in student.errors


@pytest.mark.parametrize("transport", ["shm", "zmq"])
@pytest.mark.case(62)
def test_a_stopped_teacher_loses_its_requests_to_the_other_one(
    endpoint: str, quiet_curve: list[dict[str, Any]], start_teacher: Start, start_student: Start, transport: str
) -> None:
    """Case 62. It is woken up while the run goes on; that what it still writes reaches no live slot (R4) is seen in
    tests/chaos/test_fences.py."""
    stopped, turns = start_teacher(), (EARLY, 2 * EARLY, NUM_STEPS - 10)
    student = start_student(
        *("--teacher", stopped.endpoint, endpoint, "--transport", transport),
        *("--request-timeout", 0.5, "--peer-timeout", 2),
        command=("tests.system.dying_student", ",".join(("park-asked:0", *(f"stop-line:{step}" for step in turns)))),
    )
    student.until_parked_at(0)
    student.until(lambda: student.errors.count("replica up: ") >= 2, "both are there")
    stopped.send(signal.SIGSTOP)
    student.drive_on()
    for step, number in zip(turns, (signal.SIGCONT, signal.SIGSTOP, signal.SIGCONT), strict=True):
        student.until_held_at(step)
        stopped.send(number)
        student.let_go()
    student.succeed()
    assert curve(student.out) == quiet_curve
    assert student.summary["retries"] >= 1, "it was asked while it was stopped"


def test_a_teacher_that_stops_alone_ends_the_run_with_a_checkpoint_and_exit_3(
    quiet_curve: list[dict[str, Any]], start_teacher: Start, start_student: Start
) -> None:
    stopped = start_teacher()
    student = start_student(
        *("--teacher", stopped.endpoint, "--request-timeout", 1, "--peer-timeout", 1, "--teacher-timeout", 6),
        command=holding(EARLY),
    )
    student.until_held_at(EARLY)
    stopped.send(signal.SIGSTOP)
    student.let_go()
    assert student.wait() == 3
    assert re.search(rf"^student\.train: error: no replica has served.*{stopped.endpoint}", student.errors, re.M)
    assert "Traceback" not in student.errors
    taken = student.steps_taken
    assert EARLY <= taken < NUM_STEPS, "it never goes on without its teacher"
    assert student.checkpoints == [f"step-{taken:08d}"]
    assert student.summary["ending"].startswith("TeacherLost: ")
    assert student.summary["steps"] == taken
    assert not (student.out / "model").exists()

    stopped.send(signal.SIGCONT)
    resumed = start_student("--teacher", stopped.endpoint, "--resume")
    resumed.succeed()
    assert curve(resumed.out) == quiet_curve


def test_a_teacher_that_is_asked_to_end_finishes_what_it_holds(
    endpoint: str, quiet_curve: list[dict[str, Any]], start_teacher: Start, start_student: Start
) -> None:
    leaving = start_teacher()
    student = start_student("--teacher", leaving.endpoint, endpoint, command=holding(EARLY))
    student.until_held_at(EARLY)
    leaving.send(signal.SIGTERM)
    assert leaving.wait() == 0
    assert "Traceback" not in leaving.errors
    student.let_go()
    student.succeed()
    assert curve(student.out) == quiet_curve
    assert f"replica lost: {leaving.endpoint}: it said goodbye" in student.errors
    assert student.summary["drops"] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_teacher_ends_at_once_when_asked(start_teacher: Start, number: signal.Signals) -> None:
    teacher = start_teacher()
    teacher.send(number)
    assert teacher.wait() == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(2))
def test_the_curve_survives_deaths_stops_and_departures_at_random(
    endpoint: str, start_teacher: Start, start_student: Start, seed: int
) -> None:
    print(f"seed {seed}")
    dice = random.Random(seed)
    ports = [free_port(), free_port()]
    teachers = [start_teacher(port=port) for port in ports]
    student = start_student(
        *("--teacher", ",".join(f"tcp://127.0.0.1:{port}" for port in ports), "--steps", 100_000),
        *("--request-timeout", 1, "--peer-timeout", 1, "--transport", dice.choice(["shm", "zmq"])),
    )
    for _ in range(NUM_DEEDS):
        which = dice.randrange(2)
        number = dice.choice([signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
        teachers[which].send(number)
        if number == signal.SIGSTOP:
            student.until_step(student.steps_taken + dice.randrange(1, 5))
            teachers[which].send(signal.SIGCONT)
        else:
            teachers[which].wait()
            teachers[which] = start_teacher(port=ports[which])
        student.until_step(student.steps_taken + dice.randrange(1, 20))
    student.send(signal.SIGTERM)
    assert student.wait() == 128 + signal.SIGTERM, student.tail()
    taken = student.steps_taken
    quiet = start_student("--teacher", endpoint, "--steps", 100_000, out="quiet")
    quiet.until_step(taken)
    quiet.send(signal.SIGTERM)
    quiet.wait()
    assert curve(student.out) == curve(quiet.out)[:taken]


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_nothing_is_left_behind_when_both_sides_are_killed(
    start_teacher: Start, start_student: Start, tmp_path: Path, transport: str
) -> None:
    port, sockets = free_port(), tmp_path / "sockets"
    sockets.mkdir(mode=0o700)
    env = {"XDG_RUNTIME_DIR": str(sockets)}
    teacher = start_teacher(port=port, env=env)
    slots: set[int] = set()

    def kill_a_student(number: int) -> None:
        flags = ("--teacher", teacher.endpoint, "--transport", transport, "--steps", 100000)
        student = start_student(*flags, out=f"out-{number}", env=env)
        student.until_step(EARLY)
        held_slots = slots_of(student.pid)
        assert len(held_slots) == 5, "a memfd a slot"
        assert owners_of(held_slots) == {student.pid} | ({teacher.pid} if transport == "shm" else set())
        slots.update(held_slots)
        student.send(signal.SIGKILL)
        student.wait()
        teacher.until(lambda: not owners_of(slots), "it let go of the slots of a student that is gone")
        assert list(sockets.iterdir()) == []

    for number in range(2):  # whatever is made once and kept is there after the first
        kill_a_student(number)
        teacher.until(lambda: teacher.errors.count(" left: ") == number + 1, "it noticed that the student is gone")  # noqa: B023
    before = held(teacher.pid)
    kill_a_student(2)
    teacher.until(lambda: not held(teacher.pid) - before, f"it holds no more than {before} again")
    assert listening_ports(teacher.pid) == {int(port)}
    teacher.send(signal.SIGKILL)
    teacher.wait()
    assert owners_of(slots) == set()
    assert list(sockets.iterdir()) == []
    again = start_teacher(port=port, env=env)
    again.send(signal.SIGTERM)
    assert again.wait() == 0
