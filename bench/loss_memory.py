"""Peak memory of one way to the loss, in a process of its own: a peak is a property of a process, and only grows.

    python -m bench.loss_memory '{"way": ..., "handed_over": true, "rows": ...}'

prints the bytes that were resident at the peak beyond what was there before the call.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch

from bench.loss_ways import WAYS, Inputs, LossCase, Way, ours
from bench.processes import ONE_THREAD
from bench.tethered import tethered
from ring.core.errors import DisaggKDError

_STATUS = Path("/proc/self/status")


class MeasurementFailed(DisaggKDError):
    """The process that was measured ended without a figure."""


def extra_bytes(way: Way, case: LossCase, *, handed_over: bool) -> int:
    """Bytes at the peak beyond the inputs. handed_over, for ours: autograd gets dW in the weight's dtype; otherwise it
    is added to a gradient that was there before.

    Raises MeasurementFailed: with the last line that the process said."""
    request = json.dumps({"way": way.name, "handed_over": handed_over} | asdict(case))
    command = tethered([sys.executable, "-m", "bench.loss_memory", request])
    # Fresh pages for every buffer, given back when it is freed: what is resident is what is used.
    environment = os.environ | ONE_THREAD | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()[-1:] or ["nothing on stderr"]
        raise MeasurementFailed(f"memory of {way.name!r}: its process ended with {done.returncode}: {said[0]}")
    return int(done.stdout.split()[-1])


def main(argv: Sequence[str]) -> int:
    request = json.loads(argv[0])
    way, handed_over = WAYS[request.pop("way")], request.pop("handed_over")
    torch.set_num_threads(1)
    case = LossCase(**request)
    # Code and tables that the first call of a way brings in are not the way's memory.
    small = Inputs(LossCase(**(asdict(case) | {"rows": 16, "vocab_size": 512})))
    way.start(small)()
    del small
    inputs = Inputs(case)
    main_grad = None
    if way.mode is not None and not handed_over:
        main_grad = torch.zeros(inputs.student_VH.shape, dtype=torch.float32)
    step = way.start(inputs) if main_grad is None else ours(way, inputs, main_grad)
    before = _reset_peak()
    step()
    print(_status_bytes("VmHWM") - before)
    return 0


def _reset_peak() -> int:
    """What is resident now; the peak starts from here where the kernel lets it."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise MeasurementFailed(f"{_STATUS}: no {name}; this bench needs Linux")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
