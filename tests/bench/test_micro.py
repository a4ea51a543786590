"""The micro-benchmarks run, and time every way to the loss that needs no other library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from bench.loss_ways import WAYS

ROOT = Path(__file__).resolve().parents[2]


def test_the_micro_benchmarks_run_and_leave_their_figures(tmp_path: Path) -> None:
    """In a process of its own: xdist workers refuse to benchmark."""
    found = tmp_path / "figures.json"
    command = [sys.executable, "-m", "pytest", "-q", "bench/bench_micro.py", f"--benchmark-json={found}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    groups: dict[str, list[str]] = {}
    for benchmark in json.loads(found.read_text())["benchmarks"]:
        assert benchmark["stats"]["rounds"] >= 5
        groups.setdefault(benchmark["group"].partition(",")[0], []).append(benchmark["name"])
    own = [way.name for way in WAYS.values() if way.package is None]
    assert groups["loss"] == [f"test_loss_step[{name}]" for name in own]
    assert len(groups["codec"]) == 2
