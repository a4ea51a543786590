"""What a run tells about itself: a line per step in metrics.jsonl, a summary at the end, progress on the terminal.

metrics.jsonl holds only the surviving lineage: a resumed run first truncates it to its checkpoint's step, so that
reading the file gives each step once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ring.core.errors import ConfigError
from ring.outputs import unhindered_outputs
from student.checkpoint import CheckpointError
from student.durable import sync

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One optimizer step; docs/operations.md explains each field.

    Losses are nats per counted row over the whole step: `loss = kd_weight * kd + ce_weight * lm_loss`. `seq_first`
    and `seq_last` bound the step's microbatches, `position` counts the samples so far. `samples_left_out`: all of the
    step's where its gradient was not finite, so that it changed nothing, else 0. `step_s` runs from the
    end of one step to the end of the next, evaluation and checkpoints aside. `teacher_s`: the teachers' forward passes
    for this step. `student_stall_s`: this process waited for fills; `teacher_stall_s`: teachers waited for requests
    (both within this step). `ring_occupancy`: slots that were filled or leased as the step began. `bytes_received`,
    `retries` (attempts given up), `peak_rss_bytes`: of this process so far; a resumed run counts anew.
    """

    step: int
    epoch: int
    position: int
    seq_first: int
    seq_last: int
    lm_loss: float
    kd: float
    loss: float
    rows: int
    samples: int
    samples_left_out: int
    lr: float
    grad_norm: float
    tokens_per_s: float
    step_s: float
    teacher_s: float
    student_stall_s: float
    teacher_stall_s: float
    ring_occupancy: float
    bytes_received: int
    retries: int
    peak_rss_bytes: int


def peak_rss_bytes() -> int:
    """The most memory this process ever had resident."""
    # Not getrusage first: its peak survives exec, so a trainer that a larger process started would report that one's.
    with (
        contextlib.suppress(OSError),  # no descriptor is left: a statistic is no reason to end a run
        open("/proc/self/status", encoding="ascii", errors="replace") as status,
    ):
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class MetricsFile:
    """metrics.jsonl, appended a line at a time."""

    def __init__(self, path: Path, *, resume_step: int) -> None:
        """Keep the steps up to `resume_step` (0: start anew) and append from there.

        Raises ConfigError: the file can't be written or holds something else than metrics."""
        self._path = path
        aside = path.with_suffix(".jsonl.tmp")
        try:
            kept = self._kept_lines(resume_step) if resume_step else []
            with aside.open("w") as file:
                file.writelines(kept)
                file.flush()
                # Before the rename: a power cut must not leave an empty file beside the checkpoint.
                os.fsync(file.fileno())
            os.replace(aside, path)
            sync(path.parent)
            self._file: TextIO = path.open("a", buffering=1)
        except OSError as error:
            with contextlib.suppress(OSError):
                aside.unlink()
            raise ConfigError(f"--out {path.parent}: {path.name} can't be written: {error.strerror}") from error

    def _kept_lines(self, resume_step: int) -> list[str]:
        if not self._path.exists():
            return []
        kept, last = [], -1
        for line in self._path.read_text(errors="replace").splitlines(keepends=True):
            # One that a crash has torn is the last one. Damaged ones before it are left out; whoever counts says so.
            step = _step_of(line)
            if step is not None and last < step <= resume_step and line.endswith("\n"):
                kept.append(line)
                last = step
        return kept

    def write(self, record: StepMetrics | Mapping[str, object]) -> None:
        """Append one line; it is in the kernel when this returns. Raises CheckpointError: the disk is full or fails."""
        fields = asdict(record) if isinstance(record, StepMetrics) else record
        # JSON knows no NaN: readers of other languages would refuse the line.
        known = {name: None if _is_not_finite(value) else value for name, value in fields.items()}
        with self._failure():
            self._file.write(json.dumps(known, allow_nan=False) + "\n")

    def column(self, name: str) -> dict[int, float]:
        """One number of each line in the file that has it, by step."""
        records = map(json.loads, self._path.read_text().splitlines())
        return {record["step"]: float(record[name]) for record in records if _is_number(record.get(name))}

    def sync(self) -> None:
        """What was written is on the disk when this returns. Raises CheckpointError: the disk is full or fails."""
        with self._failure():
            os.fsync(self._file.fileno())

    def close(self) -> None:
        # What could not be written was said when it was tried.
        with contextlib.suppress(OSError):
            self._file.close()

    @contextlib.contextmanager
    def _failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self._path} could not be written: {error.strerror}; checkpoints are untouched, and --resume goes on "
                f"from the newest"
            ) from error


