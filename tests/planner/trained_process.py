"""`python -m tests.planner.trained_process JSON`: one real training run, and the memory that it took.

A process of its own, because a peak is a property of a process. First a tiny run on labels alone brings in what the
commands import as they go; then what is resident is noted, the peak is reset, and the run is made. Prints
{"before_bytes", "peak_bytes"}: the latter from the last step's own metrics, so that writing the model is not in it.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import torch

import teacher.load
import teacher.service  # noqa: F401 - with the colocated layout's imports among what was there before
from student.config import TrainConfig
from student.metrics import peak_rss_bytes
from student.train.run import train


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmRSS")


def main(argv: Sequence[str]) -> int:
    request = json.loads(argv[0])
    torch.set_num_threads(1)
    # The command's own lines would be on stdout too.
    with redirect_stdout(sys.stderr):
        train(_config(request["warm_up"]))
        before_bytes = resident_bytes()
        Path("/proc/self/clear_refs").write_text("5")
        assert peak_rss_bytes() < before_bytes + (16 << 20), "the peak was not reset"
        if request["verbose"]:
            logging.getLogger("student").setLevel(logging.INFO)
            logging.basicConfig(stream=sys.stderr)
        train(_config(request["run"]))
    lines = (Path(request["run"]["out"]) / "metrics.jsonl").read_text().splitlines()
    print(json.dumps({"before_bytes": before_bytes, "peak_bytes": json.loads(lines[-1])["peak_rss_bytes"]}))
    return 0


def _config(settings: dict[str, object]) -> TrainConfig:
    return TrainConfig(**{name: tuple(v) if isinstance(v, list) else v for name, v in settings.items()})  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
