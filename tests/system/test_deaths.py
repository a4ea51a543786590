"""R7: a trainer killed at any moment, over and over; the run that is left in the end is the one that nothing disturbed.

One run has many lives: each begins with --resume where the last one died, and dies at its own moment.
"""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.seeds import seeds
from tests.system.conftest import NUM_STEPS, STEPS_AN_EPOCH, Inputs, Start
from tests.system.processes import Student, curve
from tests.tiny_models import build_tiny_checkpoint

#: An epoch's last step has one microbatch, the others have two.
SEQS_AN_EPOCH = 2 * STEPS_AN_EPOCH - 1


def first_seq(step: int) -> int:
    epoch, in_epoch = divmod(step - 1, STEPS_AN_EPOCH)
    return epoch * SEQS_AN_EPOCH + 2 * in_epoch


def live(start_student: Start, moments: Sequence[str], *arguments: object, out: str = "out") -> Student:
    """Every life but the last dies at its moment; the last one finishes."""
    for number, moment in enumerate(moments):
        resume = ("--resume",) if number else ()
        student = start_student(*arguments, *resume, out=out, command=("tests.system.dying_student", moment))
        expected = 128 + signal.SIGTERM if moment.startswith("term-") else -signal.SIGKILL
        assert student.wait() == expected, f"life {number}, which was to end at {moment}:\n{student.tail()}"
    student = start_student(*arguments, "--resume", out=out)
    student.succeed()
    return student


def check_same_run(student: Student, quiet: list[dict[str, Any]]) -> None:
    assert curve(student.out) == quiet
    assert student.summary["ending"] == "finished"
    assert student.summary["samples_trained"] == quiet[-1]["position"]
    left = [path.name for path in (*student.out.iterdir(), *(student.out / "checkpoints").iterdir())]
    assert [name for name in left if name.startswith(".")] == []


LIVES = {
    "within a step": (
        "asked:0",  # before anything was trained
        f"trained:{first_seq(2)}",  # of two microbatches that the step accumulates
        "updated:3",
        "half-line:5",
        "line:5",
        f"asked:{first_seq(9) + 1}",
        f"trained:{first_seq(9)}",
    ),
    "at the end of an epoch": (
        f"asked:{first_seq(STEPS_AN_EPOCH)}",  # the last, partial batch
        f"trained:{first_seq(STEPS_AN_EPOCH)}",
        f"line:{STEPS_AN_EPOCH}",
        f"named:{STEPS_AN_EPOCH}",
        f"asked:{first_seq(STEPS_AN_EPOCH + 1)}",  # the first of the next one
        f"half-line:{2 * STEPS_AN_EPOCH}",
    ),
    "while it writes": (
        "disk:4:1",
        "disk:5:4",
        "disk:6:9",
        "disk:9:14",
        "named:12",
        f"disk:{NUM_STEPS}:7",
        "export:1",
        "export:6",
    ),
}


@pytest.mark.parametrize("where", LIVES)
def test_a_trainer_that_dies_again_and_again_trains_every_sample_once(
    endpoint: str, quiet_curve: list[dict[str, Any]], start_student: Start, where: str
) -> None:
    student = live(start_student, LIVES[where], "--teacher", endpoint, "--checkpoint-every", 1, "--ring-depth", 4)
    check_same_run(student, quiet_curve)


def test_what_was_trained_before_the_first_checkpoint_is_trained_again(
    tmp_path: Path, endpoint: str, quiet_curve: list[dict[str, Any]], start_student: Start
) -> None:
    moments = ("line:11", f"trained:{first_seq(17)}", "half-line:23")
    student = live(start_student, moments, "--teacher", endpoint, "--checkpoint-every", 20)
    check_same_run(student, quiet_curve)
    lives = sorted(tmp_path.glob("tests.system.dying_student-*.err"), key=lambda path: path.stat().st_mtime_ns)
    assert ["nothing to resume" in life.read_text() for life in lives] == [False, True, True]


def test_dropout_draws_the_same_numbers_after_any_death_or_stop(
    endpoint: str, tmp_path: Path, inputs: Inputs, start_student: Start
) -> None:
    """A stop before a step that is not taken, too: what it has drawn is drawn again."""
    model = build_tiny_checkpoint(tmp_path / "dropout", "qwen3", seed=2, attention_dropout=0.3)
    arguments = ("--student", model, "--teacher", endpoint, "--steps", 16, "--checkpoint-every", 3)
    arguments += ("--eval-data", inputs.eval_data, "--eval-every", 5)
    quiet = start_student(*arguments, out="quiet")
    moments = (
        "term-evaluation:0",
        f"trained:{first_seq(5)}",
        f"term-trained:{first_seq(6)}",
        "term-evaluation:10",
        "evaluation:15",
        "term-evaluation:16",
    )
    student = live(start_student, moments, *arguments)
    quiet.succeed()
    check_same_run(student, curve(quiet.out))
    assert (student.out / "eval.jsonl").read_bytes() == (quiet.out / "eval.jsonl").read_bytes()
    one, other = (load_file(run.out / "model" / "model.safetensors") for run in (student, quiet))
    assert all(torch.equal(one[name], other[name]) for name in other)
    assert [line["step"] for line in map(json.loads, (quiet.out / "eval.jsonl").read_text().splitlines())] == [
        *(0, 5, 10, 15, 16)
    ]


def any_moment(dice: random.Random, step: int) -> str:
    """At or behind a step."""
    seq = first_seq(step) + dice.randrange(1 if step % STEPS_AN_EPOCH == 0 else 2)
    return dice.choice(
        [
            f"asked:{seq}",
            f"trained:{seq}",
            f"term-trained:{seq}",
            f"updated:{step}",
            f"half-line:{step}",
            f"line:{step}",
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(6))
def test_a_trainer_that_dies_at_random_trains_every_sample_once(
    endpoint: str, quiet_curve: list[dict[str, Any]], start_student: Start, seed: int
) -> None:
    print(f"seed {seed}")
    dice = random.Random(seed)
    steps = sorted(dice.sample(range(1, NUM_STEPS + 1), 9))
    moments = [any_moment(dice, step) for step in steps]
    print(moments)
    student = live(
        start_student,
        moments,
        *("--teacher", endpoint, "--checkpoint-every", dice.randrange(1, 9), "--ring-depth", dice.randrange(1, 6)),
        *("--transport", dice.choice(["shm", "zmq"]), "--keep-checkpoints", dice.randrange(1, 4)),
    )
    check_same_run(student, quiet_curve)


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(6))
def test_a_trainer_killed_at_any_time_trains_every_sample_once(
    endpoint: str, quiet_curve: list[dict[str, Any]], start_student: Start, seed: int
) -> None:
    """Not at moments that we thought of: after a random while, by the clock of how much it has written."""
    print(f"seed {seed}")
    dice = random.Random(seed)
    arguments = ("--teacher", endpoint, "--checkpoint-every", dice.randrange(1, 6))
    kills = 0
    student = start_student(*arguments)
    while student.poll() is None and kills < 8:
        wanted = student.steps_taken + dice.randrange(1, 8)
        turns = dice.randrange(1, 400)
        while student.poll() is None and (student.steps_taken < wanted or turns):
            turns -= student.steps_taken >= wanted
        student.send(signal.SIGKILL)
        kills += student.wait() == -signal.SIGKILL
        student = start_student(*arguments, "--resume")
    student.succeed()
    assert kills >= 3
    check_same_run(student, quiet_curve)
