"""The conformance suite in a fork that has imported all it needs: arguments are pytest's.

The suite's peers come from a server, which multiprocessing would start as a new interpreter; that would import torch
once more. Here the server is another fork.
"""

from __future__ import annotations

import multiprocessing.forkserver
import multiprocessing.util
import os
import sys
import tempfile
from collections.abc import Sequence

import pytest

from tests.transport import peers  # noqa: F401 - names what its server has to have imported


def fork_instead(path: str, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """As multiprocessing.util.spawnv_passfds: run `... -c CODE` with those descriptors; the pid."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _let_go_of_all_but({0, 1, 2, *map(int, descriptors)})
            exec(arguments[-1], {"__name__": "__main__"})
            code = 0
        finally:
            os._exit(code)
    return pid


def _let_go_of_all_but(kept: set[int]) -> None:
    """Their numbers stay taken, so that an object which still knows one can't close what is opened later."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in kept and fd != nothing:
            os.dup2(nothing, fd, inheritable=False)


def main() -> int:
    multiprocessing.util.spawnv_passfds = fork_instead
    os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp()  # the suite looks what is left in it
    multiprocessing.forkserver.ensure_running()  # before anything of UCX is open
    return int(pytest.main(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
