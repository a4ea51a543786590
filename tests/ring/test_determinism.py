"""What a deterministic process is, and what it does not cost."""

from __future__ import annotations

import subprocess
import sys


def test_deterministic_kernels_are_on_and_the_compiler_is_not_loaded() -> None:
    """Loading it takes seconds; nothing here compiles."""
    script = (
        "import sys, torch\n"
        "from ring.determinism import fix_kernels\n"
        "fix_kernels(num_threads=1)\n"
        "assert torch.are_deterministic_algorithms_enabled()\n"
        "assert not torch.is_deterministic_algorithms_warn_only_enabled()\n"
        "assert torch.get_num_threads() == 1\n"
        "assert 'torch._inductor' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
