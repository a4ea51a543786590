"""R7: a run that was killed and resumed has the metrics of one that was not: each step once, to the bit."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.system.conftest import NUM_SAMPLES, NUM_STEPS, STEPS_AN_EPOCH, Inputs, Start
from tests.system.processes import Student, curve, holding


@pytest.mark.case(43)
@pytest.mark.case(46)
def test_killed_twice_and_resumed_gives_the_undisturbed_curve(
    endpoint: str, quiet_curve: list[dict[str, Any]], start_student: Start
) -> None:
    """Cases 43, 46: with grad accumulation, partial last batches, and slots in flight at the moment of death."""
    arguments = ("--teacher", endpoint, "--checkpoint-every", 4, "--ring-depth", 4)
    student = start_student(*arguments, command=holding(10))
    student.until_held_at(10)
    student.send(signal.SIGKILL)
    assert student.wait() == -signal.SIGKILL
    student = start_student(*arguments, "--resume", command=holding(26))
    student.until_held_at(26)
    student.send(signal.SIGKILL)
    assert student.wait() == -signal.SIGKILL
    student = start_student(*arguments, "--resume")
    student.succeed()
    assert curve(student.out) == quiet_curve
    assert student.summary["ending"] == "finished"
    assert student.summary["samples_trained"] == quiet_curve[-1]["position"]


@pytest.mark.case(43)
def test_the_last_batch_of_an_epoch_is_trained_and_divides_by_its_own_rows(quiet_curve: list[dict[str, Any]]) -> None:
    """Case 43."""
    epoch = quiet_curve[:STEPS_AN_EPOCH]
    assert [step["samples"] for step in epoch] == [8, 8, 8, 8, 8, 8, 2]
    assert sum(step["samples"] for step in epoch) == NUM_SAMPLES
    assert epoch[-1]["rows"] < epoch[0]["rows"] / 2
    # A mean over its own rows; a sum over them divided by a full batch's would be a quarter of it.
    assert epoch[-1]["lm_loss"] == pytest.approx(epoch[0]["lm_loss"], rel=0.2)
    assert [step["epoch"] for step in quiet_curve[STEPS_AN_EPOCH - 1 : STEPS_AN_EPOCH + 1]] == [0, 1]


@pytest.mark.case(44)
def test_resume_at_the_end_of_an_epoch_trains_the_next_one(
    endpoint: str, quiet_curve: list[dict[str, Any]], start_student: Start
) -> None:
    """Case 44."""
    arguments = ("--teacher", endpoint, "--checkpoint-every", STEPS_AN_EPOCH)
    student = start_student(*arguments, command=holding(2 * STEPS_AN_EPOCH))
    student.until_held_at(2 * STEPS_AN_EPOCH)
    student.send(signal.SIGTERM)
    student.let_go()
    assert student.wait() == 128 + signal.SIGTERM
    boundary = student.out / "checkpoints" / f"step-{2 * STEPS_AN_EPOCH:08d}"
    assert student.checkpoints[-1] == boundary.name
    resumed = start_student(*arguments, "--resume")
    resumed.succeed()
    assert curve(resumed.out) == quiet_curve
    assert f"resuming from {boundary}" in resumed.errors


@pytest.mark.case(44)
def test_resume_of_a_run_in_epochs_counts_them_from_the_start(
    endpoint: str, tmp_path: Path, inputs: Inputs, processes: list[Any]
) -> None:
    """Case 44, as it was seen: 2 epochs, saved at the end of the first."""
    settings = [str(one) for one in inputs.settings]
    position = settings.index("--steps")
    del settings[position : position + 2]
    finished = {}
    for name, interrupt in (("quiet", False), ("disturbed", True)):
        arguments = [*settings, "--epochs", 2, "--teacher", endpoint, "--checkpoint-every", 1, "--keep-checkpoints", 99]
        command = holding(STEPS_AN_EPOCH) if interrupt else ("student.train",)
        student = Student(*arguments, out=tmp_path / name, cwd=tmp_path, command=command)
        processes.append(student)
        if interrupt:
            student.until_held_at(STEPS_AN_EPOCH)
            student.send(signal.SIGKILL)
            student.wait()
            student = Student(*arguments, "--resume", out=tmp_path / name, cwd=tmp_path)
            processes.append(student)
        student.succeed()
        finished[name] = curve(tmp_path / name)
    assert finished["disturbed"] == finished["quiet"]
    assert finished["quiet"][-1]["position"] == 2 * NUM_SAMPLES
    assert len(finished["quiet"]) == 2 * STEPS_AN_EPOCH


def test_killed_while_it_writes_a_checkpoint_loses_nothing(
    endpoint: str, quiet_curve: list[dict[str, Any]], start_student: Start
) -> None:
    arguments = ("--teacher", endpoint, "--checkpoint-every", 1)
    for step, event in ((6, 2), (14, 5), (22, 8), (30, 11)):
        moment = ("tests.system.dying_student", f"stop-disk:{step}:{event}")
        student = start_student(*arguments, *(() if step == 6 else ("--resume",)), command=moment)
        student.until_held()
        assert any((student.out / "checkpoints").glob(".writing-*")), "it is in the midst of it"
        student.send(signal.SIGKILL)
        assert student.wait() == -signal.SIGKILL
    student = start_student(*arguments, "--resume")
    student.succeed()
    assert curve(student.out) == quiet_curve
    assert not [path.name for path in (student.out / "checkpoints").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_asked_to_end_it_writes_a_checkpoint_and_can_go_on(
    endpoint: str, quiet_curve: list[dict[str, Any]], start_student: Start, number: signal.Signals
) -> None:
    student = start_student("--teacher", endpoint, command=holding(7))
    student.until_held_at(7)
    student.send(number)
    student.let_go()
    assert student.wait() == 128 + number
    taken = student.steps_taken
    assert student.checkpoints == [f"step-{taken:08d}"]
    assert student.errors.splitlines()[-1] == (
        f"student.train: error: stopped by {number.name} after step {taken}; --resume goes on from there"
    )
    resumed = start_student("--teacher", endpoint, "--resume")
    resumed.succeed()
    assert curve(resumed.out) == quiet_curve


def test_a_second_signal_ends_it_at_once_and_is_named_by_the_exit_code(
    endpoint: str, quiet_curve: list[dict[str, Any]], start_student: Start
) -> None:
    student = start_student("--teacher", endpoint, "--checkpoint-every", 5, command=holding(7))
    student.until_held_at(7)
    for number in (signal.SIGHUP, signal.SIGTERM):  # both there once it goes on; Python takes them by their numbers
        student.send(number)
    student.let_go()
    assert student.wait() == 128 + signal.SIGTERM
    assert student.errors.splitlines()[-1] == "student.train: interrupted"
    assert student.checkpoints == ["step-00000005"]
    start_student("--teacher", endpoint, "--resume").succeed()
    assert curve(student.out) == quiet_curve


def test_asked_to_end_while_it_waits_for_a_teacher_it_does_not_wait(start_teacher: Start, start_student: Start) -> None:
    teacher = start_teacher()
    student = start_student(
        *("--teacher", teacher.endpoint, "--ring-depth", 1),
        *("--teacher-timeout", 10000, "--request-timeout", 2, "--peer-timeout", 10000),
        command=holding(5),
    )
    student.until_held_at(5)
    teacher.send(signal.SIGSTOP)
    student.let_go()
    # By then, two seconds after it asked, the little that was in its ring is long used up.
    student.until(lambda: "was not filled within 2 s" in student.errors, "it waits for its teacher")
    student.send(signal.SIGTERM)
    assert student.wait() == 128 + signal.SIGTERM
    assert student.checkpoints == [f"step-{student.steps_taken:08d}"]


def test_a_finished_run_can_be_resumed_and_changes_nothing(endpoint: str, inputs: Inputs, start_student: Start) -> None:
    arguments = ("--teacher", endpoint, "--steps", 6, "--eval-data", inputs.eval_data, "--eval-every", 3)
    student = start_student(*arguments)
    student.succeed()
    before = {name: (student.out / name).read_bytes() for name in ("metrics.jsonl", "eval.jsonl", "model/config.json")}
    summary = student.summary
    weights = (student.out / "model" / "model.safetensors").read_bytes()
    resumed = start_student(*arguments, "--resume")
    resumed.succeed()
    assert {name: (resumed.out / name).read_bytes() for name in before} == before
    assert (resumed.out / "model" / "model.safetensors").read_bytes() == weights
    for name in ("steps", "samples_trained", "eval_loss_first", "eval_loss_last"):
        assert resumed.summary[name] == summary[name], name


def test_evaluations_are_the_same_after_a_resume(endpoint: str, inputs: Inputs, start_student: Start) -> None:
    arguments = ("--teacher", endpoint, "--eval-data", inputs.eval_data, "--eval-every", 6, "--checkpoint-every", 4)
    quiet = start_student(*arguments, out="quiet")
    disturbed = start_student(*arguments, command=holding(15))
    disturbed.until_held_at(15)
    disturbed.send(signal.SIGKILL)
    disturbed.wait()
    disturbed = start_student(*arguments, "--resume")
    disturbed.succeed()
    quiet.succeed()
    lines = [json.loads(line) for line in (quiet.out / "eval.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(0, NUM_STEPS, 6), NUM_STEPS]
    assert (disturbed.out / "eval.jsonl").read_text() == (quiet.out / "eval.jsonl").read_text()
    assert disturbed.summary["eval_loss_first"] == lines[0]["eval_loss"]
    assert disturbed.summary["eval_loss_last"] == lines[-1]["eval_loss"]
