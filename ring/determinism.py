"""What `--deterministic` means for a process, the same for teacher and trainer.

Bit-identical states and curves (R7, R8) need the same sums in the same order on every run: a fixed number of threads
and kernels that do not depend on timing. The same CPU kind and library build are the user's part.
"""

from __future__ import annotations

import os

import torch


def fix_kernels(*, num_threads: int) -> None:
    """Once at start, before the first CUDA call: fixed thread count, deterministic kernels. Process-wide."""
    # cuBLAS reads this when its first handle is made; without it torch refuses matrix products in this mode.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(num_threads)
    # The same switch as use_deterministic_algorithms(True), which also loads torch's compiler, for two seconds.
    torch.set_deterministic_debug_mode("error")
    torch.backends.cudnn.benchmark = False
