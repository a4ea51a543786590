"""What a process says must not hold it up, nor end it, whoever listens.

A terminal stops taking anything after Ctrl-S, a pipe once it is full, and both fail when the other side is gone: a
write would wait for ever, or raise wherever something happened to be said. Here the streams only keep what is written,
and a thread of their own passes it on. Regular files are left alone: they take what they get, or say that they can't.
"""

from __future__ import annotations

import io
import logging
import os
import select
import stat
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

logger = logging.getLogger(__name__)

#: Of what waits to be taken; beyond it the oldest is left out. About ten thousand lines.
MAX_WAITING_BYTES = 2**20
#: One write: what a pipe takes at once if it takes anything, and a slow serial line within some looks at the end.
_WRITE_BYTES = 4096
#: What was said in small pieces is written together, up to this.
_JOINED_BYTES = 2**16
#: At the end: how often it is looked, and after how many looks at an output that takes nothing the rest is given up.
#: Looks are counted, not seconds: a process that was stopped meanwhile has not been patient.
_LOOK_EVERY_S, _MAX_VAIN_LOOKS = 0.1, 50
#: The same where it could take some, and the thread that writes does not get on.
_MAX_LOOKS_AT_A_THREAD = 10 * _MAX_VAIN_LOOKS


def open_standard_streams() -> None:
    """Where the caller closed stdin, stdout or stderr (`>&-`) it is /dev/null from now on, for libraries and children
    too: the next file opened would take that number, and get what is printed. What an encoding can't say is escaped."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
            os.set_inheritable(fd, True)
    # Python has none where it found none. Not of the number: something else may have it by now.
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115 - these three: as long as the process
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", errors="backslashreplace")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


@contextmanager
def unhindered_outputs() -> Iterator[None]:
    """Within the block nothing that is written to `sys.stdout` or `sys.stderr` waits or fails where they are a terminal
    or a pipe. After it all is written, except where nothing was taken for some seconds: that is given up, and what is
    said later is lost too. A block within a block changes nothing."""
    before = sys.stdout, sys.stderr
    outlets: dict[tuple[int, int], _Outlet] = {}
    sys.stdout, sys.stderr = _unhindered(sys.stdout, outlets), _unhindered(sys.stderr, outlets)
    made = sys.stdout, sys.stderr
    try:
        yield
    finally:
        for stream in made:
            if isinstance(stream, _Stream):  # any other is as it was, and may be a file on a full disk
                stream.flush()
        endings = [outlet.close() for outlet in outlets.values()]
        # Whoever has put another stream in place meanwhile had a reason.
        if all(endings) and sys.stdout is made[0]:
            sys.stdout = before[0]
        if all(endings) and sys.stderr is made[1]:
            sys.stderr = before[1]


def _unhindered(stream: TextIO, outlets: dict[tuple[int, int], _Outlet]) -> TextIO:
    """outlets: by device and inode; both streams of one terminal share one, so that their lines keep their order."""
    if isinstance(stream, _Stream):
        return stream
    try:
        fd = stream.fileno()
        found = os.fstat(fd)
    except (OSError, ValueError, AttributeError):  # captured by a notebook, or a test: it is no file
        return stream
    is_terminal = os.isatty(fd)
    if not (is_terminal or stat.S_ISFIFO(found.st_mode) or stat.S_ISSOCK(found.st_mode)):
        return stream
    with suppress(OSError):
        stream.flush()  # what was said before comes first
    key = (found.st_dev, found.st_ino)
    if key not in outlets:
        outlets[key] = _Outlet(name="standard output" if stream is sys.stdout else None)
    raw = _Kept(fd, outlets[key], is_terminal=is_terminal)
    return _Stream(io.BufferedWriter(raw), encoding=stream.encoding, errors="backslashreplace", line_buffering=True)


class _Stream(io.TextIOWrapper):
    """Text on its way to an outlet."""


class _Outlet:
    """What a terminal or pipe is still to get, and the thread that writes it there."""

    def __init__(self, *, name: str | None) -> None:
        """name: to tell in the log when it takes nothing any more; None: there is nowhere to tell it."""
        self._name = name
        self._pid = os.getpid()
        lock = threading.RLock()
        #: There is something to write, or an end; and: something was written, or nothing will be any more.
        self._changed, self._taken = threading.Condition(lock), threading.Condition(lock)
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._waiting_bytes = self._lost_bytes = 0
        #: The descriptor that a write is under way to.
        self._busy: int | None = None
        #: is_closed: nobody drains it any more. is_silent: it takes nothing any more.
        self._is_closed = self._is_silent = False
        self._thread = threading.Thread(target=self._drain, name="output", daemon=True)
        self._thread.start()

    def put(self, fd: int, data: bytes) -> int:
        """Keep it to be written; returns how much of it was taken."""
        if os.getpid() != self._pid:
            return os.write(fd, data)  # a fork has no thread that would
        with self._changed:
            if self._is_silent:
                return len(data)
            if self._is_closed:
                return os.write(fd, data)
            if self._waiting and _overwrites(data) and self._waiting[-1][0] == fd and _overwrites(self._waiting[-1][1]):
                # A frame of a progress bar that nobody saw: the next one stands in its place anyway.
                self._waiting_bytes -= len(self._waiting.pop()[1])
            self._waiting.append((fd, data))
            self._waiting_bytes += len(data)
            self._changed.notify_all()
            while self._waiting_bytes > MAX_WAITING_BYTES:
                if self._gets_on():
                    self._taken.wait(_LOOK_EVERY_S)  # it is read, only not as fast as it is written
                else:
                    self._leave_out_oldest()
        return len(data)

    def _gets_on(self) -> bool:
        """Whether what waits is being taken at this moment."""
        fd = self._waiting[0][0] if self._busy is None else self._busy
        return self._thread.is_alive() and not self._is_closed and _is_writable(fd)

    def _leave_out_oldest(self) -> None:
        fd, data = self._waiting.popleft()
        # A line goes whole; what is much of all that may wait loses no more than it has to.
        is_much = len(data) > MAX_WAITING_BYTES // 16
        lost = min(len(data), self._waiting_bytes - MAX_WAITING_BYTES) if is_much else len(data)
        if lost < len(data):
            self._waiting.appendleft((fd, data[lost:]))
        self._waiting_bytes -= lost
        self._lost_bytes += lost

    def close(self) -> bool:
        """Whether all was taken; what is not, in some seconds, is lost."""
        if os.getpid() != self._pid:
            return True
        vain_looks = looks_at_thread = 0
        try:
            with self._taken:
                while (self._waiting or self._busy is not None) and not self._is_silent and self._thread.is_alive():
                    if self._taken.wait(_LOOK_EVERY_S):
                        vain_looks = looks_at_thread = 0
                        continue
                    looks_at_thread += 1
                    vain_looks += self._busy is not None and not _is_writable(self._busy)
                    if vain_looks > _MAX_VAIN_LOOKS or looks_at_thread > _MAX_LOOKS_AT_A_THREAD:
                        break
            if self._is_silent:
                self._thread.join(_LOOK_EVERY_S * _MAX_VAIN_LOOKS)  # it has only to tell why
        except KeyboardInterrupt:
            pass  # whoever waits here has asked for no more than this
        with self._changed:
            self._is_silent = self._is_silent or bool(self._waiting) or self._busy is not None
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify_all()
            return not self._is_silent

    def _drain(self) -> None:
        while (taken := self._next()) is not None:
            fd, data = taken
            try:
                self._write(fd, data)
            except OSError as error:
                self._fall_silent()
                if self._name is not None:
                    logger.warning("the %s takes nothing any more (%s); the run goes on", self._name, error.strerror)
                return
            except BaseException:  # no memory, say: nobody is to wait for this thread
                self._fall_silent()
                raise
            with self._taken:
                self._busy = None
                self._taken.notify_all()

    def _fall_silent(self) -> None:
        with self._taken:
            self._is_silent, self._busy = True, None
            self._waiting.clear()
            self._waiting_bytes = 0
            self._taken.notify_all()

    def _next(self) -> tuple[int, bytes] | None:
        with self._changed:
            while not self._waiting:
                if self._is_closed:
                    return None
                self._changed.wait()
            fd, data = self._waiting.popleft()
            while self._waiting and self._waiting[0][0] == fd and len(data) < _JOINED_BYTES:
                data += self._waiting.popleft()[1]
            self._waiting_bytes -= len(data)
            if self._lost_bytes:
                data = b"\n[%d bytes of output are left out: nothing took them]\n" % self._lost_bytes + data
                self._lost_bytes = 0
            self._busy = fd
            return fd, data

    def _write(self, fd: int, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                written = os.write(fd, left[:_WRITE_BYTES])
            except BlockingIOError:  # another process with this terminal has made it so
                select.select([], [fd], [])
                continue
            left = left[written:]
            with self._taken:
                self._taken.notify_all()


class _Kept(io.RawIOBase):
    """A descriptor whose writes an outlet keeps."""

    def __init__(self, fd: int, outlet: _Outlet, *, is_terminal: bool) -> None:
        self._fd = fd
        self._outlet = outlet
        #: As it was: of a terminal that is gone nobody can ask.
        self._is_terminal = is_terminal

    def write(self, data: ReadableBuffer) -> int:
        return self._outlet.put(self._fd, bytes(data))

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return self._is_terminal


def _overwrites(data: bytes) -> bool:
    return data.startswith(b"\r") and b"\n" not in data


def _is_writable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    return bool(poller.poll(0))
