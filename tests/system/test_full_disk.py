"""A disk that fills up under a run: one line that says which file, a code, and nothing lost that was there.

The trainer is in a mount namespace of its own, so that shm would take it for another host's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.rights import lack
from tests.system.conftest import Start
from tests.system.processes import Student, check_refusal, curve


def refused(student: Student, *texts: str) -> None:
    if student.wait() == 77:
        lack(f"no right to mount in a namespace of its own here: {student.output.strip()}")
    check_refusal(student, 1, *texts, "could not be written", "No space left on device")


def test_a_disk_that_fills_up_costs_the_steps_since_the_last_checkpoint_and_no_more(
    endpoint: str, start_student: Start, quiet_curve: list[dict[str, Any]], tmp_path: Path
) -> None:
    flags = ("--teacher", endpoint, "--transport", "zmq", "--checkpoint-every", 3)
    kept = tmp_path / "kept"
    refused(
        start_student(*flags, command=("tests.system.small_disk", 7, kept)), "metrics.jsonl", "--resume goes on from"
    )
    assert sorted(path.name for path in (kept / "checkpoints").iterdir()) == ["step-00000003", "step-00000006"]
    assert curve_so_far(kept) == quiet_curve[: len(curve_so_far(kept))]
    resumed = start_student(*flags, "--resume", out="kept")
    resumed.succeed()
    assert "step-00000006" in resumed.errors
    assert curve(kept) == quiet_curve


def curve_so_far(out: Path) -> list[dict[str, Any]]:
    """Without the line that the full disk tore."""
    file = out / "metrics.jsonl"
    file.write_text("".join(line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")))
    return curve(out)


def test_a_disk_that_is_full_from_the_start_is_said_so(endpoint: str, start_student: Start, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    flags = ("--teacher", endpoint, "--transport", "zmq")
    refused(start_student(*flags, command=("tests.system.small_disk", "start", kept)), "run.json")
    assert list(kept.iterdir()) == []
