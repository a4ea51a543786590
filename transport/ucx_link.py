"""What both sides of a UCX channel do alike: a worker, short control messages, the tags, a descriptor, and the end.

UCX asks nobody who he is, so every message is known by its 64-bit tag, a keyed hash: of control messages over the
direction, of payloads over the whole fill (seq, attempt, slot, size, part). The key is the channel's random token,
which travels in the OFFER. What another channel, an earlier life or a given-up attempt sends has another tag.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import struct
import time
from collections import deque

from ring.core.errors import RemoteProtocolError, TransportError
from ring.core.messages import FillId
from transport import ucx_core
from transport.devices import net_devices
from transport.host import descriptors_for, host_id, remedy
from transport.ucx_core import Connection, Message, Transfer, Worker
from transport.wakeup import Wakeup

TOKEN_BYTES = 32
MAGIC = b"dkd1"
GREETING = struct.Struct("<c4sQQ")  # kind, magic, slots, bytes a slot
WHO = struct.Struct("<32sQ")  # host, process; follows the teacher's greeting, with the address of its worker
ANNOUNCE = struct.Struct("<cQqQQQHH")  # kind, ticket, seq, attempt, slot, bytes, bytes of the header, parts
TICKET = struct.Struct("<cQ")  # kind, ticket
KIND_GREETING, KIND_ANNOUNCE, KIND_SENT, KIND_ACK, KIND_GOODBYE = b"G", b"F", b"S", b"A", b"B"
#: Longest control message: never rendezvous, so it needs nothing of its sender once it has left.
MAX_CONTROL_BYTES = ucx_core.RENDEZVOUS_BYTES - 1024
TO_STUDENT, TO_TEACHER = b"to the student", b"to the teacher"

_PAYLOAD = struct.Struct("<qQQQQ")
_POLL_BUDGET_S = 2e-3  # then the owner's other work has its turn
_GOODBYE_TIMEOUT_S = 0.2
_MAX_PID = 2**31 - 1


def control_tag(token: bytes, direction: bytes) -> int:
    return _hash(token, direction)


def payload_tag(token: bytes, fill: FillId, num_bytes: int, part: int) -> int:
    return _hash(token, _PAYLOAD.pack(*fill, num_bytes, part))


def _hash(token: bytes, data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, key=token).digest(), "little")


class Link:
    """One worker with at most one connection. `fileno()` is readable when there may be news, given `settle()`."""

    def __init__(self, token: bytes, *, listens: bytes, speaks: bytes, local_host: str) -> None:
        """Raises ConfigError: UCX can't be used here. Raises TransportError."""
        self._own_tag = control_tag(token, listens)
        self._other_tag = control_tag(token, speaks)
        self._connection: Connection | None = None
        self._pidfd = -1
        self._process_end = select.poll()
        self._process_is_gone = False
        self._reading: deque[tuple[Transfer, bytearray]] = deque()
        self._is_busy = False
        with contextlib.ExitStack() as opened:
            worker = opened.enter_context(
                contextlib.closing(Worker(ucx_core.context(net_devices=net_devices(local_host))))
            )
            self._worker: Worker | None = worker
            with descriptors_for("ucx: a channel"):
                self._wakeup = opened.enter_context(contextlib.closing(Wakeup()))
                self._news = opened.enter_context(select.epoll())
                self._news.register(self._wakeup, select.EPOLLIN)
                self._news.register(worker, select.EPOLLIN)
            opened.pop_all()

    def fileno(self) -> int:
        return self._news.fileno()

    def address(self) -> bytes:
        return self._open_worker().address()

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    @property
    def is_busy(self) -> bool:
        """Whether the last `poll()` ended with its time and not with its work."""
        return self._is_busy

    @property
    def end(self) -> str | None:
        """What became of the other side; None: it is there, as far as can be told."""
        if self._connection is not None and self._connection.error is not None:
            return f"its connection ended: {self._connection.error}"
        if self._process_is_gone or (self._pidfd >= 0 and self._process_end.poll(0)):
            return "its process ended"
        return None

    def connect(self, address: bytes, *, host: str, pid: int) -> None:
        """host, pid: where the other worker is. Raises RemoteProtocolError: it is no address or process, or can't be
        reached. Raises TransportError: there is no descriptor to watch the process with."""
        if not 0 < pid <= _MAX_PID:
            raise RemoteProtocolError(f"ucx: the other side says that it is process {pid}; allowed: 1 to {_MAX_PID}")
        self._connection = self._open_worker().connect(address)
        # UCX's shared memory was seen not to notice that the other process was killed.
        if host == host_id() and pid != os.getpid():
            try:
                self._pidfd = os.pidfd_open(pid)
                self._process_end.register(self._pidfd, select.POLLIN)
                self._news.register(self._pidfd, select.EPOLLIN)
            except ProcessLookupError:
                self._process_is_gone = True
            except OSError as error:
                raise TransportError(f"ucx: process {pid} can't be watched: {error}{remedy(error)}") from error

    def say(self, message: bytes) -> Transfer:
        """Send a control message. Raises TransportError: the connection is broken."""
        assert len(message) <= MAX_CONTROL_BYTES
        return self.send(message, tag=self._other_tag)

    def send(self, memory: memoryview | bytes, *, tag: int) -> Transfer:
        assert self._connection is not None
        return self._connection.send(memory, tag=tag)

    def receive(self, message: Message, memory: memoryview) -> Transfer:
        return self._open_worker().receive(message, memory)

    def drop(self, message: Message) -> None:
        self._open_worker().drop(message)

    def poll(self) -> tuple[list[bytes], list[Message]]:
        """Make progress: (control messages in the order they were sent, other messages).

        Raises TransportError: UCX failed."""
        worker = self._open_worker()
        self._is_busy = worker.progress(budget_s=_POLL_BUDGET_S)
        others = []
        while (message := worker.next_message()) is not None:
            if message.tag == self._own_tag and 0 < message.num_bytes <= MAX_CONTROL_BYTES:
                buffer = bytearray(message.num_bytes)
                self._reading.append((worker.receive(message, memoryview(buffer)), buffer))
            else:
                others.append(message)
        said = []
        while self._reading and self._reading[0][0].is_done:
            transfer, buffer = self._reading.popleft()
            if transfer.error() is None:
                said.append(bytes(buffer))
        worker.forget_done()
        return said, others

    def settle(self, *, has_news: bool = False) -> None:
        """Call at the end of everything that touched the link: UCX tells of an event only after it was armed."""
        if has_news or self._is_busy or (self._worker is not None and not self._worker.arm()):
            self._wakeup.set()
        else:
            self._wakeup.clear()

    def let_go(self, *, goodbye: bool) -> None:
        """End worker and connection, in bounded time: no byte is received or read any more once this returned."""
        worker, connection = self._worker, self._connection
        if worker is None:
            return
        self._worker = self._connection = None
        if goodbye and connection is not None and connection.error is None:
            _say_goodbye(worker, connection, self._other_tag)
        self._reading.clear()
        self._news.unregister(worker)
        worker.close()
        if self._pidfd >= 0:
            self._news.unregister(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def close(self) -> None:
        """Say goodbye, and give everything back. Idempotent."""
        self.let_go(goodbye=True)
        self._news.close()
        self._wakeup.close()

    def _open_worker(self) -> Worker:
        assert self._worker is not None
        return self._worker


def _say_goodbye(worker: Worker, connection: Connection, tag: int) -> None:
    """As well as it can be done in bounded time: whoever does not hear it finds the connection broken."""
    until_s = time.monotonic() + _GOODBYE_TIMEOUT_S
    try:
        transfer = connection.send(KIND_GOODBYE, tag=tag)
        poller = select.poll()
        poller.register(worker, select.POLLIN)
        while not transfer.is_done and connection.error is None and time.monotonic() < until_s:
            if not worker.progress(budget_s=_POLL_BUDGET_S) and worker.arm():
                poller.poll(10)
        worker.progress(budget_s=_POLL_BUDGET_S)
    except TransportError:
        return  # it broke meanwhile, which the other side sees as well
