"""Where a run is written: by one process, never over another run, and whole even when the disk is full or damaged."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.system.conftest import Inputs, Start, write_texts
from tests.system.processes import Student, check_refusal, holding
from tests.tiny_models import build_tiny_checkpoint


@pytest.mark.parametrize("out", ["/proc/run", "/dev/null/run", "{file}", "/proc/1/fd/run"])
def test_a_directory_that_can_not_be_written(inputs: Inputs, endpoint: str, start_student: Start, out: str) -> None:
    name = out.format(file=inputs.data)
    student = start_student("--teacher", endpoint, "--out", name)
    check_refusal(student, 2, f"--out {name}: ", "allowed: a directory that can be written")


def test_a_directory_that_another_run_writes_to(endpoint: str, start_student: Start) -> None:
    first = start_student("--teacher", endpoint, "--steps", 100000)
    first.until_step(3)
    for flags in ((), ("--resume",)):
        second = start_student("--teacher", endpoint, *flags)
        check_refusal(second, 2, f"--out {first.out}: another run is writing there; allowed: a directory of its own")
    step = first.steps_taken
    first.until_step(step + 3)
    first.send(signal.SIGTERM)
    assert first.wait() == 143


@pytest.mark.parametrize("follower", [True, False])
def test_a_directory_that_is_taken_away_ends_its_run_and_is_not_made_again(
    endpoint: str, start_student: Start, follower: bool
) -> None:
    """Whatever has its name by then: another run, or nothing."""
    first = start_student("--teacher", endpoint, "--checkpoint-every", 5, command=holding(7))
    first.until_held_at(7)
    aside = first.out.with_name("aside")
    first.out.rename(aside)
    if follower:
        start_student("--teacher", endpoint, "--steps", 12, "--lr", "0.003").succeed()
    before = snapshot(first.out) if follower else None
    first.let_go()
    check_refusal(first, 1, f"--out {first.out} was moved or removed while the run goes on")
    assert (snapshot(first.out) if first.out.exists() else None) == before
    assert (aside / "checkpoints" / "step-00000005").exists()


def test_a_directory_that_is_taken_away_before_the_first_step_is_not_written_to(
    endpoint: str, start_teacher: Start, start_student: Start
) -> None:
    """While it waits for its teacher, another run begins and ends there."""
    port = free_port()
    first = start_student("--teacher", f"tcp://127.0.0.1:{port}")
    first.until(lambda: (first.out / ".lock").exists(), "the directory is claimed")
    first.out.rename(first.out.with_name("aside"))
    start_student("--teacher", endpoint, "--steps", 12, "--lr", "0.003").succeed()
    before = snapshot(first.out)
    start_teacher(port=port)
    check_refusal(first, 1, f"--out {first.out} was moved or removed while the run goes on")
    assert snapshot(first.out) == before


@pytest.fixture
def stopped_run(endpoint: str, start_student: Start) -> Student:
    """A run with two checkpoints that was asked to end."""
    student: Student = start_student("--teacher", endpoint, "--checkpoint-every", 5, command=holding(12))
    student.until_held_at(12)
    student.send(signal.SIGTERM)
    student.let_go()
    assert student.wait() == 143
    assert len(student.checkpoints) == 2
    return student


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_a_run_is_never_overwritten_and_only_resumed_as_what_it_was(
    tmp_path: Path, inputs: Inputs, endpoint: str, stopped_run: Student, start_teacher: Start, start_student: Start
) -> None:
    before = snapshot(stopped_run.out)
    again = start_student("--teacher", endpoint)
    check_refusal(again, 2, f"--out {stopped_run.out} holds a run already; allowed: --resume, or another directory")
    faster = start_student("--teacher", endpoint, "--resume", "--lr", "5e-3", "--batch-size", 2)
    check_refusal(
        faster, 2, "--resume: ", "--batch-size was 4, now 2", "--lr was 0.001, now 0.005", "allowed: the settings"
    )
    write_texts(tmp_path / "other.jsonl", ["Other texts are no place to go on from."] * 50)
    moved = start_student("--teacher", endpoint, "--resume", "--data", tmp_path / "other.jsonl")
    check_refusal(moved, 2, "--resume: ", "data")
    other_model = build_tiny_checkpoint(tmp_path / "other", "qwen3", seed=9, hidden_size=48)
    other = start_teacher(model=other_model)
    retaught = start_student("--teacher", other.endpoint, "--resume")
    check_refusal(
        retaught, 2, "--resume: the teacher's fingerprint was ", "allowed: the teacher that the run began with"
    )
    assert snapshot(stopped_run.out) == before


@pytest.mark.parametrize("left", ["nothing", "half of it"])
def test_another_teacher_is_noticed_though_the_run_file_is_lost(
    tmp_path: Path, stopped_run: Student, start_teacher: Start, start_student: Start, left: str
) -> None:
    """The checkpoint itself knows its teacher."""
    run_file = stopped_run.out / "run.json"
    if left == "nothing":
        run_file.unlink()
    else:
        run_file.write_bytes(run_file.read_bytes()[:200])
    other = start_teacher(model=build_tiny_checkpoint(tmp_path / "other", "qwen3", seed=9, hidden_size=48))
    student = start_student("--teacher", other.endpoint, "--resume")
    check_refusal(student, 2, "--resume: ", "or teacher is another one", "allowed: what the run began with")


def test_a_deterministic_run_knows_how_many_threads_the_library_chose(endpoint: str, start_student: Start) -> None:
    flags = ("--teacher", endpoint, "--checkpoint-every", 5, "--threads")
    first = start_student(*flags, 0, command=holding(7))
    first.until_held_at(7)
    first.send(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    num_threads = json.loads((first.out / "run.json").read_text())["threads"]
    assert num_threads >= 1
    other = start_student(*flags, num_threads + 1, "--resume")
    check_refusal(other, 2, f"--resume: --threads was {num_threads}, now {num_threads + 1}; allowed: the settings")
    start_student(*flags, 0, "--resume").succeed()


def test_what_changes_the_last_bits_is_refused_in_a_deterministic_run(
    endpoint: str, stopped_run: Student, start_student: Start
) -> None:
    before = snapshot(stopped_run.out)
    for flags, said in (
        (("--threads", 2), "--threads was 1, now 2"),
        (("--workspace-bytes", 1 << 20), "--workspace-bytes was None, now 1048576"),
        (("--deterministic", "false"), "--deterministic was True, now False"),
    ):
        student = start_student("--teacher", endpoint, "--resume", *flags)
        check_refusal(student, 2, f"--resume: {said}; allowed: the settings that the run began with")
    assert snapshot(stopped_run.out) == before


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    endpoint: str, stopped_run: Student, start_student: Start
) -> None:
    older, newer = (stopped_run.out / "checkpoints" / name for name in stopped_run.checkpoints)
    flip_a_byte(newer / "model" / "model.safetensors")
    student = start_student("--teacher", endpoint, "--checkpoint-every", 5, "--resume")
    student.succeed()
    assert f"not used: checkpoint {newer}: model/model.safetensors is damaged" in student.errors
    assert f"resuming from {older}" in student.errors


@pytest.mark.parametrize(
    "file", ["model/model.safetensors", "optimizer.safetensors", "state.json", "model/config.json"]
)
def test_where_no_whole_checkpoint_is_left_nothing_is_started_over(
    endpoint: str, stopped_run: Student, start_student: Start, file: str
) -> None:
    for name in stopped_run.checkpoints:
        flip_a_byte(stopped_run.out / "checkpoints" / name / file)
    before = snapshot(stopped_run.out)
    student = start_student("--teacher", endpoint, "--resume")
    check_refusal(student, 2, "--resume: no whole checkpoint in ", Path(file).name)
    assert snapshot(stopped_run.out) == before


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_disk_that_takes_no_more_costs_no_checkpoint_that_was_there(endpoint: str, start_student: Start) -> None:
    student = start_student("--teacher", endpoint, "--steps", 100000, "--checkpoint-every", 10, command=holding(25))
    student.until_held_at(25)
    assert student.checkpoints
    # Files of more than 64 KiB can't be written from now on: the metrics can, the weights can't.
    resource.prlimit(student.pid, resource.RLIMIT_FSIZE, (2**16, 2**16))
    student.let_go()
    check_refusal(student, 1, "checkpoint of step", "could not be written", "earlier checkpoints are untouched")
    last = student.checkpoints[-1]
    resumed = start_student("--teacher", endpoint, "--steps", 100000, "--resume")
    resumed.until(lambda: "resuming from" in resumed.errors, "it goes on")
    assert f"resuming from {student.out / 'checkpoints' / last}" in resumed.errors
