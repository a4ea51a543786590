"""Tiny models and text, the seed of all dice, the ways in which states travel, and curves that nothing disturbed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.seeds import MASTER_SEED
from tests.system.conftest import write_texts
from tests.system.processes import Command, Student, Teacher, curve
from tests.tiny_models import build_tiny_checkpoint

NUM_SAMPLES = 50
#: How states travel: (flags of the trainer, variables of both sides).
WAYS: dict[str, tuple[tuple[object, ...], dict[str, str]]] = {
    "shm": (("--transport", "shm"), {}),
    "zmq": (("--transport", "zmq"), {}),
    "ucx over tcp": (("--transport", "ucx"), {"UCX_TLS": "tcp"}),
    "ucx over shared memory": (("--transport", "ucx"), {"UCX_TLS": "posix,sysv,cma"}),
}


@dataclass(frozen=True)
class Inputs:
    """teacher, student: checkpoints. data: text, one sample a document."""

    root: Path
    teacher: Path
    student: Path
    data: Path

    def settings(self, seed: int) -> tuple[object, ...]:
        """Of a deterministic run without an end of its own; a later flag overrides."""
        return (
            *("--student", self.student, "--data", self.data, "--cache-dir", self.root / "cache"),
            *("--steps", 100_000, "--batch-size", 4, "--grad-accum", 2, "--max-length", 48),
            # Constant, so that how long a run is does not shape its beginning.
            *("--lr", "1e-3", "--schedule", "constant", "--warmup-steps", 5, "--precision", "fp32", "--seed", seed),
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
    )
    write_texts(
        made.data, [f"Slot {i} holds {i * i} rows for the next step, and the ring turns." for i in range(NUM_SAMPLES)]
    )
    return made


@pytest.fixture(scope="session")
def chaos_seed() -> int:
    """Of everything that is left to chance here."""
    return MASTER_SEED


Quiet = Callable[[int, int], list[dict[str, Any]]]


@pytest.fixture(scope="session")
def quiet_curve(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Quiet:
    """(seed of a run, number of steps) to its curve when nothing disturbs it: teacher and student are one process."""
    known: dict[int, list[dict[str, Any]]] = {}

    def get(seed: int, num_steps: int) -> list[dict[str, Any]]:
        if len(known.get(seed, ())) < num_steps:
            root = tmp_path_factory.mktemp("quiet")
            student = Student(
                *inputs.settings(seed),
                *("--teacher", inputs.teacher, "--layout", "colocated", "--steps", num_steps),
                out=root / "out",
                cwd=root,
            )
            student.succeed()
            known[seed] = curve(root / "out")
        return known[seed][:num_steps]

    return get


@pytest.fixture
def processes() -> Iterator[list[Command]]:
    """What a test appends here is gone after it."""
    started: list[Command] = []
    yield started
    for command in started:
        command.end()


Start = Callable[..., Any]


@pytest.fixture
def start_teacher(inputs: Inputs, tmp_path: Path, processes: list[Command]) -> Start:
    """Starts a teacher; options of `Teacher`."""

    def start(*arguments: object, model: Path | None = None, **options: Any) -> Teacher:
        processes.append(Teacher(model or inputs.teacher, *arguments, cwd=tmp_path, **options))
        teacher = processes[-1]
        assert isinstance(teacher, Teacher)
        return teacher

    return start


@pytest.fixture
def start_student(inputs: Inputs, tmp_path: Path, processes: list[Command]) -> Start:
    """Starts a trainer with `inputs.settings`; arguments come after them. Options of `Student`."""

    def start(*arguments: object, out: str = "out", seed: int = 11, **options: Any) -> Student:
        processes.append(Student(*inputs.settings(seed), *arguments, out=tmp_path / out, cwd=tmp_path, **options))
        student = processes[-1]
        assert isinstance(student, Student)
        return student

    return start
