"""A process at its limit of descriptors: what could not be opened is said to be that, and nothing is left of the rest.

Another thread may take the last descriptor at any moment, so each call that takes one has to fail once.
"""

from __future__ import annotations

import errno
import io
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from ring.core.errors import PeerLost, TransportError
from tests.leaks import expect_no_more, held
from tests.limits import descriptors_below
from tests.transport.peers import HANG_GUARD_S, while_serving
from transport import registry
from transport.memory import SlotArena
from transport.wakeup import Wakeup

SLOT_BYTES = 4096
#: What Python code opens descriptors with, for a while or for good.
OPENERS: tuple[tuple[Any, str], ...] = (
    *((os, name) for name in ("open", "eventfd", "pidfd_open", "listdir", "scandir")),
    (io, "open"),
    (select, "epoll"),
    (socket, "getaddrinfo"),
    (socket.socket, "__init__"),
    (socket.socket, "accept"),
    (zmq.Context, "socket"),
)


class Shortage:
    """Of what the thread in its block opens, the call numbered `first` fails, and with `for_good` all after it."""

    def __init__(self, first: int, *, for_good: bool) -> None:
        self._first, self._for_good = first, for_good
        self._thread = -1
        self.num_calls = 0

    @contextmanager
    def here(self) -> Iterator[None]:
        self._thread = threading.get_ident()
        with pytest.MonkeyPatch.context() as patched:
            for owner, name in OPENERS:
                patched.setattr(owner, name, self._counted(owner, getattr(owner, name)))
            yield

    def _counted(self, owner: object, opener: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if threading.get_ident() == self._thread and options.get("fileno") is None:
                self.num_calls += 1
                if self.num_calls == self._first or (self._for_good and self.num_calls > self._first):
                    raise zmq.ZMQError(errno.EMFILE) if owner is zmq.Context else OSError(errno.EMFILE, "none is left")
            return opener(*args, **options)

        return call


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def as_student(backend: str, arena: SlotArena, shortage: Shortage) -> None:
    with shortage.here():
        registry.load(backend).open_receiver(arena, bind_host="127.0.0.1").forget()


def as_teacher(backend: str, arena: SlotArena, shortage: Shortage) -> None:
    receiver = registry.load(backend).open_receiver(arena, bind_host="127.0.0.1")

    def join() -> None:
        with shortage.here():
            registry.load(backend).open_sender(
                receiver.describe(), num_slots=arena.num_slots, slot_bytes=SLOT_BYTES, timeout_s=HANG_GUARD_S
            ).close()

    try:
        while_serving(receiver, join)
    finally:
        receiver.forget()


def as_student_who_is_joined(backend: str, arena: SlotArena, shortage: Shortage) -> None:
    """The shortage begins when the teacher comes."""
    receiver = registry.load(backend).open_receiver(arena, bind_host="127.0.0.1")

    def join() -> None:
        with suppress(TransportError):  # the student has left
            registry.load(backend).open_sender(
                receiver.describe(), num_slots=arena.num_slots, slot_bytes=SLOT_BYTES, timeout_s=HANG_GUARD_S
            ).close()

    thread = threading.Thread(target=join)
    thread.start()
    try:
        with shortage.here(), suppress(PeerLost):  # it has closed its end
            while thread.is_alive():
                receiver.poll()
    finally:
        receiver.forget()
        thread.join(HANG_GUARD_S)


#: Who opens nothing there that it can't do without.
NEEDS_NONE = (
    ("local", as_teacher),
    *((backend, as_student_who_is_joined) for backend in ("local", "zmq", "ucx")),
)


@pytest.mark.parametrize("life", [as_student, as_teacher, as_student_who_is_joined])
@pytest.mark.parametrize("for_good", [False, True])
def test_whichever_descriptor_is_missing_it_is_said_and_nothing_is_kept(
    runtime: Path, backend: str, for_good: bool, life: Callable[[str, SlotArena, Shortage], None]
) -> None:
    arena = SlotArena(2, SLOT_BYTES)
    life(backend, arena, Shortage(0, for_good=False))  # what a process opens once and keeps
    num_failed = 0
    for first in range(1, 100):
        before = held(runtime)
        shortage = Shortage(first, for_good=for_good)
        try:
            life(backend, arena, shortage)
        except TransportError as error:
            assert "ulimit -n" in str(error)  # noqa: PT017 - some descriptors can be done without
            num_failed += 1
        expect_no_more(lambda: held(runtime), before)
        if shortage.num_calls < first:
            break
    else:
        raise AssertionError("it opens descriptors without end")
    assert (num_failed == 0) == ((backend, life) in NEEDS_NONE)
    arena.close()


def test_a_wakeup_that_could_not_be_made_ends_without_a_word() -> None:
    with descriptors_below(0), pytest.raises(OSError, match="Too many open files"):
        Wakeup()
