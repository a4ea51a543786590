"""`python -m bench.claims.launched NOTE HEADROOM MODULE FLAGS...`: `python -m MODULE`, its imports told from the rest.

What a trainer imports takes memory that no plan is about. So everything is imported first; then what is resident is
written to the file NOTE, and the peak counter starts anew. HEADROOM, in bytes, caps what the process may take from
there on (0: no cap). The cap is RLIMIT_DATA: what a process may write and shares with nobody, that is heap, anonymous
maps and stacks of threads. It needs no right and no cgroup; an allocation beyond it fails as on a full machine.
"""

from __future__ import annotations

import importlib
import os
import resource
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

#: What the commands import as they go.
IMPORTS = (
    *("datasets", "torch._inductor.config", "teacher.load", "teacher.service", "student.train.run"),
    *("transformers.models.auto.modeling_auto", "transformers.models.qwen3.modeling_qwen3"),
)
#: Buffers are maps of their own, given back when they are freed; threads get no heap and no more stack than they use.
#: Both count against the cap from the moment they are reserved.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
STACK_BYTES = 1 << 20


def main(argv: Sequence[str]) -> None:
    """Does not return where the module ends the process itself."""
    note, headroom, module, *flags = argv
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        # The allocator reads them once, before Python runs.
        command = [sys.executable, "-m", "bench.claims.launched", *argv]
        os.execve(sys.executable, command, os.environ | ENVIRONMENT)
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    for name in IMPORTS:
        importlib.import_module(name)
    Path(note).write_text(str(field_bytes("VmRSS")))
    Path("/proc/self/clear_refs").write_text("5")
    if int(headroom):
        limit = field_bytes("VmData") + int(headroom)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    sys.argv = [module, *flags]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def field_bytes(name: str, pid: int | str = "self") -> int:
    """A size of a process as the kernel counts it: VmRSS, VmHWM (its peak), VmData (private and writable).

    Raises OSError: the process is gone, or the kernel has no such field."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/{pid}/status has no {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