def _step_of(line: str) -> int | None:
    """None: it is no record of a step."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def _is_not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _is_number(value: object) -> bool:
    # Whole numbers without bound are no metric of ours, and may have no float.
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63)


def write_summary(path: Path, summary: Mapping[str, object]) -> None:
    """A JSON file, whole or not at all, also after a power cut. Raises CheckpointError: the disk is full or fails."""
    aside = path.with_suffix(".json.tmp")
    try:
        with aside.open("w") as file:
            file.write(json.dumps(summary, indent=2, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        sync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise CheckpointError(
            f"{path} could not be written: {error.strerror}; what is beside it is untouched"
        ) from error


def print_result(text: str) -> None:
    """To stdout, as long as that takes it. The run is worth more than its report: it goes on in silence."""
    try:
        print(text, flush=True)
    except OSError as error:
        # Whoever read it (`| head`) is gone; or it goes into a file, and the disk is full.
        logger.warning("the standard output takes nothing any more (%s); the run goes on", error.strerror)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - as long as the process


class Reporter:
    """Progress: a bar on a terminal; elsewhere about twenty plain lines, or one a minute where that is more; nothing
    where `silent`. A context manager."""

    PLAIN_LINES = 20
    LONGEST_SILENCE_S = 60.0

    def __init__(
        self,
        *,
        num_steps: int,
        first_step: int,
        silent: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._silent = silent
        self._clock = clock
        self._said_s = clock()
        self._num_steps = num_steps
        self._every = max(1, num_steps // self.PLAIN_LINES)
        self._first = first_step
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._ended = contextlib.ExitStack()

    def __enter__(self) -> Reporter:
        self._ended.enter_context(unhindered_outputs())
        if sys.stdout.isatty() and not self._silent:
            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}", markup=False),
                # What is said names paths and models: text, no markup.
                console=Console(file=sys.stdout, markup=False, emoji=False),
            )
            self._task = self._progress.add_task("training", total=self._num_steps, completed=self._first, note="")
            self._draw(Progress.start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._draw(Progress.stop)
        self._ended.close()

    def _draw(self, call: Callable[[Progress], None]) -> bool:
        """Whether there is a bar. One that can't be drawn is no reason to end a run, nor to hide another error."""
        progress = self._progress
        if progress is None:
            return False
        try:
            call(progress)
        except Exception as error:  # noqa: BLE001 - whatever it is: it is said, and lines take the bar's place
            self._progress = None
            with contextlib.suppress(Exception):
                progress.stop()
            logger.warning("no progress bar any more (%s: %s); the run goes on", type(error).__name__, error)
        return self._progress is not None

    def step(self, metrics: StepMetrics) -> None:
        note = (
            f"lm {metrics.lm_loss:.4f}  kd {metrics.kd:.4f}  {metrics.tokens_per_s:,.0f} tokens/s  "
            f"stall {metrics.student_stall_s / max(metrics.step_s, 1e-9):.0%}"
            f"{'  left out' if metrics.samples_left_out else ''}"
        )
        if self._draw(lambda progress: progress.update(self._task, completed=metrics.step, note=note)):
            return
        if (
            metrics.step % self._every == 0
            or metrics.step in (self._first + 1, self._num_steps)
            or self._clock() >= self._said_s + self.LONGEST_SILENCE_S
        ):
            self._said_s = self._clock()
            self._print(f"step {metrics.step}/{self._num_steps}  {note}")

    def say(self, text: str) -> None:
        if not self._draw(lambda progress: progress.console.print(text, highlight=False)):
            self._print(text)

    def _print(self, text: str) -> None:
        if not self._silent:
            print_result(text)
