"""Tiny models and text, and the commands as processes that are told which of UCX's transports to use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import build_tiny_checkpoint

REPOSITORY = Path(__file__).parents[2]
#: No step of a test takes a tenth of this on a quiet machine; it only ends tests that hang.
HANG_GUARD_S = 150.0 * float(os.environ.get("DISAGGKD_TEST_PATIENCE", "1"))  # more of it where all is emulated
NUM_STEPS = 10
#: UCX's own ways within one host. Its shared memory is what it picks by itself.
UCX_WAYS = {"tcp": {"UCX_TLS": "tcp"}, "shared memory": {"UCX_TLS": "posix,sysv,cma"}}
#: What must not depend on the transport; the rest of a line is time, memory and traffic.
_CURVE_FIELDS = ("step", "position", "seq_last", "lm_loss", "kd", "loss", "rows", "lr", "grad_norm")


@dataclass(frozen=True)
class Inputs:
    teacher: Path
    student: Path
    data: Path


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    root = tmp_path_factory.mktemp("inputs")
    texts = [f"Slot {i} holds {i * i} rows for the next step, and the ring turns." for i in range(30)]
    data = root / "train.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return Inputs(
        teacher=build_tiny_checkpoint(root / "teacher", "qwen3", seed=1, hidden_size=48),
        student=build_tiny_checkpoint(root / "student", "qwen3", seed=2),
        data=data,
    )


class Command:
    """`python -m module arguments` as a process of its own."""

    def __init__(self, module: str, *arguments: object, cwd: Path, env: dict[str, str]) -> None:
        cwd.mkdir(parents=True, exist_ok=True)
        self.cwd = cwd
        own = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._log = cwd / f"{module}.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, arguments)],
                cwd=cwd,
                env={**os.environ, **own, **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait(self) -> int:
        return self.process.wait(HANG_GUARD_S)

    def until(self, holds: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + HANG_GUARD_S
        while not holds():
            assert self.process.poll() is None, f"it ended before {what}:\n{self.log}"
            assert time.monotonic() < deadline_s, f"waited for {what}:\n{self.log}"
            time.sleep(0.01)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


Start = Callable[..., Command]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a command that ends with the test."""
    yield from _starter(tmp_path)


@pytest.fixture(scope="module")
def start_shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts a command that ends with the module's last test."""
    yield from _starter(tmp_path_factory.mktemp("shared"))


def _starter(root: Path) -> Iterator[Start]:
    started: list[Command] = []

    def go(module: str, *arguments: object, name: str, env: dict[str, str]) -> Command:
        started.append(Command(module, *arguments, cwd=root / name, env=env))
        return started[-1]

    yield go
    for command in started:
        command.end()


def serve(start: Start, inputs: Inputs, *arguments: object, env: dict[str, str]) -> tuple[Command, str]:
    """A teacher that is ready: (it, its endpoint)."""
    teacher = start(
        *("teacher.serve", "--model", inputs.teacher, "--listen", "tcp://127.0.0.1:*", "--ready-file", "ready"),
        *("--deterministic", "--threads", 1, *arguments),
        name="teacher",
        env=env,
    )
    ready = teacher.cwd / "ready"
    teacher.until(ready.exists, "it was ready")
    return teacher, ready.read_text().strip()


def train(start: Start, inputs: Inputs, *arguments: object, name: str, env: dict[str, str]) -> Command:
    return start(
        *("student.train", "--student", inputs.student, "--data", inputs.data, "--out", "out", "--steps", NUM_STEPS),
        *("--batch-size", 4, "--max-length", 48, "--lr", "1e-3", "--warmup-steps", 2, "--precision", "fp32"),
        *("--seed", 11, "--deterministic", "--threads", 1, *arguments),
        name=name,
        env=env,
    )


def curve(student: Command) -> list[dict[str, Any]]:
    """What the run computed, a step a line; floats as they are, to the bit."""
    lines = (student.cwd / "out" / "metrics.jsonl").read_text().splitlines()
    return [{name: record[name] for name in _CURVE_FIELDS} for record in map(json.loads, lines)]


def transports(student: Command) -> list[str]:
    return list(json.loads((student.cwd / "out" / "summary.json").read_text())["transports"].values())
