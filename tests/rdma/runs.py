"""Models, text, and the commands that distil one into the other over a cable."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.rdma.forks import Forked
from tests.system.processes import CURVE_FIELDS

NUM_STEPS = 10
#: Values of a teacher's state, 4 bytes each. Wide for so small a model: little to compute, and much to send.
TEACHER_HIDDEN = 1024
BATCH_SIZE, MAX_LENGTH = 4, 48


@dataclass(frozen=True)
class Inputs:
    """In the directory: checkpoints of a teacher and a student, and text."""

    root: Path

    @property
    def teacher(self) -> Path:
        return self.root / "teacher"

    @property
    def student(self) -> Path:
        return self.root / "student"

    @property
    def data(self) -> Path:
        return self.root / "train.jsonl"

    def make(self) -> None:
        from tests.tiny_models import build_tiny_checkpoint

        texts = [f"Slot {i} holds {i * i} rows for the next step, and the ring turns." for i in range(40)]
        self.data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        small = {"num_hidden_layers": 1, "intermediate_size": 64}
        build_tiny_checkpoint(self.teacher, "qwen3", seed=1, hidden_size=TEACHER_HIDDEN, **small)
        build_tiny_checkpoint(self.student, "qwen3", seed=2)


class Teacher(Forked):
    """`teacher.serve` of the inputs' teacher, with every transport it has."""

    def __init__(self, inputs: Inputs, *, cwd: Path, env: Mapping[str, str]) -> None:
        super().__init__(
            *("teacher.serve", "--model", inputs.teacher, "--listen", "tcp://127.0.0.1:*"),
            *("--ready-file", "ready", "--deterministic", "--threads", 1),
            cwd=cwd,
            env=env,
        )

    def until_ready(self) -> str:
        """Its endpoint."""
        ready = self.cwd / "ready"
        self.until(ready.exists, "it was ready")
        return ready.read_text().strip()


class Student(Forked):
    """`student.train` of the inputs' student; later arguments override."""

    def __init__(self, inputs: Inputs, *arguments: object, cwd: Path, env: Mapping[str, str]) -> None:
        super().__init__(
            *("student.train", "--student", inputs.student, "--data", inputs.data, "--out", "out"),
            *("--cache-dir", cwd / "cache", "--steps", NUM_STEPS, "--batch-size", BATCH_SIZE),
            *("--max-length", MAX_LENGTH, "--lr", "1e-3", "--warmup-steps", 2, "--precision", "fp32", "--seed", 11),
            # Emulated, and beside the contract's suite, a teacher that is well may be silent for long.
            *("--deterministic", "--threads", 1, "--peer-timeout", 60, "--teacher-timeout", 240, *arguments),
            cwd=cwd,
            env=env,
        )

    @property
    def steps_taken(self) -> int:
        metrics = self.cwd / "out" / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    @property
    def curve(self) -> list[dict[str, Any]]:
        """What it computed, a step a line; floats as they are, to the bit."""
        lines = (self.cwd / "out" / "metrics.jsonl").read_text().splitlines()
        return [{name: record[name] for name in CURVE_FIELDS} for record in map(json.loads, lines)]

    @property
    def state_bytes(self) -> int:
        """Of all states that it was sent."""
        return sum(step["rows"] for step in self.curve) * TEACHER_HIDDEN * 4

    @property
    def transports(self) -> list[str]:
        return list(json.loads((self.cwd / "out" / "summary.json").read_text())["transports"].values())

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.cwd / "out" / "checkpoints").glob("step-*"))


if __name__ == "__main__":
    Inputs(Path(sys.argv[1])).make()
