"""Teacher and student in one process: a put copies straight into the slot (colocated runs, and the verified fake).

Both ends may live in one thread or in two. The channel's lock guards bookkeeping only and is never held while bytes
are copied, so a student that gives a fill up does not wait for the teacher: the fence is PENDING until the copy ended.
"""

from __future__ import annotations

import secrets
import threading
import weakref
from collections import deque
from collections.abc import Sequence

import torch

from ring.core.errors import PeerLost, RemoteProtocolError, TransportClosed, TransportError
from ring.core.messages import Description, FillId
from transport.contract import Arrival, Capabilities, Fence, Receiver, Sender, Ticket
from transport.fills import ArmedFills, check_put, copy_into, total_bytes
from transport.host import descriptors_for
from transport.memory import SlotArena
from transport.wakeup import Wakeup


def capabilities() -> Capabilities:
    return Capabilities(
        name="local",
        one_sided=True,
        same_host_only=True,
        notices_peer_death=False,  # the peer can't die alone; its close() is noticed
        bounce_bytes_per_peer=0,
        crc_by_default=False,
    )


def unavailable() -> str | None:
    return None


def open_receiver(arena: SlotArena, *, bind_host: str, encrypt: bool = False) -> LocalReceiver:
    return LocalReceiver(_Channel(arena))


def open_sender(description: Description, *, num_slots: int, slot_bytes: int, timeout_s: float) -> LocalSender:
    token = description.get("token")
    if not isinstance(token, str):
        raise RemoteProtocolError(f"a local channel is described by a token; got the keys {sorted(description)}")
    channel = _channels.get(token)
    if channel is None:
        raise TransportError("no such local channel in this process: its student is in another process, or closed it")
    if (num_slots, slot_bytes) != (channel.arena.num_slots, channel.arena.slot_bytes):
        raise RemoteProtocolError(
            f"the student offered {num_slots} slots of {slot_bytes} bytes; "
            f"its arena has {channel.arena.num_slots} of {channel.arena.slot_bytes}"
        )
    channel.attach_sender()
    return LocalSender(channel)


class _Channel:
    """What both ends share; every field but `token` and `arena` is guarded by `lock`."""

    def __init__(self, arena: SlotArena) -> None:
        self.arena = arena
        self.token = secrets.token_hex(16)
        self.lock = threading.Lock()
        self.armed = ArmedFills(num_slots=arena.num_slots, slot_bytes=arena.slot_bytes)
        self.writing: FillId | None = None  # being copied right now by the sender's thread
        self.pending: set[FillId] = set()  # given up while being copied
        self.fenced: list[FillId] = []
        self.arrivals: deque[Arrival] = deque()
        self.tickets: list[Ticket] = []
        self.dropped = 0
        self.has_sender = False
        self.sender_closed = False
        self.receiver_closed = False
        with descriptors_for("local: a channel"):
            self.receiver_news = Wakeup()
            self.sender_news = Wakeup()
        _channels[self.token] = self

    def attach_sender(self) -> None:
        with self.lock:
            if self.receiver_closed or self.has_sender:
                raise TransportError("this local channel has a sender already, or its student closed it")
            self.has_sender = True

    def release_if_settled(self) -> None:
        """After the receiver's close(): its descriptor goes once no fence is pending. Call with the lock held."""
        if self.receiver_closed and not self.pending:
            self.receiver_news.close()


#: The channels whose student has not gone; a description names one of them.
_channels: weakref.WeakValueDictionary[str, _Channel] = weakref.WeakValueDictionary()


