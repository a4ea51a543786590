"""A command before its work begins: a signal ends it at once, in one line.

Importing torch takes seconds, and loading a model minutes. What an exception in the midst of an import leaves behind is
a broken module, and other errors than the signal's; so none is raised. Nothing here imports more than Python's own.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType


def heeded() -> tuple[signal.Signals, ...]:
    """The signals that ask a command to end. SIGHUP and SIGINT are none where whoever started it has them ignored: for
    a command that `nohup` or a script put into the background they are meant for others."""
    of_a_terminal = (one for one in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(one) is not signal.SIG_IGN)
    return (signal.SIGTERM, *of_a_terminal)


def end_at_once(prog: str) -> None:
    """From now on such a signal ends this process with 128 + its number."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        how = "interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"
        with suppress(OSError):
            if stderr.poll(0):  # who reads it may have stopped
                os.write(2, f"{prog}: {how}\n".encode())
        os._exit(128 + number)

    stderr = select.poll()
    stderr.register(2, select.POLLOUT)

    for number in heeded():
        signal.signal(number, on_signal)


@contextmanager
def ending_at_once(prog: str) -> Iterator[None]:
    """As `end_at_once`, within the block."""
    before = {number: signal.getsignal(number) for number in heeded()}
    end_at_once(prog)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: one that C code had set
