"""Memory of one loss call, full logits against fused, each in a fresh process so that nothing hides in a cache.

`python -m examples.demo.memory full|fused` prints the peak of one call in bytes, beyond what was resident before it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.stages import StageFailed
from bench.tethered import tethered
from student.metrics import peak_rss_bytes

#: A real vocabulary (Qwen3's) and a small batch: the full loss must still fit into a laptop.
NUM_ROWS, VOCAB_SIZE, HIDDEN_SIZE = 512, 151_936, 256


def measure(kind: str) -> int:
    """Bytes that the loss of that kind (full or fused) adds to a process at its peak.

    Raises StageFailed: it did not get through, mostly for want of memory."""
    command = [sys.executable, "-m", "examples.demo.memory", kind]
    done = subprocess.run(tethered(command), capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise StageFailed(f"memory of the {kind} loss: exit {done.returncode}: {said[-1]}")
    return int(done.stdout)


def _measure_here(kind: str) -> int:
    import torch

    from student.loss import FullLogitsLoss, Head, KDLoss

    def inputs(rows: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(rows, HIDDEN_SIZE, dtype=torch.bfloat16) for _ in range(2))

    torch.manual_seed(0)
    weights = [torch.randn(VOCAB_SIZE, HIDDEN_SIZE, dtype=torch.bfloat16) / 16 for _ in range(2)]
    weights[0].requires_grad_(True)
    weights[0].grad = torch.zeros_like(weights[0])
    loss_fn = (FullLogitsLoss if kind == "full" else KDLoss)("forward_kl", kd_weight=0.9, ce_weight=0.1)
    # A tiny call first: threads and kernels take their memory before the measurement.
    for rows in (1, NUM_ROWS):
        student, teacher = inputs(rows)
        labels = torch.randint(VOCAB_SIZE, (rows,))
        # From here: a peak of the call before, or of making the inputs, is not this call's.
        Path("/proc/self/clear_refs").write_text("5")
        before = peak_rss_bytes()
        out = loss_fn(student.requires_grad_(True), Head(weight=weights[0]), teacher, Head(weight=weights[1]), labels)
        out.loss.backward()
    return peak_rss_bytes() - before


if __name__ == "__main__":
    print(_measure_here(sys.argv[1]))