class LocalReceiver(Receiver):
    """See Receiver."""

    def __init__(self, channel: _Channel) -> None:
        self._channel = channel

    def describe(self) -> Description:
        return {"token": self._channel.token}

    def arm(self, fill: FillId, *, num_bytes: int) -> None:
        channel = self._channel
        with channel.lock:
            if channel.receiver_closed:
                raise TransportClosed(f"{fill} was armed on a closed channel")
            channel.armed.arm(fill, num_bytes=num_bytes, quarantined=channel.pending)

    def disarm(self, fill: FillId, *, refused: bool = False) -> Fence:
        channel = self._channel
        with channel.lock:
            channel.armed.discard(fill)
            self._withdraw(fill)
            if channel.writing == fill:
                channel.pending.add(fill)
            return Fence.PENDING if fill in channel.pending else Fence.FENCED

    def _withdraw(self, fill: FillId) -> None:
        """It became whole before it was given up, and nobody was told yet. Call with the lock held."""
        arrivals = self._channel.arrivals
        kept = deque(arrival for arrival in arrivals if arrival.fill != fill)
        self._channel.dropped += len(arrivals) - len(kept)
        self._channel.arrivals = kept

    def poll(self) -> list[Arrival]:
        channel = self._channel
        with channel.lock:
            if channel.receiver_closed:
                raise TransportClosed("a closed channel was polled")
            arrivals = list(channel.arrivals)
            channel.arrivals.clear()
            if not arrivals and channel.sender_closed:
                raise PeerLost("the teacher closed the local channel")
            if not channel.sender_closed:  # a lost peer stays news
                channel.receiver_news.clear()
            return arrivals

    def poll_fenced(self) -> list[FillId]:
        channel = self._channel
        with channel.lock:
            fenced, channel.fenced = channel.fenced, []
            channel.release_if_settled()
            return fenced

    def wait_fds(self) -> tuple[int, ...]:
        fd = self._channel.receiver_news.fileno()
        return (fd,) if fd >= 0 else ()

    @property
    def dropped(self) -> int:
        return self._channel.dropped

    def close(self) -> None:
        channel = self._channel
        with channel.lock:
            if channel.receiver_closed:
                return
            channel.receiver_closed = True
            for fill in channel.armed.drain():
                if fill == channel.writing:
                    channel.pending.add(fill)
                else:
                    channel.fenced.append(fill)
            channel.arrivals.clear()
            channel.sender_news.set()
            channel.release_if_settled()

    def forget(self) -> None:
        self.close()
        with self._channel.lock:
            self._channel.pending.clear()
            self._channel.fenced.clear()
            self._channel.release_if_settled()


class LocalSender(Sender):
    """See Sender."""

    def __init__(self, channel: _Channel) -> None:
        self._channel = channel
        self._num_puts = 0
        self._putting = threading.RLock()  # so that close() in another thread waits for a copy to end

    def put(self, fill: FillId, *, header: bytes, parts: Sequence[torch.Tensor]) -> Ticket:
        with self._putting:
            return self._put(fill, header=header, parts=parts)

    def _put(self, fill: FillId, *, header: bytes, parts: Sequence[torch.Tensor]) -> Ticket:
        channel = self._channel
        arena = channel.arena
        sources = check_put(fill, header=header, parts=parts, num_slots=arena.num_slots, slot_bytes=arena.slot_bytes)
        num_bytes = total_bytes(sources)
        with channel.lock:
            self._check_open(f"{fill} was put")
            if channel.receiver_closed:
                raise PeerLost("the student closed the local channel")
            slot = None
            if channel.armed.expects(fill, num_bytes):
                slot = arena.view(fill.slot, torch.uint8, (num_bytes,))
                channel.writing = fill
        whole = False
        try:
            if slot is not None:
                copy_into(slot, sources)
                whole = True
        finally:  # an interrupt must not leave the slot quarantined for ever
            with channel.lock:
                channel.writing = None
                if whole and channel.armed.discard(fill):
                    channel.arrivals.append(Arrival(fill=fill, num_bytes=num_bytes, header=bytes(header)))
                    channel.receiver_news.set()
                else:
                    channel.dropped += 1
                    if fill in channel.pending:
                        channel.pending.discard(fill)
                        channel.fenced.append(fill)
                        channel.receiver_news.set()
        with channel.lock:
            self._num_puts += 1
            ticket = Ticket(self._num_puts)
            channel.tickets.append(ticket)
            channel.sender_news.set()
        return ticket

    def poll(self) -> list[Ticket]:
        channel = self._channel
        with channel.lock:
            self._check_open("it was polled")
            tickets, channel.tickets = channel.tickets, []
            if not tickets and channel.receiver_closed:
                raise PeerLost("the student closed the local channel")
            if not channel.receiver_closed:
                channel.sender_news.clear()
            return tickets

    @property
    def unfinished(self) -> int:
        return len(self._channel.tickets)

    def wait_fds(self) -> tuple[int, ...]:
        fd = self._channel.sender_news.fileno()
        return (fd,) if fd >= 0 else ()

    def close(self) -> None:
        channel = self._channel
        with self._putting, channel.lock:
            if channel.sender_closed:
                return
            channel.sender_closed = True
            channel.receiver_news.set()
        channel.sender_news.set()
        channel.sender_news.close()

    def _check_open(self, what: str) -> None:
        if self._channel.sender_closed:
            raise TransportClosed(f"{what} after close()")
