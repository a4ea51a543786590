"""Trainings as processes of their own, with or without a teacher beside them, and what they left behind.

A run that ends with an error is an answer too: some of the claims are about what does not fit.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.claimed import claim, renew
from bench.claims.launched import field_bytes
from bench.stages import POLL_S, StageFailed, read_lines, running, teacher

#: Steps at the start of a run that do not count for its pace: allocations, and a ring that fills.
WARMUP_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Command:
    """One training: the flags of `student.train`, except --out and --teacher where `serving` has one beside it.

    serving: flags of `teacher.serve`; None: no service. num_ranks: more than one goes through torchrun. headroom_bytes:
    what each trainer process may take beyond its imports; 0: no cap, but it is measured; None: neither."""

    name: str
    arguments: tuple[str, ...]
    serving: tuple[str, ...] | None = None
    num_ranks: int = 1
    headroom_bytes: int | None = None

    def line(self, out: Path, endpoint: str | None) -> list[str]:
        """What is run."""
        command = [sys.executable]
        if self.num_ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.num_ranks)]
        module = ["student.train"]
        if self.headroom_bytes is not None:
            note = out.with_suffix(".imports")
            module = ["bench.claims.launched", str(note), str(self.headroom_bytes), *module]
        where = [] if endpoint is None else ["--teacher", endpoint]
        return [*command, "-m", *module, *self.arguments, *where, "--out", str(out)]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a training left. `steps`: metrics.jsonl; `summary`: summary.json, empty where it got none; `error`: what it
    said at its end, None if it ended well; `imports_bytes`: resident before it began, None where that was not measured;
    `teacher_peak_bytes`: of the service beside it, None without one."""

    command: Command
    shell: str
    steps: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    imports_bytes: int | None = None
    teacher_peak_bytes: int | None = None

    @property
    def name(self) -> str:
        return self.command.name

    def mean_of(self, column: str) -> float:
        """Over the steps that count for the pace."""
        return fmean(float(step[column]) for step in self.paced)

    @property
    def paced(self) -> Sequence[Mapping[str, Any]]:
        return self.steps[WARMUP_STEPS:] or self.steps

    @property
    def peak_bytes(self) -> int:
        """Of the steps: writing the model, after the last one, is no part of it, and with `headroom_bytes` 0 loading is
        none either."""
        return int(self.steps[-1]["peak_rss_bytes"])

    @property
    def grown_bytes(self) -> int:
        """The peak beyond the imports."""
        assert self.imports_bytes is not None
        return self.peak_bytes - self.imports_bytes


def trained(command: Command, *, out: Path) -> Run:
    """Run it to its end. Raises StageFailed: it ended with an error."""
    run = attempted(command, out=out)
    if run.error is not None:
        raise StageFailed(f"{command.name}: {run.error} (whole log: {out.with_suffix('.log')})")
    return run


def attempted(command: Command, *, out: Path) -> Run:
    """Run it to its end, whatever that is. Raises StageFailed: the teacher beside it did not get ready. Raises
    ConfigError: `out` holds something that was not made here."""
    renew(out)
    if command.serving is None:
        return _attempt(command, out, None, None)
    log = out.parent / f"{out.name}-teacher"
    claim(log)
    with teacher([*command.serving, "--listen", "tcp://127.0.0.1:*"], root=log) as service:
        return _attempt(command, out, service.endpoint, service.pid)


def _attempt(command: Command, out: Path, endpoint: str | None, teacher_pid: int | None) -> Run:
    line = command.line(out, endpoint)
    log = out.with_suffix(".log")
    with running(line, log=log) as process:
        if command.headroom_bytes == 0:
            _forget_loading(process, out / "metrics.jsonl")
        code = process.wait()
        peak = None if teacher_pid is None else field_bytes("VmHWM", teacher_pid)
    summary, note = out / "summary.json", out.with_suffix(".imports")
    said = [text for text in log.read_text(errors="replace").splitlines() if text.strip()]
    return Run(
        command=command,
        shell=shlex.join(["python", *line[1:]]),
        steps=read_lines(out / "metrics.jsonl"),
        summary=json.loads(summary.read_text()) if summary.exists() else {},
        error=None if code == 0 else f"exit {code}: {_why(said)}",
        imports_bytes=int(note.read_text()) if command.headroom_bytes is not None and note.exists() else None,
        teacher_peak_bytes=peak,
    )


def _forget_loading(process: subprocess.Popen[bytes], metrics: Path) -> None:
    """Starts the peak counter anew after the first step: pages of the files that weights were read from, and their
    conversion, are gone by then, and no plan of a step is about them."""
    while process.poll() is None:
        if metrics.exists() and metrics.read_bytes().count(b"\n"):
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            for pid in (process.pid, *children):  # of torchrun the ranks are the children
                Path(f"/proc/{pid}/clear_refs").write_text("5")
            return
        time.sleep(POLL_S)


def _why(said: Sequence[str]) -> str:
    """The line that names the error: of a traceback that is the last one, torchrun says more after it."""
    errors = [text for text in said if "error:" in text.lower()]
    return (errors or list(said) or ["it said nothing"])[-1].strip()
