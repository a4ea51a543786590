"""`python -m bench.tethered PARENT CPU COMMAND...`: becomes a command that gets SIGTERM when its parent process ends.

However a bench ends, killed included, its teacher must not go on burning a core. The kernel keeps the wish over exec,
and so the pinning to a CPU (`-` pins to none) that every thread of the command inherits. Imports next to nothing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def tethered(command: Sequence[str], *, cpu: int | None = None) -> list[str]:
    """The command line that runs `command` tethered to this process. Start it from the main thread: the kernel means
    that thread when it says parent."""
    return [sys.executable, "-m", "bench.tethered", str(os.getpid()), "-" if cpu is None else str(cpu), *command]


def main(argv: Sequence[str]) -> None:
    """Does not return: this process becomes the command."""
    parent, cpu, *command = argv
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(parent):
        sys.exit(143)  # It ended before the kernel was told.
    if cpu != "-":
        os.sched_setaffinity(0, {int(cpu)})
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
