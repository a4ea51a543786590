"""Shared memory: the teacher writes straight into the student's slots, and says over a unix socket when one is whole.

The slots are memfds handed over by `transport.shm_handshake`. A fill that is given up can still be written until its
own completion came or the teacher is gone. Gone means: its end of the socket is closed, which its Sender does after its
last write and the kernel does after the last thread of a dying process has left its memory; or, should a forked child
keep the socket open, its pidfd says that the process ended. A SIGSTOPped teacher is neither, so its slots stay
quarantined until it wakes up.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence

import torch

from ring.core.errors import PeerLost, TransportClosed
from ring.core.messages import Description, FillId
from transport.contract import MAX_HEADER_BYTES, Arrival, Capabilities, Fence, Receiver, Sender, Ticket
from transport.fills import ArmedFills, check_put, copy_into, total_bytes
from transport.host import descriptors_for
from transport.memory import SlotArena
from transport.shm_handshake import Listener, Peer, connect, is_readable
from transport.wakeup import Wakeup

_COMPLETION = struct.Struct("<qQQQ")  # seq, attempt, slot, bytes; the header follows
_MAX_COMPLETION_BYTES = _COMPLETION.size + MAX_HEADER_BYTES
#: Of one call: a teacher that floods its student must not keep it from everything else.
MESSAGES_A_TURN = 128


def capabilities() -> Capabilities:
    return Capabilities(
        name="shm",
        one_sided=True,
        same_host_only=True,
        notices_peer_death=True,
        bounce_bytes_per_peer=0,
        crc_by_default=False,
    )


def unavailable() -> str | None:
    for name in ("memfd_create", "eventfd", "pidfd_open"):
        if not hasattr(os, name):
            return f"this Python has no os.{name}; it needs Linux 5.3 or newer and a Python built for it"
    return None


def open_receiver(arena: SlotArena, *, bind_host: str, encrypt: bool = False) -> ShmReceiver:
    return ShmReceiver(arena)


def open_sender(description: Description, *, num_slots: int, slot_bytes: int, timeout_s: float) -> ShmSender:
    connection, slots = connect(description, num_slots=num_slots, slot_bytes=slot_bytes, timeout_s=timeout_s)
    try:
        return ShmSender(connection, slots, slot_bytes=slot_bytes)
    except BaseException:
        connection.close()
        raise


class ShmReceiver(Receiver):
    """See Receiver. The lock lets any thread close while the owner is in a call."""

    def __init__(self, arena: SlotArena) -> None:
        self._lock = threading.RLock()
        self._armed = ArmedFills(num_slots=arena.num_slots, slot_bytes=arena.slot_bytes)
        self._pending: set[FillId] = set()
        self._fenced: list[FillId] = []
        self._dropped = 0
        self._closed = False
        self._lost: str | None = None
        self._connection: socket.socket | None = None
        self._pidfd = -1
        with contextlib.ExitStack() as opened:
            with descriptors_for("shm: a channel"):
                self._news = opened.enter_context(select.epoll())
            self._listener: Listener | None = opened.enter_context(contextlib.closing(Listener(arena)))
            self._description = self._listener.describe()
            with descriptors_for("shm: a channel"):
                self._news.register(self._listener, select.EPOLLIN)
            opened.pop_all()

    def describe(self) -> Description:
        return self._description

    def arm(self, fill: FillId, *, num_bytes: int) -> None:
        with self._lock:
            if self._closed:
                raise TransportClosed(f"{fill} was armed on a closed channel")
            self._armed.arm(fill, num_bytes=num_bytes, quarantined=self._pending)

    def disarm(self, fill: FillId, *, refused: bool = False) -> Fence:
        with self._lock:
            if refused:
                self._armed.discard(fill)
                self._pending.discard(fill)
                self._release_if_settled()
            if self._armed.discard(fill) and self._lost is None:
                self._pending.add(fill)
            return Fence.PENDING if fill in self._pending else Fence.FENCED

    def poll(self) -> list[Arrival]:
        with self._lock:
            if self._closed:
                raise TransportClosed("a closed channel was polled")
            arrivals = self._read() if self._lost is None else []
            if not arrivals and self._lost is not None:
                raise PeerLost(self._lost)
            return arrivals

    def poll_fenced(self) -> list[FillId]:
        with self._lock:
            # While the channel is open this is poll()'s work: what is read here could not be reported as an arrival.
            if self._closed and self._pending:
                self._read()
                self._release_if_settled()
            fenced, self._fenced = self._fenced, []
            return fenced

    def wait_fds(self) -> tuple[int, ...]:
        return () if self._news.closed else (self._news.fileno(),)

    @property
    def dropped(self) -> int:
        return self._dropped

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            given_up = self._armed.drain()
            if self._connection is None or self._lost is not None:  # nobody can write
                self._fenced += given_up
            else:
                self._pending.update(given_up)
                # Half closed: the teacher sees the end, while its late completions and its own end still reach us.
                self._connection.shutdown(socket.SHUT_WR)
            self._close_listener()
            self._release_if_settled()

    def forget(self) -> None:
        with self._lock:
            self.close()
            self._pending.clear()
            self._fenced.clear()
            self._release_if_settled()

    def _read(self) -> list[Arrival]:
        """What is there now, up to a bound: the rest keeps `wait_fds` readable."""
        if self._connection is None:
            peer = self._listener.accept() if self._listener is not None else None
            if peer is None:
                return []
            self._attach(peer)
        # Asked before the last completions are read: of a process that has ended nothing can follow them.
        ended = self._pidfd >= 0 and is_readable(self._pidfd)
        arrivals = []
        for _ in range(MESSAGES_A_TURN):
            message = self._next_message()
            if message is None:
                if ended:
                    self._lose("the teacher's process ended")
                break
            if _COMPLETION.size <= len(message) <= _MAX_COMPLETION_BYTES:
                arrival = self._complete(message)
                if arrival is not None:
                    arrivals.append(arrival)
            else:  # no completion of ours: it ends no fill
                self._dropped += 1
        return arrivals

    def _next_message(self) -> bytes | None:
        """None: there is none now, or the other side is gone."""
        while self._lost is None and self._connection is not None:
            try:
                message = self._connection.recv(_MAX_COMPLETION_BYTES + 1)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                continue  # reported once, before what is still queued
            except OSError as error:
                self._lose(f"the teacher's connection broke: {error}")
                return None
            if message:
                return message
            self._lose("the teacher closed its end")
        return None

    def _complete(self, message: bytes) -> Arrival | None:
        seq, attempt, slot, num_bytes = _COMPLETION.unpack_from(message)
        fill = FillId(seq, attempt, slot)
        if not self._closed and self._armed.expects(fill, num_bytes):
            self._armed.discard(fill)
            return Arrival(fill=fill, num_bytes=num_bytes, header=message[_COMPLETION.size :])
        self._dropped += 1
        if fill in self._pending:  # its own late completion: it has been written to the end
            self._pending.discard(fill)
            self._fenced.append(fill)
        return None

    def _attach(self, peer: Peer) -> None:
        self._connection = peer.connection
        if peer.pid not in (0, os.getpid()):
            # If it has ended already, or no descriptor is left to watch it by, the end of its connection says so too.
            with contextlib.suppress(OSError):
                self._pidfd = os.pidfd_open(peer.pid)
        self._news.register(self._connection, select.EPOLLIN)
        if self._pidfd >= 0:
            self._news.register(self._pidfd, select.EPOLLIN)
        self._close_listener()

    def _lose(self, reason: str) -> None:
        """Nothing can be written any more, so whatever was pending is fenced."""
        self._lost = self._lost or reason
        self._fenced += sorted(self._pending)
        self._pending.clear()

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._news.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _release_if_settled(self) -> None:
        """After close(): let go of the connection once no fence depends on it."""
        if self._closed and not self._pending:
            self._news.close()
            if self._connection is not None:
                self._connection.close()
            if self._pidfd >= 0:
                os.close(self._pidfd)
                self._pidfd = -1


class ShmSender(Sender):
    """See Sender. The lock is held while bytes are copied: once close() returned, nothing is written any more."""

    def __init__(self, connection: socket.socket, slots: list[torch.Tensor], *, slot_bytes: int) -> None:
        self._lock = threading.RLock()
        self._connection = connection
        self._slots = slots
        self._num_slots = len(slots)
        self._slot_bytes = slot_bytes
        self._num_puts = 0
        self._outbox: deque[tuple[Ticket, bytes]] = deque()  # completions that the socket had no room for
        self._done: list[Ticket] = []
        self._lost: str | None = None
        self._closed = False
        self._writing = False
        self._waits_for_room = False
        with contextlib.ExitStack() as opened, descriptors_for("shm: a channel"):
            self._tickets_ready = opened.enter_context(contextlib.closing(Wakeup()))
            self._news = opened.enter_context(select.epoll())
            self._news.register(self._tickets_ready, select.EPOLLIN)
            self._news.register(self._connection, select.EPOLLIN)
            opened.pop_all()

    def put(self, fill: FillId, *, header: bytes, parts: Sequence[torch.Tensor]) -> Ticket:
        with self._lock:
            sources = check_put(
                fill, header=header, parts=parts, num_slots=self._num_slots, slot_bytes=self._slot_bytes
            )
            self._check_open(f"{fill} was put")
            if self._lost is not None:
                raise PeerLost(self._lost)
            self._writing = True
            try:
                copy_into(self._slots[fill.slot], sources)
            finally:
                self._writing = False
                if self._closed:  # by a signal handler, between two parts
                    self._let_go()
            self._check_open(f"{fill} was being put")
            self._num_puts += 1
            ticket = Ticket(self._num_puts)
            self._outbox.append((ticket, _COMPLETION.pack(*fill, total_bytes(sources)) + header))
            self._flush()
            return ticket

    def poll(self) -> list[Ticket]:
        with self._lock:
            self._check_open("it was polled")
            self._flush()
            self._notice_end()
            tickets, self._done = self._done, []
            if not tickets and self._lost is not None:
                raise PeerLost(self._lost)
            if self._lost is None:  # a lost peer stays news
                self._tickets_ready.clear()
            return tickets

    @property
    def unfinished(self) -> int:
        return len(self._outbox) + len(self._done)

    def wait_fds(self) -> tuple[int, ...]:
        return () if self._closed else (self._news.fileno(),)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if not self._writing:
                self._let_go()

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise TransportClosed(f"{what} after close()")

    def _flush(self) -> None:
        """Say which fills are whole. Only then is a put complete: a sender that is closed afterwards loses none."""
        while self._outbox and self._lost is None:
            ticket, message = self._outbox[0]
            try:
                self._connection.send(message)
            except BlockingIOError:
                break
            except OSError as error:
                self._lose(f"the student closed its end: {error}")
                return
            self._outbox.popleft()
            self._done.append(ticket)
            self._tickets_ready.set()
        if self._lost is None and bool(self._outbox) != self._waits_for_room:
            self._waits_for_room = not self._waits_for_room
            self._news.modify(self._connection, select.EPOLLIN | (select.EPOLLOUT if self._waits_for_room else 0))

    def _notice_end(self) -> None:
        if self._lost is not None:
            return
        try:
            message = self._connection.recv(1)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(f"the student's connection broke: {error}")
            return
        # Nothing is ever said in this direction.
        self._lose("the student broke the protocol" if message else "the student closed its end")

    def _lose(self, reason: str) -> None:
        self._lost = reason
        self._tickets_ready.set()
        self._let_go()

    def _let_go(self) -> None:
        """Unmap the slots, and only then close our end, which tells the student that nothing is written any more."""
        self._slots.clear()
        self._connection.close()
        if self._closed:
            self._news.close()
            self._tickets_ready.close()
