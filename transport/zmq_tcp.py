"""ZeroMQ over TCP: the teacher sends a fill in chunks, the student receives each straight into the slot.

Works everywhere pyzmq does. The student listens; the teacher connects with the token from the OFFER. A fill is an
announcement (fill, size, header) followed by its chunks, numbered; the student answers with an acknowledgement once it
has consumed all of them. That is when a put is complete: nothing of it is left in a queue that a close could drop, and
zmq reads its source no more (chunks are sent without a copy).

Only the student's own thread writes its slots, in `poll()`, so a given-up fill is fenced at once. A payload that was
not armed is received into nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import zmq

from ring.core.errors import PeerLost, RemoteProtocolError, TransportClosed
from ring.core.messages import Description, FillId
from transport.contract import MAX_HEADER_BYTES, Arrival, Capabilities, Fence, Receiver, Sender, Ticket
from transport.fills import ArmedFills, Part, check_put, total_bytes
from transport.memory import SlotArena, as_bytes
from transport.zmq_link import (
    ACK,
    ANNOUNCE,
    CHUNK,
    CHUNK_BYTES,
    GREETING,
    KIND_ANNOUNCE,
    KIND_CHUNK,
    MAGIC,
    RECEIVE_QUEUE_CHUNKS,
    DoorKeeper,
    Link,
    bind,
    connect,
    tune_malloc,
)

_MAX_CHUNKS_A_POLL = 64  # some 25 ms: then the owner's other work has its turn
#: Acknowledgements that wait for a teacher to read those before them: far more than it can have puts on their way.
_MAX_UNREAD_ACKS = 4096
#: What it is, and the payload of a chunk.
_Message = tuple[bytes, memoryview | None]


def capabilities() -> Capabilities:
    return Capabilities(
        name="zmq",
        one_sided=False,
        same_host_only=False,
        notices_peer_death=True,
        bounce_bytes_per_peer=(RECEIVE_QUEUE_CHUNKS + 2) * CHUNK_BYTES,  # queued, being decoded, being copied
        crc_by_default=True,  # TCP's own checksum has 16 bits
        encrypts=bool(zmq.has("curve")),
    )


def unavailable() -> str | None:
    if zmq.zmq_version_info() < (4, 3):
        return f"libzmq {zmq.zmq_version()} is too old: pip install 'pyzmq>=26'"
    return None


def open_receiver(arena: SlotArena, *, bind_host: str, encrypt: bool = False) -> ZmqReceiver:
    tune_malloc()
    return ZmqReceiver(arena, bind_host=bind_host, encrypt=encrypt)


def open_sender(description: Description, *, num_slots: int, slot_bytes: int, timeout_s: float) -> ZmqSender:
    tune_malloc()
    endpoint = description.get("endpoint")
    if not (isinstance(endpoint, str) and endpoint.startswith("tcp://")):
        raise RemoteProtocolError(f"zmq is described by a tcp endpoint and more; got the keys {sorted(description)}")
    link = Link()
    try:
        connect(link, endpoint, description, GREETING.pack(MAGIC, num_slots, slot_bytes), timeout_s=timeout_s)
    except BaseException:
        link.close()
        raise
    return ZmqSender(link, num_slots=num_slots, slot_bytes=slot_bytes)


@dataclass
class _Incoming:
    """The fill whose chunks are arriving. `target`: where they go; None: nowhere, it was not armed or given up."""

    ticket: int
    fill: FillId
    num_bytes: int
    header: bytes
    target: memoryview | None
    received_bytes: int = 0
    next_index: int = 0


class ZmqReceiver(Receiver):
    """See Receiver. The lock lets any thread close while the owner is in a call."""

    def __init__(self, arena: SlotArena, *, bind_host: str, encrypt: bool) -> None:
        self._lock = threading.RLock()
        self._arena = arena
        self._armed = ArmedFills(num_slots=arena.num_slots, slot_bytes=arena.slot_bytes)
        self._fenced: list[FillId] = []
        self._incoming: _Incoming | None = None
        self._acks: deque[bytes] = deque()
        self._connections: set[int] = set()  # sockets of whoever is connected, the teacher's among them
        self._peer: int | None = None
        self._is_gone = False  # the peer
        self._lost: str | None = None
        self._dropped = 0
        self._closed = False
        self._link = Link()
        try:
            self._door = DoorKeeper(self._link, encrypt=encrypt)
            endpoint = bind(self._link, bind_host)
        except BaseException:
            self._link.close()
            raise
        self._description: Description = {"endpoint": endpoint, **self._door.invitation}

    def describe(self) -> Description:
        return self._description

    def arm(self, fill: FillId, *, num_bytes: int) -> None:
        with self._lock:
            if self._closed:
                raise TransportClosed(f"{fill} was armed on a closed channel")
            self._armed.arm(fill, num_bytes=num_bytes)

    def disarm(self, fill: FillId, *, refused: bool = False) -> Fence:
        with self._lock:
            self._armed.discard(fill)
            if self._incoming is not None and self._incoming.fill == fill:
                self._incoming.target = None
            return Fence.FENCED

    def poll(self) -> list[Arrival]:
        with self._lock:
            if self._closed:
                raise TransportClosed("a closed channel was polled")
            arrivals: list[Arrival] = []
            if self._lost is None:
                self._door.answer()
                # Asked before the last messages are read: nothing can follow them if it was gone by then.
                is_gone = self._peer_is_gone()
                is_drained = self._receive(arrivals)
                self._send_acks()
                if len(self._acks) > _MAX_UNREAD_ACKS:
                    self._break(f"it does not read its acknowledgements, {len(self._acks)} of them")
                if is_gone and is_drained:
                    self._lost = "the teacher's connection ended"
            self._link.settle(wants_room=bool(self._acks), has_news=self._lost is not None)
            if not arrivals and self._lost is not None:
                raise PeerLost(self._lost)
            return arrivals

    def poll_fenced(self) -> list[FillId]:
        with self._lock:
            fenced, self._fenced = self._fenced, []
            return fenced

    def wait_fds(self) -> tuple[int, ...]:
        return () if self._closed else (self._link.fileno(),)

    @property
    def dropped(self) -> int:
        return self._dropped

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._fenced += self._armed.drain()
            self._incoming = None  # it holds a view of the slot
            self._link.close()

    def forget(self) -> None:
        self.close()
        self._fenced.clear()

    def _receive(self, arrivals: list[Arrival]) -> bool:
        """Take in messages until a fill is whole; False: there may be more of them now."""
        for _ in range(_MAX_CHUNKS_A_POLL):
            try:
                if self._peer is None:
                    self._greet(self._link.socket.recv(zmq.NOBLOCK, copy=False))
                else:
                    self._take(self._link.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return True
            self._drain_message()
            if self._lost is not None:
                return True
            if self._incoming is not None and self._incoming.received_bytes == self._incoming.num_bytes:
                arrivals += self._finish(self._incoming)
                return False
        return False

    def _greet(self, frame: zmq.Frame) -> None:
        message = frame.bytes
        if len(message) != GREETING.size or not message.startswith(MAGIC):
            self._break("its first message is no greeting")
            return
        # libzmq names the connection that a message came through and the one that ended by the same number.
        self._peer = int(frame.get("__fd"))
        self._acks.append(GREETING.pack(MAGIC, self._arena.num_slots, self._arena.slot_bytes))

    def _take(self, message: bytes) -> None:
        if message[:1] == KIND_CHUNK and len(message) == CHUNK.size:
            self._take_chunk(message)
        elif message[:1] == KIND_ANNOUNCE and 0 <= len(message) - ANNOUNCE.size <= MAX_HEADER_BYTES:
            self._begin(message)
        else:
            self._break("it sent a message of no known kind")

    def _begin(self, message: bytes) -> None:
        _, ticket, seq, attempt, slot, num_bytes = ANNOUNCE.unpack_from(message)
        fill = FillId(seq, attempt, slot)
        if self._incoming is not None or num_bytes > self._arena.slot_bytes:
            self._break(f"it announced {fill} of {num_bytes} bytes, which no slot holds, or before the last was whole")
            return
        target = self._arena.buffer(slot)[:num_bytes] if self._armed.expects(fill, num_bytes) else None
        self._incoming = _Incoming(ticket, fill, num_bytes, message[ANNOUNCE.size :], target)

    def _take_chunk(self, message: bytes) -> None:
        _, ticket, index = CHUNK.unpack(message)
        incoming = self._incoming
        is_next = incoming is not None and (ticket, index) == (incoming.ticket, incoming.next_index)
        if incoming is None or not is_next or not self._link.socket.getsockopt(zmq.RCVMORE):
            self._break(f"chunk {index} of put {ticket} is not the next one, or has no payload")
            return
        begin, left_bytes = incoming.received_bytes, incoming.num_bytes - incoming.received_bytes
        room = memoryview(bytearray()) if incoming.target is None else incoming.target[begin:]
        # recv_into does not say when a frame was cut to the room there is; it returns the frame's own length.
        length = self._link.socket.recv_into(room[:CHUNK_BYTES], flags=zmq.NOBLOCK)
        if not 0 < length <= min(left_bytes, CHUNK_BYTES):
            self._break(f"chunk {index} of put {ticket} has {length} bytes; {left_bytes} were left")
            return
        incoming.received_bytes += length
        incoming.next_index += 1

    def _finish(self, incoming: _Incoming) -> list[Arrival]:
        self._incoming = None
        self._acks.append(ACK.pack(incoming.ticket))
        if incoming.target is None:
            self._dropped += 1
            return []
        self._armed.discard(incoming.fill)
        return [Arrival(fill=incoming.fill, num_bytes=incoming.num_bytes, header=incoming.header)]

    def _break(self, why: str) -> None:
        """The peer does not speak our protocol; what it sends from now on can't be attributed to a fill."""
        self._lost = f"the teacher broke the protocol: {why}"
        self._incoming = None

    def _drain_message(self) -> None:
        while self._link.socket.getsockopt(zmq.RCVMORE):
            self._link.socket.recv_into(bytearray(), flags=zmq.NOBLOCK)

    def _send_acks(self) -> None:
        while self._acks:
            try:
                self._link.socket.send(self._acks[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._acks.popleft()

    def _peer_is_gone(self) -> bool:
        for event, connection in self._link.life_events():
            if event == zmq.EVENT_ACCEPTED:
                self._connections.add(connection)
            elif event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
                self._connections.discard(connection)
                # For good: the number may be a stranger's connection by the next look.
                self._is_gone |= connection == self._peer
        return self._is_gone or (self._peer is not None and self._peer not in self._connections)


@dataclass
class _Outgoing:
    """A put that was not handed to zmq as a whole. Holds its sources."""

    ticket: Ticket
    messages: Iterator[_Message]
    message: _Message  # the next one


class ZmqSender(Sender):
    """See Sender. Once close() returned, the link's context is gone, and with it whatever could still read a source."""

    def __init__(self, link: Link, *, num_slots: int, slot_bytes: int) -> None:
        self._lock = threading.RLock()
        self._link = link
        self._num_slots = num_slots
        self._slot_bytes = slot_bytes
        self._num_puts = 0
        self._outbox: deque[_Outgoing] = deque()
        # Of puts that were handed to zmq as a whole. An acknowledgement of any other would free its sender's place, but
        # not its memory.
        self._unacknowledged: set[int] = set()
        self._lost: str | None = None
        self._closed = False

    def put(self, fill: FillId, *, header: bytes, parts: Sequence[torch.Tensor]) -> Ticket:
        with self._lock:
            sources = check_put(
                fill, header=header, parts=parts, num_slots=self._num_slots, slot_bytes=self._slot_bytes
            )
            self._check_open(f"{fill} was put")
            if self._lost is not None:
                raise PeerLost(self._lost)
            self._num_puts += 1
            ticket = Ticket(self._num_puts)
            messages = _messages(ticket, fill, header, sources)
            self._outbox.append(_Outgoing(ticket, messages, next(messages)))
            self._flush()
            self._link.settle(wants_room=bool(self._outbox))
            return ticket

    def poll(self) -> list[Ticket]:
        with self._lock:
            self._check_open("it was polled")
            tickets: list[Ticket] = []
            if self._lost is None:
                is_gone = any(
                    event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED) for event, _ in self._link.life_events()
                )
                tickets = self._take_acks()
                self._flush()
                if is_gone:
                    self._lost = "the student's connection ended"
            self._link.settle(wants_room=bool(self._outbox), has_news=self._lost is not None)
            if not tickets and self._lost is not None:
                raise PeerLost(self._lost)
            return tickets

    @property
    def unfinished(self) -> int:
        return len(self._outbox) + len(self._unacknowledged)

    def wait_fds(self) -> tuple[int, ...]:
        return () if self._closed else (self._link.fileno(),)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._link.close()
            self._outbox.clear()  # these hold the sources
            self._unacknowledged.clear()

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise TransportClosed(f"{what} after close()")

    def _flush(self) -> None:
        """Hand chunks to zmq while it has room."""
        for _ in range(_MAX_CHUNKS_A_POLL):
            if not self._outbox:
                return
            outgoing = self._outbox[0]
            meta, payload = outgoing.message
            try:
                if payload is None:
                    self._link.socket.send(meta, zmq.NOBLOCK)
                else:
                    self._link.socket.send(meta, zmq.NOBLOCK | zmq.SNDMORE)
                    # If this is refused the connection has just ended, which the next poll() will find.
                    self._link.socket.send(payload, zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            following = next(outgoing.messages, None)
            if following is None:
                self._outbox.popleft()
                self._unacknowledged.add(outgoing.ticket.number)
            else:
                outgoing.message = following

    def _take_acks(self) -> list[Ticket]:
        tickets: list[Ticket] = []
        while True:
            try:
                message = self._link.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return tickets
            number = ACK.unpack(message)[0] if len(message) == ACK.size else 0
            if number not in self._unacknowledged:
                self._lost = "the student broke the protocol: it acknowledged what was not sent"
                return tickets
            self._unacknowledged.discard(number)
            tickets.append(Ticket(number))


def _messages(ticket: Ticket, fill: FillId, header: bytes, sources: Sequence[Part]) -> Iterator[_Message]:
    """All messages of a put."""
    yield ANNOUNCE.pack(KIND_ANNOUNCE, ticket.number, *fill, total_bytes(sources)) + header, None
    index = 0
    for data in (as_bytes(source.tensor) for source in sources):
        for begin in range(0, len(data), CHUNK_BYTES):
            yield CHUNK.pack(KIND_CHUNK, ticket.number, index), data[begin : begin + CHUNK_BYTES]
            index += 1
