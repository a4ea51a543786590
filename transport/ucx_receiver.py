"""The student's side of a UCX channel: it takes announcements and pulls what was armed into its slot."""

from __future__ import annotations

import os
import secrets
import struct
import threading
from collections import deque
from dataclasses import dataclass, field

from ring.core.errors import PeerLost, RemoteProtocolError, TransportClosed, TransportError
from ring.core.messages import Description, FillId
from transport.contract import MAX_HEADER_BYTES, Arrival, Fence, Receiver
from transport.devices import local_address
from transport.fills import ArmedFills
from transport.host import host_id
from transport.memory import SlotArena
from transport.ucx_core import Message, Transfer
from transport.ucx_link import (
    ANNOUNCE,
    GREETING,
    KIND_ACK,
    KIND_ANNOUNCE,
    KIND_GOODBYE,
    KIND_GREETING,
    KIND_SENT,
    MAGIC,
    TICKET,
    TO_STUDENT,
    TO_TEACHER,
    TOKEN_BYTES,
    WHO,
    Link,
    payload_tag,
)

MAX_EARLY = 64  # parts that overtook their announcement
#: Announcements that wait to become whole, at least: a teacher that answers what was given up long ago has more than
#: there are slots, but not many more.
_MIN_ANNOUNCED = 64


@dataclass
class _Incoming:
    """A fill that was announced. `target`: where it goes; None: nowhere, it was not armed or was given up."""

    ticket: int
    fill: FillId
    num_bytes: int
    header: bytes
    target: memoryview | None
    num_missing: int  # parts that were not offered yet
    is_sent: bool  # the teacher saw all of it read
    transfers: list[Transfer] = field(default_factory=list)

    @property
    def is_moving(self) -> bool:
        return not all(transfer.is_done for transfer in self.transfers)

    @property
    def is_whole(self) -> bool:
        return self.is_sent and self.num_missing == 0 and not self.is_moving

    def error(self) -> str | None:
        return next((error for transfer in self.transfers if (error := transfer.error()) is not None), None)


@dataclass(frozen=True)
class _Place:
    """Where a part belongs."""

    incoming: _Incoming
    begin: int
    num_bytes: int


