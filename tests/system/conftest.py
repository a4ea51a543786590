"""Tiny real models, text, a teacher process that all tests may ask, and the curve of a run that nothing disturbed."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.system.processes import Command, Student, Teacher, curve
from tests.tiny_models import build_tiny_checkpoint

#: 50 samples, 8 to a step: 7 steps an epoch, of which the last has 2 samples; the run ends as its eighth begins.
NUM_SAMPLES, NUM_STEPS, STEPS_AN_EPOCH = 50, 50, 7


@dataclass(frozen=True)
class Inputs:
    """teacher, student: checkpoints. data, eval_data: text, one sample a document."""

    root: Path
    teacher: Path
    student: Path
    data: Path
    eval_data: Path

    @property
    def settings(self) -> tuple[object, ...]:
        """Of a deterministic run of NUM_STEPS steps; a later flag overrides."""
        return (
            *("--student", self.student, "--data", self.data, "--cache-dir", self.root / "cache"),
            *("--steps", NUM_STEPS, "--batch-size", 4, "--grad-accum", 2, "--max-length", 48),
            *("--lr", "1e-3", "--warmup-steps", 5, "--precision", "fp32", "--seed", 11),
            *("--deterministic", "--threads", 1),
        )


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    root = tmp_path_factory.mktemp("inputs")
    made = Inputs(
        root=root,
        teacher=build_tiny_checkpoint(root / "teacher", "qwen3", seed=1, hidden_size=48),
        student=build_tiny_checkpoint(root / "student", "qwen3", seed=2),
        data=root / "train.jsonl",
        eval_data=root / "held-out.jsonl",
    )
    write_texts(
        made.data, [f"Slot {i} holds {i * i} rows for the next step, and the ring turns." for i in range(NUM_SAMPLES)]
    )
    write_texts(made.eval_data, [f"The state of slot {i} is free again." for i in range(6)])
    return made


def write_texts(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.fixture(scope="session")
def endpoint(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a teacher that no test disturbs."""
    teacher = Teacher(inputs.teacher, cwd=tmp_path_factory.mktemp("teacher"))
    yield teacher.endpoint
    assert teacher.poll() is None, f"the shared teacher ended:\n{teacher.tail()}"
    teacher.end()


@pytest.fixture(scope="session")
def quiet_curve(inputs: Inputs, endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of a run that nothing disturbed."""
    root = tmp_path_factory.mktemp("quiet")
    student = Student(*inputs.settings, "--teacher", endpoint, "--transport", "shm", out=root / "out", cwd=root)
    student.succeed()
    steps = curve(root / "out")
    assert [step["step"] for step in steps] == list(range(1, NUM_STEPS + 1))
    return steps


Start = Callable[..., Any]


@pytest.fixture
def processes() -> Iterator[list[Command]]:
    """What a test appends here is gone after it."""
    started: list[Command] = []
    yield started
    for command in started:
        command.send(signal.SIGKILL)
    for command in started:
        command.end()


@pytest.fixture
def start_teacher(inputs: Inputs, tmp_path: Path, processes: list[Command]) -> Start:
    """Starts a teacher of this test's own."""

    def start(*arguments: object, model: Path | None = None, wait: bool = True, **options: Any) -> Teacher:
        teacher = Teacher(model or inputs.teacher, *arguments, cwd=tmp_path, wait=False, **options)
        processes.append(teacher)  # before it is waited for: one that never is ready is ended too
        if wait:
            teacher.until_ready()
        return teacher

    return start


@pytest.fixture
def start_student(inputs: Inputs, tmp_path: Path, processes: list[Command]) -> Start:
    """Starts a trainer with `inputs.settings`; arguments come after them."""

    def start(*arguments: object, out: str = "out", **options: Any) -> Student:
        student = Student(*inputs.settings, *arguments, out=tmp_path / out, cwd=tmp_path, **options)
        processes.append(student)
        return student

    return start
