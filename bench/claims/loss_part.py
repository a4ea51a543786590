"""The loss alone, in bf16, at a run's sizes: what part of a step it is.

    python -m bench.claims.loss_part '{"kind": "fused", "num_threads": 1, "device": "cpu", "sizes": {"rows": ...}}'

prints the median seconds of the loss and its gradients, in a process of its own, as the trainer has one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Literal

import torch
from torch import Tensor

from bench.stages import ENVIRONMENT, StageFailed
from bench.tethered import tethered
from student.loss import FullLogitsLoss, Head, KDLoss

#: After one that brings in what is loaded at the first call.
NUM_CALLS = 5
#: As `student.train` weighs them unless it is told otherwise.
KD_WEIGHT, CE_WEIGHT = 0.9, 0.1

Kind = Literal["full", "fused"]


@dataclass(frozen=True, kw_only=True)
class LossSizes:
    """Of one microbatch. rows: those that count."""

    rows: int
    vocab_size: int
    student_hidden: int
    teacher_hidden: int


def loss_seconds(kind: Kind, sizes: LossSizes, *, num_threads: int, device: str) -> float:
    """The median of NUM_CALLS. Raises StageFailed: its process ended without a figure."""
    request = json.dumps({"kind": kind, "num_threads": num_threads, "device": device, "sizes": asdict(sizes)})
    command = tethered([sys.executable, "-m", "bench.claims.loss_part", request])
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise StageFailed(f"the {kind} loss alone: exit {done.returncode}: {said[-1]}")
    return float(done.stdout)


def main(argv: Sequence[str]) -> None:
    request = json.loads(argv[0])
    sizes, device = LossSizes(**request["sizes"]), request["device"]
    torch.set_num_threads(request["num_threads"])
    torch.manual_seed(0)

    def normal(rows: int, width: int, scale: float) -> Tensor:
        return torch.randn(rows, width, device=device).mul_(scale).bfloat16()

    hidden_NH = normal(sizes.rows, sizes.student_hidden, 1.0).requires_grad_()
    head = Head(
        weight=normal(sizes.vocab_size, sizes.student_hidden, 2.0 * sizes.student_hidden**-0.5).requires_grad_()
    )
    teacher_NH = normal(sizes.rows, sizes.teacher_hidden, 1.0)
    teacher_head = Head(weight=normal(sizes.vocab_size, sizes.teacher_hidden, 2.0 * sizes.teacher_hidden**-0.5))
    labels_N = torch.arange(sizes.rows, device=device) % sizes.vocab_size
    loss_type = KDLoss if request["kind"] == "fused" else FullLogitsLoss
    loss_fn = loss_type("forward_kl", kd_weight=KD_WEIGHT, ce_weight=CE_WEIGHT)
    taken_s = []
    for _ in range(NUM_CALLS + 1):
        hidden_NH.grad = head.weight.grad = None
        began_s = time.perf_counter()
        torch.autograd.backward(loss_fn(hidden_NH, head, teacher_NH, teacher_head, labels_N).loss)
        if device != "cpu":
            torch.cuda.synchronize(device)
        taken_s.append(time.perf_counter() - began_s)
    print(median(taken_s[1:]))


if __name__ == "__main__":
    main(sys.argv[1:])
