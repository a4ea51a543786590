"""R3: a bit that flips on a real link is seen, counted, logged once and asked for again; the curve does not notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.system.conftest import Start
from tests.system.processes import curve
from transport import registry


def test_flipped_bits_are_noticed_by_default_over_tcp_and_asked_for_again(
    tmp_path: Path, endpoint: str, quiet_curve: list[dict[str, Any]], start_student: Start
) -> None:
    """One in a piece of the head, then one in about every sixth fill: each document is a frame of its own."""
    notes = tmp_path / "notes"
    student = start_student(
        "--teacher", endpoint, "--transport", "zmq", command=("tests.system.flipping_student", "23", "2", str(notes))
    )
    student.succeed()
    assert curve(student.out) == quiet_curve
    num_flips = len(notes.read_bytes())
    assert num_flips >= 8
    summary = student.summary
    # What was flipped in an answer that the end of the run left unread is not counted.
    assert num_flips - 3 <= summary["drops"] <= num_flips
    assert summary["drops_by_cause"] == {"wrong_crc": summary["drops"]}
    assert summary["retries_by_cause"] == {"corrupt": summary["drops"]}
    said = [line for line in student.errors.splitlines() if "wrong_crc" in line]
    assert len(said) == 1, "logged once"
    assert "dropped an answer (wrong_crc, logged once): FillId" in said[0]
    assert "crc32c of the payload is" in said[0]


def test_with_checksums_off_the_same_bits_change_the_curve(
    tmp_path: Path, endpoint: str, quiet_curve: list[dict[str, Any]], start_student: Start
) -> None:
    """So it is the checksum that the test above rests on, and nothing else."""
    notes = tmp_path / "notes"
    student = start_student(
        *("--teacher", endpoint, "--transport", "zmq", "--crc", "off"),
        command=("tests.system.flipping_student", "23", "30", str(notes)),
    )
    student.succeed()
    assert len(notes.read_bytes()) >= 5
    assert student.summary["drops"] == 0
    assert curve(student.out) != quiet_curve


def test_a_damaged_head_is_noticed_even_with_checksums_off(tmp_path: Path, endpoint: str, start_student: Start) -> None:
    student = start_student(
        *("--teacher", endpoint, "--transport", "zmq", "--crc", "off"),
        command=("tests.system.flipping_student", "1000", "1", str(tmp_path / "notes")),
    )
    assert student.wait() == 1
    assert "student.train: error: the teacher's head hashes to" in student.errors
    assert not (student.out / "checkpoints").exists()


@pytest.mark.parametrize(("transport", "checked"), [("zmq", True), ("ucx", True), ("shm", False), ("local", False)])
def test_checksums_are_on_by_default_where_a_network_may_be_in_between(transport: str, checked: bool) -> None:
    assert registry.load(transport).capabilities().crc_by_default is checked
