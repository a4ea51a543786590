"""Whole runs with keys, and with wrong ones: the curve, the exit codes, the lines that users read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.security.conftest import House
from tests.system.conftest import Start
from tests.system.processes import check_refusal, check_untouched, curve


def test_with_keys_the_curve_is_the_same_to_the_bit(
    house: House, start_teacher: Start, start_student: Start, quiet_curve: list[dict[str, Any]]
) -> None:
    """Over encrypted zmq, control plane and data; the other curve is of a run over shm without keys."""
    teacher = start_teacher("--auth", house.teacher.directory)
    student = start_student("--teacher", teacher.endpoint, "--transport", "zmq", "--auth", house.student.directory)
    student.succeed()
    assert curve(student.out) == quiet_curve
    assert student.summary["transports"] == {teacher.endpoint: "zmq"}
    assert "127.0.0.1 connects with the key student.pub" in teacher.errors


def test_a_key_that_the_teacher_does_not_trust_ends_with_2(
    house: House, strangers: House, start_teacher: Start, start_student: Start
) -> None:
    """The stranger knows the teacher's public key, which is no secret."""
    shutil.copy(house.teacher.directory / "public.key", strangers.student.directory / "peers" / "theirs.pub")
    (strangers.student.directory / "peers" / "teacher.pub").unlink()
    teacher = start_teacher("--auth", house.teacher.directory)
    student = start_student("--teacher", teacher.endpoint, "--auth", strangers.student.directory)
    key = strangers.student.public.decode()
    check_refusal(
        student, 2, f"{teacher.endpoint} does not trust this trainer's key {key}; allowed: ", "public.key copied"
    )
    check_untouched(student)
    assert f"refused 127.0.0.1: its public key {key} is not in {house.teacher.directory / 'peers'}" in teacher.errors
    assert "joined" not in teacher.errors


def test_a_teacher_with_another_key_ends_with_3_and_says_so(
    house: House, strangers: House, start_teacher: Start, start_student: Start
) -> None:
    teacher = start_teacher("--auth", strangers.teacher.directory)
    student = start_student("--teacher", teacher.endpoint, "--auth", house.student.directory, "--teacher-timeout", 8)
    check_refusal(
        student, 3, "no teacher answered within 8 s", f"does not own a key in {house.student.directory}/peers"
    )
    assert "no key exchange succeeded, with any key in" in student.errors
    check_untouched(student)


def test_a_trainer_without_keys_is_told_that_the_teacher_has_them(
    house: House, start_teacher: Start, start_student: Start
) -> None:
    teacher = start_teacher("--auth", house.teacher.directory)
    student = start_student("--teacher", teacher.endpoint)
    check_refusal(student, 2, f"{teacher.endpoint} was started with --auth, this trainer without it; allowed: both")
    check_untouched(student)


def test_a_trainer_with_keys_is_told_that_the_teacher_has_none(
    house: House, endpoint: str, start_student: Start
) -> None:
    student = start_student("--teacher", endpoint, "--auth", house.student.directory)
    check_refusal(student, 2, f"{endpoint} was started without --auth, this trainer with it; allowed: both, or neither")
    check_untouched(student)


def test_one_replica_with_other_keys_does_not_keep_the_run_from_the_others(
    house: House, strangers: House, start_teacher: Start, start_student: Start, quiet_curve: list[dict[str, Any]]
) -> None:
    right = start_teacher("--auth", house.teacher.directory)
    wrong = start_teacher("--auth", strangers.teacher.directory)
    student = start_student("--teacher", wrong.endpoint, right.endpoint, "--auth", house.student.directory)
    student.succeed()
    assert curve(student.out) == quiet_curve
    assert list(student.summary["transports"]) == [right.endpoint]


@pytest.mark.parametrize("arguments", [("--auth", "nowhere"), ("--auth", "nowhere", "--insecure")])
def test_keys_that_are_not_there_end_both_commands_with_2(
    arguments: tuple[str, ...], start_teacher: Start, start_student: Start
) -> None:
    said = "give one of them" if "--insecure" in arguments else "--auth nowhere: no such directory"
    check_refusal(start_teacher(*arguments, wait=False), 2, said)
    student = start_student("--teacher", "tcp://127.0.0.1:1", *arguments)
    check_refusal(student, 2, said)
    check_untouched(student)


def test_addresses_beyond_the_machine_need_keys_or_the_users_word(
    house: House, start_teacher: Start, start_student: Start, tmp_path: Path
) -> None:
    """At every listener: the teacher's port, and the trainer's for data."""
    said = "leaves this machine, and the connection is neither authenticated nor encrypted; allowed: a loopback address"
    check_refusal(start_teacher(host="0.0.0.0", wait=False), 2, "--listen tcp://0.0.0.0:*", said)
    check_refusal(
        start_student("--teacher", "tcp://192.0.2.1:5555", out="a"), 2, "--teacher tcp://192.0.2.1:5555", said
    )
    bound = start_student("--teacher", "tcp://127.0.0.1:1", "--bind-host", "192.0.2.1", out="b")
    check_refusal(bound, 2, "--bind-host tcp://192.0.2.1:*", said)
    teacher = start_teacher("--auth", house.teacher.directory, host="0.0.0.0")
    assert teacher.endpoint.startswith("tcp://0.0.0.0:")
