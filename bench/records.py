"""What a bench leaves behind: a line of JSON under runs/bench/ that says what was measured, on what, and by which code.

Figures come as a median with percentiles, never alone, and each may be held against a target. A speed-up is claimed by
citing two of these records.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from ring.core.errors import ConfigError, LocalProtocolError

RECORDS_DIR = Path("runs/bench")
#: Distributions whose release may change a figure; those that are not installed are left out of a record.
_DISTRIBUTIONS = ("disaggkd", "torch", "numpy", "pyzmq", "msgpack", "crc32c", "transformers", "libucx-cu12", "triton")

Verdict = Literal["met", "missed", "failed", "reported"]
Setting = str | int | float | bool | None


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A number of measurements of one thing, in one unit."""

    num: int
    low: float
    p10: float
    median: float
    p90: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Percentiles are interpolated. Raises LocalProtocolError: nothing was measured."""
        if not values:
            raise LocalProtocolError("no measurement to summarize; allowed: one or more")
        low, p10, median, p90, high = (float(value) for value in np.percentile(values, (0, 10, 50, 90, 100)))
        return cls(num=len(values), low=low, p10=p10, median=median, p90=p90, high=high)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One figure against its target. `at_most`: which way is better. Without a `target` it is only reported.

    `limit`: beyond it the bench fails; None: a missed target is said, but fails nothing."""

    name: str
    measured: float
    unit: str = ""
    target: float | None = None
    limit: float | None = None
    at_most: bool = True

    @property
    def verdict(self) -> Verdict:
        if self.target is None:
            return "reported"
        if self._within(self.target):
            return "met"
        return "missed" if self.limit is None or self._within(self.limit) else "failed"

    def _within(self, bound: float) -> bool:
        # A NaN is within no bound.
        return self.measured <= bound if self.at_most else self.measured >= bound


@dataclass(frozen=True, kw_only=True)
class Record:
    """One case of one bench. `measured`: by name, which carries the unit. `predicted`: what the closed forms say.

    `bytes_moved`: payload bytes that crossed the transport while it was measured."""

    bench: str
    case: str
    settings: Mapping[str, Setting]
    measured: Mapping[str, Spread]
    bytes_moved: int
    predicted: Mapping[str, float] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()
    notes: tuple[str, ...] = ()


def write_record(record: Record, *, directory: Path = RECORDS_DIR) -> Path:
    """Append the record, with the code and the machine it was made by, to `<bench>.jsonl`; returns that file.

    Raises ConfigError: it can't be written."""
    checks = [asdict(check) | {"verdict": check.verdict} for check in record.checks]
    line = json.dumps(environment() | asdict(record) | {"checks": checks})
    path = directory / f"{record.bench}.jsonl"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(line + "\n")
    except OSError as error:
        raise ConfigError(f"bench record {path} can't be written: {error.strerror}") from error
    return path


def environment() -> dict[str, object]:
    """When, which code, which machine, which releases. Nothing that names the machine or its user."""
    return {
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_sha": git_sha(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "kernel": platform.release(),
        "versions": {"python": platform.python_version()} | _versions(),
    }


def git_sha() -> str | None:
    """The commit of this code, with `+` where tracked files differ from it; None outside of a git tree."""
    root = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    sha = git("rev-parse", "HEAD")
    # An installed copy may lie in the git tree of something else, which does not track it.
    if sha is None or git("ls-files", "--error-unmatch", __file__) is None:
        return None
    return sha + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def _versions() -> dict[str, str]:
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
