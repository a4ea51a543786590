"""Both commands as processes: trainings that show a progress bar, and a teacher that serves while a block runs.

The demo and the report are made of these.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

from bench.tethered import tethered
from ring.core.errors import DisaggKDError

#: How long a teacher may take to load and probe a model.
READY_TIMEOUT_S = 300.0
POLL_S = 0.2
#: How long an interrupted process may take to end by itself, its checkpoint included.
INTERRUPTED_S = 10.0
#: Threads that spin while they wait for each other make a busy machine many times slower; these sleep.
ENVIRONMENT = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(frozen=True, kw_only=True)
class Service:
    """A teacher that serves."""

    endpoint: str
    pid: int


class StageFailed(DisaggKDError):
    """A process ended with an error; its log says more."""


def train(
    arguments: Sequence[str], *, out: Path, num_steps: int, title: str, progress: Progress, ranks: int = 1
) -> None:
    """Run `student.train` in a process of its own, or in several ranks; resumes what an earlier try left.

    Raises StageFailed."""
    log = out.with_suffix(".log")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "student.train", *arguments, "--out", str(out), "--resume"]
    task = progress.add_task(title, total=num_steps)
    with running(command, log=log) as process:
        while process.poll() is None:
            progress.update(task, completed=_steps_done(out / "metrics.jsonl"))
            time.sleep(POLL_S)
    if process.returncode != 0:
        raise StageFailed(f"{title}: exit {process.returncode}: {_last_line(log)} (whole log: {log})")
    progress.update(task, completed=num_steps)


@contextmanager
def teacher(arguments: Sequence[str], *, root: Path) -> Iterator[Service]:
    """Serve a teacher in a process of its own. Raises StageFailed: it does not get ready."""
    log, ready = root / "teacher-serve.log", root / "teacher-serve.endpoint"
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "teacher.serve", *arguments, "--ready-file", str(ready)]
    with running(command, log=log) as process:
        give_up_s = time.monotonic() + READY_TIMEOUT_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > give_up_s:
                raise StageFailed(f"the teacher did not get ready: {_last_line(log)} (whole log: {log})")
            time.sleep(POLL_S)
        yield Service(endpoint=ready.read_text().strip(), pid=process.pid)


@contextmanager
def running(command: Sequence[str], *, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs while the block does, and is ended with it, or with this process however that ends; what it
    says goes to `log`. For the main thread."""
    with log.open("w") as file:
        process = subprocess.Popen(
            tethered(command), stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=ENVIRONMENT
        )
        try:
            yield process
        except (KeyboardInterrupt, SystemExit):
            # Ctrl-C reached it as well: a second signal would cost it the checkpoint that it is about to write.
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=INTERRUPTED_S)
            raise
        finally:
            _end(process)


def read_lines(path: Path) -> list[dict[str, float]]:
    """The records of a .jsonl file; none if there is none yet."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def _steps_done(path: Path) -> int:
    try:
        with path.open("rb") as file:
            return sum(1 for _ in file)
    except FileNotFoundError:
        return 0


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM lets both commands end in order; SIGKILL is for one that does not."""
    if process.poll() is not None:
        return
    os.kill(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout=90)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
