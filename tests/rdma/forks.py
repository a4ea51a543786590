"""Commands of the virtual machine as forks of the process that runs the tests.

Everything is emulated there: importing torch takes a minute. So the tests' own process imports all that a command
needs, once, and a command is a child of it. The child is a process like any other, but must be the first to open UCX:
what is open does not survive a fork.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.system.zygote import run_child

#: No step of a test takes a tenth of this in the emulated machine; it only ends tests that hang.
HANG_GUARD_S = 400.0


class Forked:
    """`python -m module arguments`, in its own process group, with a log of what it says."""

    def __init__(self, module: str, *arguments: object, cwd: Path, env: Mapping[str, str]) -> None:
        cwd.mkdir(parents=True, exist_ok=True)
        self.cwd = cwd
        self._out, self._error = cwd / f"{module}.out", cwd / f"{module}.err"
        self._code: int | None = None
        request = {"module": module, "arguments": [*map(str, arguments)], "cwd": str(cwd)}
        request |= {"out": str(self._out), "error": str(self._error), "env": dict(env), "namespaces": []}
        self.pid = os.fork()
        if self.pid == 0:
            try:
                run_child(request)
            finally:
                os._exit(70)

    @property
    def output(self) -> str:
        return self._out.read_text(errors="replace") if self._out.exists() else ""

    @property
    def log(self) -> str:
        """All that it said: output, then errors."""
        return self.output + (self._error.read_text(errors="replace") if self._error.exists() else "")

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None: it runs."""
        if self._code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, *, guard_s: float = HANG_GUARD_S) -> int:
        deadline_s = time.monotonic() + guard_s
        while (code := self.poll()) is None:
            assert time.monotonic() < deadline_s, f"it does not end:\n{self.log}"
            time.sleep(0.02)
        return code

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Poll while it runs. AssertionError: it ended, or the hang guard struck, before `holds`."""
        deadline_s = time.monotonic() + HANG_GUARD_S
        while not holds():
            assert self.poll() is None, f"it ended before {what}:\n{self.log}"
            assert time.monotonic() < deadline_s, f"waited for {what}:\n{self.log}"
            time.sleep(0.02)

    def send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def end(self) -> None:
        """It and its children are gone when this returns, however they were."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.wait()