class UcxReceiver(Receiver):
    """See Receiver. The lock lets any thread close while the owner is in a call."""

    def __init__(self, arena: SlotArena, *, bind_host: str) -> None:
        self._lock = threading.RLock()
        self._arena = arena
        self._max_announced = max(_MIN_ANNOUNCED, 2 * arena.num_slots)
        self._armed = ArmedFills(num_slots=arena.num_slots, slot_bytes=arena.slot_bytes)
        self._incoming: deque[_Incoming] = deque()  # as they were announced
        self._filling: dict[FillId, _Incoming] = {}  # those of them that go into a slot
        self._places: dict[int, _Place] = {}  # by tag, of announced parts that were not offered yet
        self._early: dict[int, Message] = {}
        self._pending: dict[FillId, _Incoming] = {}
        self._fenced: list[FillId] = []
        self._dropped = 0
        self._ending: str | None = None  # why the channel is to be given up, once all that came with it was taken in
        self._lost: str | None = None
        self._closed = False
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._description: Description = {
            "token": self._token,
            "host": str(local_address(bind_host)),  # a teacher looks up no names
            "host_id": host_id(),
            "pid": os.getpid(),
        }
        self._link = Link(self._token, listens=TO_STUDENT, speaks=TO_TEACHER, local_host=bind_host)
        try:
            self._description["address"] = self._link.address()
            self._link.settle()
        except BaseException:
            self._link.close()
            raise

    def describe(self) -> Description:
        return self._description

    def arm(self, fill: FillId, *, num_bytes: int) -> None:
        with self._lock:
            if self._closed:
                raise TransportClosed(f"{fill} was armed on a closed channel")
            self._armed.arm(fill, num_bytes=num_bytes, quarantined=self._pending)

    def disarm(self, fill: FillId, *, refused: bool = False) -> Fence:
        with self._lock:
            self._armed.discard(fill)
            incoming = self._filling.pop(fill, None)
            if incoming is not None:
                incoming.target = None
                if incoming.is_moving:
                    self._pending[fill] = incoming
            return Fence.PENDING if fill in self._pending else Fence.FENCED

    def poll(self) -> list[Arrival]:
        with self._lock:
            if self._closed:
                raise TransportClosed("a closed channel was polled")
            arrivals: list[Arrival] = []
            if self._lost is None:
                try:
                    # Asked before the last messages are taken: nothing can follow them if it was gone by then.
                    end = self._link.end
                    arrivals = self._receive()
                    if end is not None and not self._link.is_busy:
                        self._lose(f"the teacher is gone: {end}")
                except (TransportError, RemoteProtocolError) as error:
                    self._lose(str(error))
            self._link.settle(has_news=self._lost is not None)
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
            if self._lost is None:
                self._drop_early()
            self._link.close()
            self._fence_all()
            self._fenced += self._armed.drain()

    def forget(self) -> None:
        self.close()
        self._fenced.clear()

    def _receive(self) -> list[Arrival]:
        said, offers = self._link.poll()
        arrivals = []
        for message in said:
            self._hear(message)
            arrivals += self._finish_whole()
        for offer in offers:
            place = self._places.pop(offer.tag, None)
            if place is not None and self._ending is None:
                self._fetch(offer, place)
            elif self._link.is_connected and self._ending is None and offer.tag not in self._early:
                self._keep_early(offer)
            else:  # a stranger's, a repeated one, or too late
                self._link.drop(offer)
        for fill in [fill for fill, incoming in self._pending.items() if not incoming.is_moving]:
            del self._pending[fill]
            self._fenced.append(fill)
        arrivals += self._finish_whole()
        if self._ending is not None:
            self._lose(self._ending)
        return arrivals

    def _keep_early(self, offer: Message) -> None:
        """Until its announcement comes. What waits longest gives way: nobody may fill the place of the others."""
        if len(self._early) == MAX_EARLY:
            self._link.drop(self._early.pop(next(iter(self._early))))
        self._early[offer.tag] = offer

    def _hear(self, message: bytes) -> None:
        kind, is_ticket = message[:1], len(message) == TICKET.size
        if self._ending is not None:
            return
        if kind == KIND_GREETING and not self._link.is_connected and len(message) > GREETING.size + WHO.size:
            host, pid = WHO.unpack_from(message, GREETING.size)
            self._link.connect(message[GREETING.size + WHO.size :], host=host.decode("ascii", "replace"), pid=pid)
            self._link.say(GREETING.pack(KIND_GREETING, MAGIC, self._arena.num_slots, self._arena.slot_bytes))
        elif kind == KIND_ANNOUNCE and self._link.is_connected and len(message) >= ANNOUNCE.size:
            self._announce(message)
        elif kind == KIND_SENT and is_ticket and self._confirm(TICKET.unpack(message)[1]):
            pass
        elif message == KIND_GOODBYE:
            self._ending = "the teacher closed its end"
        else:
            self._break("it sent a message of no known kind, or none of greeting first")

    def _announce(self, message: bytes) -> None:
        _, ticket, seq, attempt, slot, num_bytes, header_bytes, num_parts = ANNOUNCE.unpack_from(message)
        fill = FillId(seq, attempt, slot)
        begin = ANNOUNCE.size + 8 * num_parts
        sizes = struct.unpack(f"<{num_parts}Q", message[ANNOUNCE.size : begin]) if len(message) >= begin else ()
        header, inline = message[begin : begin + header_bytes], message[begin + header_bytes :]
        is_whole = len(sizes) == num_parts and len(header) == header_bytes <= MAX_HEADER_BYTES
        payload_bytes = len(inline) + sum(sizes)
        if not is_whole or (sizes and inline) or not payload_bytes == num_bytes <= self._arena.slot_bytes:
            self._break(f"its announcement of {fill}, {num_bytes} bytes in {num_parts} parts, makes no sense")
            return
        if len(self._incoming) >= self._max_announced:
            self._break(f"it announced {fill} while {len(self._incoming)} fills before it are not whole")
            return
        # The same fill again finds no receiver while the first is being fetched.
        is_armed = self._armed.expects(fill, num_bytes) and fill not in self._filling
        target = self._arena.buffer(slot)[:num_bytes] if is_armed else None
        incoming = _Incoming(ticket, fill, num_bytes, header, target, num_parts, is_sent=not num_parts)
        self._incoming.append(incoming)
        if target is not None:
            self._filling[fill] = incoming
            if not num_parts:
                target[:] = inline
        offset = 0
        for part, size in enumerate(sizes):
            tag, place = payload_tag(self._token, fill, num_bytes, part), _Place(incoming, offset, size)
            offset += size
            early = self._early.pop(tag, None)
            if early is not None:
                self._fetch(early, place)
            elif tag in self._places:  # sent twice at a time, so the two could not be told apart
                self._break(f"it announced {fill} again before it was whole")
                return
            else:
                self._places[tag] = place

    def _fetch(self, offer: Message, place: _Place) -> None:
        incoming = place.incoming
        incoming.num_missing -= 1
        if incoming.target is None:
            self._link.drop(offer)
        elif offer.num_bytes != place.num_bytes:
            self._break(f"a part of {incoming.fill} has {offer.num_bytes} bytes; {place.num_bytes} were announced")
        else:
            memory = incoming.target[place.begin : place.begin + place.num_bytes]
            incoming.transfers.append(self._link.receive(offer, memory))

    def _confirm(self, ticket: int) -> bool:
        """False: no such fill waits for it."""
        for incoming in self._incoming:
            if incoming.ticket == ticket and not incoming.is_sent:
                incoming.is_sent = True
                return True
        return False

    def _finish_whole(self) -> list[Arrival]:
        arrivals = []
        while self._incoming and self._incoming[0].is_whole:
            arrivals += self._finish(self._incoming.popleft())
        return arrivals

    def _finish(self, incoming: _Incoming) -> list[Arrival]:
        is_wanted = incoming.target is not None
        error = incoming.error()
        if error is not None and is_wanted:
            self._ending = self._ending or f"{incoming.fill} could not be fetched: {error}"
            return []
        self._link.say(TICKET.pack(KIND_ACK, incoming.ticket))
        if not is_wanted:
            self._dropped += 1
            return []
        del self._filling[incoming.fill]
        self._armed.discard(incoming.fill)
        return [Arrival(fill=incoming.fill, num_bytes=incoming.num_bytes, header=incoming.header)]

    def _break(self, why: str) -> None:
        self._ending = self._ending or f"the teacher broke the protocol: {why}"

    def _lose(self, reason: str) -> None:
        """Nothing is fetched any more, so whatever was pending is fenced."""
        if self._lost is None:
            self._lost = reason
            self._drop_early()
            self._link.let_go(goodbye=True)
            self._fence_all()

    def _drop_early(self) -> None:
        for offer in self._early.values():
            self._link.drop(offer)
        self._early.clear()

    def _fence_all(self) -> None:
        self._fenced += sorted(self._pending)
        for held in (self._pending, self._filling, self._places, self._early):
            held.clear()
        self._incoming.clear()
