"""R5 to R8 on real processes: replicas and a student come and go at random, and the curve does not notice.

That late writes reach no live slot (R4) is not for a curve to show: see test_fences."""

from __future__ import annotations

import random
import re
import signal
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import witness
from tests.chaos.conftest import WAYS, Inputs, Quiet, Start
from tests.chaos.disturbance import Disturbance, Place, Trainer
from tests.system.processes import Command, Student, curve

pytestmark = pytest.mark.slow

NUM_STEPS, NUM_DEEDS = 200, 16


@pytest.mark.parametrize(
    ("way", "num_students"),
    [("shm", 1), ("zmq", 2), ("ucx over tcp", 1), ("ucx over shared memory", 2)],
)
def test_the_curve_survives_whatever_happens_to_replicas_and_students(
    inputs: Inputs,
    quiet_curve: Quiet,
    start_teacher: Start,
    start_student: Start,
    tmp_path: Path,
    processes: list[Command],
    chaos_seed: int,
    way: str,
    num_students: int,
) -> None:
    print(f"TEST_SEED={chaos_seed}")
    quiet_curve(0, 5)  # tokenizes the data once: a trainer that does that itself keeps a thread of the library's
    flags, env = WAYS[way]
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    env = {**env, "XDG_RUNTIME_DIR": str(runtime)}
    dice = random.Random(f"{chaos_seed} {way}")

    def serve(**options: Any) -> Any:
        # So short that a student that is stopped for a while is dropped meanwhile.
        return start_teacher("--student-timeout", 3, env=env, **options)

    # The last two are addresses at which there is nobody at first: one joins meanwhile, one when all is over.
    *places, added, newcomer = [Place(serve) for _ in range(5)]
    endpoints = [place.endpoint for place in (*places, added, newcomer)]

    def train(name: str, seed: int, *more: object) -> Student:
        return start_student(
            *("--teacher", *endpoints, *flags, "--checkpoint-every", 10),
            *("--request-timeout", 2, "--peer-timeout", 2, "--teacher-timeout", 100, *more),
            out=name,
            seed=seed,
            env=env,
        )

    for place in places:
        place.begin()
    trainers = [Trainer(train, seed, f"run-{seed}", train(f"run-{seed}", seed)) for seed in range(num_students)]
    disturbance = Disturbance(dice, [*places, added], trainers)
    disturbance.run(NUM_DEEDS)
    print(f"deeds: {disturbance.deeds}")
    while any(trainer.life.steps_taken < NUM_STEPS for trainer in trainers):
        disturbance.let_pass(steps=10, patience_s=1.0)

    lost = sum(command.errors.count("replica lost: ") for command in processes if isinstance(command, Student))
    assert lost >= len(places), "else nothing was disturbed"
    newcomer.begin()
    teachers = check_that_no_more_is_held_than_by_newcomers(train, trainers, [*places, added, newcomer], len(endpoints))
    for trainer in trainers:
        taken = len(curve(trainer.life.out))
        assert taken >= NUM_STEPS
        assert curve(trainer.life.out) == quiet_curve(trainer.seed, taken)
    for teacher in teachers:
        teacher.send(signal.SIGTERM)
        assert teacher.wait() == 0, teacher.tail()
    check_that_nothing_is_left(tmp_path, runtime, [place.port for place in places], processes)


def check_that_no_more_is_held_than_by_newcomers(
    train: Any, trainers: list[Trainer], places: list[Place], num_replicas: int
) -> list[Any]:
    """All that lived through it against a student and a teacher that did not; ends the students. The teachers."""
    teachers = [place.life for place in places]
    for teacher in teachers:
        teacher.until_ready()
    fresh = train("fresh", 100)
    fresh.until(
        lambda: len(set(re.findall(r"replica up: (\S+)", fresh.errors))) == num_replicas, "it knows all replicas"
    )
    fresh.until_step(5)  # and has opened its files
    for trainer in trainers:
        until_it_holds_no_more(trainer.life, fresh.pid)
    for student in (fresh, *(trainer.life for trainer in trainers)):
        student.send(signal.SIGTERM)
        assert student.wait() == 128 + signal.SIGTERM, student.tail()
    *old, new = teachers
    new.until(lambda: not witness.slots_of(new.pid), "it let go of the student's slots")
    for teacher in old:
        until_it_holds_no_more(teacher, new.pid)
    return teachers


def until_it_holds_no_more(command: Command, newcomer: int) -> None:
    """What is in the middle of being closed goes by itself, and so does what a newcomer is just without; what is left
    behind does not."""

    def excess() -> Counter[str]:
        return witness.held(command.pid) - witness.held(newcomer)

    try:
        command.until(lambda: not excess(), "it let go")
    except AssertionError as error:
        raise AssertionError(f"left behind: {excess()}; held: {witness.held(command.pid)}") from error


def check_that_nothing_is_left(cwd: Path, runtime: Path, ports: list[str], commands: list[Command]) -> None:
    assert all(command.poll() is not None for command in commands)
    assert witness.processes_in(cwd) == set()
    assert witness.segments_made_by(command.pid for command in commands) == []
    # A student that was killed in the middle of a handshake leaves its directory to the next one's sweep.
    assert len(list(runtime.iterdir())) <= 1
    for port in ports:
        with socket.create_server(("127.0.0.1", int(port))):  # nobody listens there
            pass
