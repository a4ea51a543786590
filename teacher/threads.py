"""The threads of a teacher process, and how they end together: none stays when another has ended, whatever ended it.

One runs forward passes, one talks to students. What they tell each other of their end is kept where there is room for
it from the start: a thread that ends because no memory is left has none to say so. A third one watches, takes no lock
and needs no memory, and ends the process where the others do not come to their end: a thread that died may hold a lock
for ever, and a forward pass may never return.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Never

from ring.core.errors import DisaggKDError
from ring.starting import heeded
from teacher.service import TeacherService

logger = logging.getLogger("teacher.serve")

#: A drain that takes longer than this is given up: a student that does not read must not keep the process.
DRAIN_TIMEOUT_S = 60.0
#: How long everything may take that comes after a drain. A channel that is being opened takes up to 20 s to end.
CLOSE_TIMEOUT_S = 30.0
#: The same where a thread has ended by itself: there is no end to be waited for.
FAILED_TIMEOUT_S = 10.0
#: How often the threads look at each other.
LOOK_EVERY_S = 0.5


class ThreadEnded(DisaggKDError):
    """A thread of the teacher ended by itself. Nothing can be answered any more, and the process ends."""


def words_of(error: BaseException) -> str:
    """Its type and what it says, if it can be made to say it."""
    with suppress(Exception):
        return f"{type(error).__name__}: {error}"
    return type(error).__name__


class Ending:
    """What the threads of a teacher process know of its end. A context manager of the main thread: within it signals
    ask for the end, and the process ends in time whatever hangs."""

    __slots__ = (
        "_before",
        "_end_by_s",
        "_failed_words",
        "_has_left",
        "_io_thread",
        "_is_asked",
        "_last_words",
        "_looked_s",
        "_old_fd",
        "_poller",
        "_read_fd",
        "_seen",
        "_stderr",
        "_watch",
        "_write_fd",
        "failure",
        "is_over",
        "num_turns",
        "signal",
    )

    def __init__(self, prog: str) -> None:
        """prog: the command, as its line of error names it."""
        #: The number of the first signal that asked for the end; 0: none did.
        self.signal = 0
        #: The compute side is done: the I/O thread is to end as well.
        self.is_over = False
        #: Of the main thread, so that the watch sees it get on.
        self.num_turns = 0
        #: What ended the I/O thread, if anything has.
        self.failure: BaseException | None = None
        self._io_thread: threading.Thread | None = None
        self._is_asked = self._has_left = False
        self._end_by_s: float | None = None
        self._seen = (0.0, 0)
        self._looked_s = time.monotonic()
        self._last_words = (
            f"{prog}: error: it was to end, and a thread of it hangs: it ends as it is, without a goodbye\n".encode()
        )
        self._failed_words = (
            f"{prog}: error: the thread that talks to students ended, and another one hangs: it ends as it is".encode()
        )

    def __enter__(self) -> Ending:
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poller, self._stderr = select.poll(), select.poll()
        self._poller.register(self._read_fd, select.POLLIN)
        self._stderr.register(2, select.POLLOUT)
        # Python's own handlers run on the main thread between two of its steps, and a forward pass may be one step.
        try:
            self._old_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        except ValueError:  # not the main thread
            os.close(self._read_fd)
            os.close(self._write_fd)
            raise
        self._watch = threading.Thread(target=self._look_on, name="teacher-watch", daemon=True)
        self._watch.start()
        self._before: dict[signal.Signals, Any] = {number: signal.signal(number, self._note) for number in heeded()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: one that C code had set
        signal.set_wakeup_fd(self._old_fd)
        self._has_left = True
        os.write(self._write_fd, b"\0")
        self._watch.join(CLOSE_TIMEOUT_S)
        os.close(self._read_fd)
        os.close(self._write_fd)

    def start(self, talk: Callable[[], None]) -> threading.Thread:
        """Run the I/O thread's work."""
        self._io_thread = threading.Thread(target=self._run, args=(talk,), name="teacher-io", daemon=True)
        self._io_thread.start()
        return self._io_thread

    @property
    def io_has_ended(self) -> bool:
        """Whether the I/O thread is there no more, whatever it left behind."""
        return self.failure is not None or (self._io_thread is not None and not self._io_thread.is_alive())

    @property
    def is_due(self) -> bool:
        """Whether nothing new is to be begun."""
        return self.signal != 0 or self.io_has_ended

    def raise_failure(self) -> None:
        """Raises ThreadEnded: the I/O thread ended by itself."""
        if not self.io_has_ended or (self.failure is None and self.is_over):
            return
        why = "without a word" if self.failure is None else words_of(self.failure)
        raise ThreadEnded(
            f"the thread that talks to students ended: {why}; nothing is answered any more: start the teacher again"
        ) from self.failure

    def give_up(self) -> Never:
        """End the process as it is. What students see is what they see of one that was killed."""
        try:
            if self._stderr.poll(0):  # who reads it may have stopped
                os.write(2, self._words())
        finally:
            os._exit(1)

    def _words(self) -> bytes:
        if not self.io_has_ended or (self.failure is None and self.is_over):
            return self._last_words
        with suppress(Exception):  # no memory
            return self._failed_words + f" ({type(self.failure).__name__})\n".encode()
        return self._failed_words + b"\n"

    def _run(self, talk: Callable[[], None]) -> None:
        try:
            talk()
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self.failure = error

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number

    # ---- the watch's thread --------------------------------------------------------------------------------------

    def _look_on(self) -> None:
        while not self._has_left:
            try:
                self._look()
            except Exception:  # noqa: BLE001 - no memory for the moment: whoever watches must not end with the others
                time.sleep(LOOK_EVERY_S)

    def _look(self) -> None:
        now_s, looked_s = time.monotonic(), self._looked_s
        self._looked_s = now_s
        if self._end_by_s is not None and now_s - looked_s > 4 * LOOK_EVERY_S:
            self._end_by_s += now_s - looked_s  # this process was stopped, or had no processor
        self._set_deadline(now_s)
        if self._end_by_s is not None and now_s >= self._end_by_s:
            self.give_up()
        if self._poller.poll(LOOK_EVERY_S * 1e3):
            numbers = os.read(self._read_fd, 64)
            self._is_asked = self._is_asked or any(number in numbers for number in heeded())

    def _set_deadline(self, now_s: float) -> None:
        """By when the process is to be gone, unless it gets on: what it waits for has changed, or in a drain a turn of
        the main thread is done. How long a drain takes in all is for the main thread to see."""
        num_turns = 0
        if self.is_over:
            left_s = CLOSE_TIMEOUT_S
        elif self.io_has_ended:
            left_s = FAILED_TIMEOUT_S
        elif self._is_asked or self.signal:
            left_s, num_turns = DRAIN_TIMEOUT_S + CLOSE_TIMEOUT_S, self.num_turns
        else:
            return
        if self._end_by_s is None or self._seen != (left_s, num_turns):
            self._seen = (left_s, num_turns)
            self._end_by_s = now_s + left_s


