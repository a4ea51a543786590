"""The control plane within one process: the colocated layout's link and port, which behave like those of ZeroMQ."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque

from ring.core.codec import decode, encode
from ring.core.errors import PeerLost, RemoteProtocolError
from ring.core.messages import Message


class Mailbox:
    """A queue between two threads of one process with a descriptor to wait on. Frames are encoded as on the network,
    so that the in-process path can't accept what the wire would refuse."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def push(self, message: Message) -> bool:
        with self._lock:
            if self._closed:
                return False
            self._frames.append(encode(message))
            os.eventfd_write(self._event_fd, 1)
        return True

    def pop(self) -> Message | None:
        """The next message or None. Raises PeerLost: closed, and everything was read."""
        with self._lock:
            if self._frames:
                return decode(self._frames.popleft())
            if self._closed:
                raise PeerLost("the other side of this process's link closed it")
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._event_fd)
            return None

    def fd(self) -> tuple[int, ...]:
        with self._lock:
            return () if self._closed else (self._event_fd,)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._event_fd)


class LocalLink:
    """The student's end of a link within the process (the colocated layout)."""

    def __init__(self, inbox: Mailbox, outbox: Mailbox) -> None:
        self._inbox, self._outbox = inbox, outbox

    @property
    def name(self) -> str:
        return "local"

    @property
    def connected(self) -> bool:
        return True

    def local_host(self) -> str:
        return "127.0.0.1"

    def send(self, message: Message) -> None:
        if not self._outbox.push(message):
            raise PeerLost("local: the teacher of this process is closed")

    def recv(self) -> Message | None:
        return self._inbox.pop()

    def wait_fds(self) -> tuple[int, ...]:
        return self._inbox.fd()

    def close(self) -> None:
        self._inbox.close()
        self._outbox.close()


class LocalPort:
    """The teacher's end of a link within the process; it has one student."""

    STUDENT = "local"

    def __init__(self, inbox: Mailbox, outbox: Mailbox) -> None:
        self._inbox, self._outbox = inbox, outbox

    @property
    def endpoint(self) -> str:
        return "local"

    def send(self, student: str, message: Message) -> bool:
        return self._outbox.push(message)

    def recv(self) -> tuple[str, Message | RemoteProtocolError] | None:
        try:
            message = self._inbox.pop()
        except PeerLost:
            return None
        return None if message is None else (self.STUDENT, message)

    def wait_fds(self) -> tuple[int, ...]:
        return self._inbox.fd()

    def close(self) -> None:
        self._inbox.close()
        self._outbox.close()


def local_pair() -> tuple[LocalLink, LocalPort]:
    """Both ends of a control plane within this process."""
    to_teacher, to_student = Mailbox(), Mailbox()
    return LocalLink(to_student, to_teacher), LocalPort(to_teacher, to_student)