def run_service(service: TeacherService, ending: Ending, *, ready: Callable[[], None] = lambda: None) -> None:
    """Both sides of the service, until a signal asks for the end and everything held is answered; then it is closed.

    ready: called once students are served: whoever is told may send a signal at once. Raises ThreadEnded."""
    io_thread = ending.start(lambda: talk(service, lambda: ending.is_over))
    try:
        ready()
        while not ending.is_due:
            if not service.compute_turn():
                service.wait_for_work(timeout_s=LOOK_EVERY_S)
            ending.num_turns += 1
        ending.raise_failure()
        logger.info("draining")
        service.drain()
        give_up_s = time.monotonic() + DRAIN_TIMEOUT_S
        while not service.drained and not ending.io_has_ended and time.monotonic() < give_up_s:
            if not service.compute_turn():
                service.wait_for_work(timeout_s=0.05)
            ending.num_turns += 1
        ending.raise_failure()
    finally:
        ending.is_over = True
        if not _has_ended(io_thread):
            ending.give_up()  # it uses what is about to be closed
        service.close()


def _has_ended(thread: threading.Thread) -> bool:
    """Whether it ends in the time that it has, of which a time in which the process was stopped is no part."""
    for _ in range(max(1, round(CLOSE_TIMEOUT_S / LOOK_EVERY_S))):
        thread.join(LOOK_EVERY_S)
        if not thread.is_alive():
            return True
    return False


def talk(service: TeacherService, is_over: Callable[[], bool]) -> None:
    """The I/O thread's work: everything but the forward passes."""
    while not is_over():
        if service.io_turn():
            continue
        poller = select.poll()
        for fd in service.wait_fds():
            poller.register(fd, select.POLLIN)
        deadline_s = service.next_deadline_s()
        left_s = LOOK_EVERY_S if deadline_s is None else min(LOOK_EVERY_S, max(0.0, deadline_s - time.monotonic()))
        poller.poll(left_s * 1e3 + 1)
        service.acknowledge_wake()
