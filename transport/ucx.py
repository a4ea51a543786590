"""UCX: RDMA where there is a device, its tcp and shared memory elsewhere; the student pulls a fill into the slot.

A fill is an announcement (what it is, its header), then its parts as tagged messages. They are rendezvous: a part that
arrives is only the offer to fetch it, and the student fetches into the slot if that fill is armed, else into nothing.
So a stale answer finds no receiver, and nothing but the student's own worker ever writes a slot. A fill that was given
up before its first part was fetched is fenced at once, else when what was begun has come to its end.

What the student fetched could still be wrong: with shared memory it reads a living process, and a teacher that closed
its side may have used the source for something else meanwhile. So the teacher says `sent` once UCX told it that its
parts were read while it was there; only then is the fill whole. The student's acknowledgement makes the ticket. That
costs a fill half a round trip more, and no throughput, as fills follow each other without waiting for it.

A payload of up to 8 KiB travels inside its announcement instead.
"""

from __future__ import annotations

import math
import os
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ring.core.errors import DeadlineExceeded, PeerLost, RemoteProtocolError, TransportClosed, TransportError
from ring.core.messages import Description, FillId
from transport import ucx_core, ucx_library
from transport.contract import Capabilities, Sender, Ticket
from transport.devices import local_host_towards, rdma_devices
from transport.fills import Part, check_put, joined, total_bytes
from transport.host import host_id as own_host_id
from transport.memory import SlotArena, as_bytes
from transport.ucx_core import Transfer
from transport.ucx_link import (
    ANNOUNCE,
    GREETING,
    KIND_ACK,
    KIND_ANNOUNCE,
    KIND_GOODBYE,
    KIND_GREETING,
    KIND_SENT,
    MAGIC,
    MAX_CONTROL_BYTES,
    TICKET,
    TO_STUDENT,
    TO_TEACHER,
    TOKEN_BYTES,
    WHO,
    Link,
    payload_tag,
)
from transport.ucx_receiver import MAX_EARLY, UcxReceiver
from transport.ucx_trial import check_address

_INLINE_BYTES = 8192
#: Puts that are fetched at a time. Two keep the wire busy; with more, the first of many is whole as late as the last.
_MAX_MOVING = 2
#: Of a put; more are joined first. Those of all puts on their way may overtake their announcements; none may be lost.
_MAX_PARTS = MAX_EARLY // _MAX_MOVING


def capabilities() -> Capabilities:
    return Capabilities(
        name="ucx",
        one_sided=False,
        same_host_only=False,
        notices_peer_death=True,
        bounce_bytes_per_peer=8 << 20,  # segments of UCX's tcp, announcements, inline payloads
        crc_by_default=True,  # over tcp its own checksum has 16 bits
        rdma=unavailable() is None and bool(rdma_devices()) and ucx_core.context().has_rdma,
    )


def unavailable() -> str | None:
    return ucx_library.missing()


def open_receiver(arena: SlotArena, *, bind_host: str, encrypt: bool = False) -> UcxReceiver:
    return UcxReceiver(arena, bind_host=bind_host)


def open_sender(description: Description, *, num_slots: int, slot_bytes: int, timeout_s: float) -> UcxSender:
    address, token, host = (description.get(key) for key in ("address", "token", "host"))
    host_id, pid = description.get("host_id"), description.get("pid")
    if not (
        isinstance(address, bytes)
        and isinstance(token, bytes)
        and len(token) == TOKEN_BYTES
        and isinstance(host, str)
        and isinstance(host_id, str)
        and isinstance(pid, int)
    ):
        raise RemoteProtocolError(
            f"ucx is described by address, token, host, host_id and pid; got the keys {sorted(description)}"
        )
    until_s, local_host = time.monotonic() + timeout_s, local_host_towards(host)
    check_address(address, local_host=local_host, timeout_s=timeout_s)
    link = Link(token, listens=TO_TEACHER, speaks=TO_STUDENT, local_host=local_host)
    try:
        link.connect(address, host=host_id, pid=pid)
        _greet(link, num_slots=num_slots, slot_bytes=slot_bytes, timeout_s=until_s - time.monotonic())
    except BaseException:
        link.close()
        raise
    return UcxSender(link, token, num_slots=num_slots, slot_bytes=slot_bytes)


def _greet(link: Link, *, num_slots: int, slot_bytes: int, timeout_s: float) -> None:
    """Returns once the student greeted us in the same words."""
    deadline_s = time.monotonic() + timeout_s
    greeting = GREETING.pack(KIND_GREETING, MAGIC, num_slots, slot_bytes)
    link.say(greeting + WHO.pack(own_host_id().encode()[:32], os.getpid()) + link.address())
    poller = select.poll()
    poller.register(link, select.POLLIN)
    while True:
        said, _ = link.poll()
        if said:
            if said[0] != greeting:
                raise RemoteProtocolError(
                    f"ucx: expected the greeting {greeting.hex()} of the slots that were offered, got {said[0].hex()}"
                )
            return
        if link.end is not None:
            raise TransportError(f"ucx: the student did not greet us: {link.end}")
        link.settle()
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded(f"ucx: the student did not greet us within {timeout_s} s")
        poller.poll(math.ceil(left_s * 1e3))


@dataclass
class _Outgoing:
    """A put that is not complete. `transfers`: what must have left before the student can have all of it."""

    ticket: Ticket
    fill: FillId
    header: bytes
    sources: list[Part]
    transfers: list[Transfer] = field(default_factory=list)
    is_acknowledged: bool = False  # before we knew that it had left

    @property
    def num_bytes(self) -> int:
        return total_bytes(self.sources)

    @property
    def is_inline(self) -> bool:
        """The payload travels in the announcement."""
        return self.num_bytes <= _INLINE_BYTES

    @property
    def is_moving(self) -> bool:
        return not all(transfer.is_done for transfer in self.transfers)

    def announcement(self) -> bytes:
        sizes = [] if self.is_inline else [source.num_bytes for source in self.sources]
        inline = [bytes(as_bytes(source.tensor)) for source in self.sources] if self.is_inline else []
        fixed = ANNOUNCE.pack(
            KIND_ANNOUNCE, self.ticket.number, *self.fill, self.num_bytes, len(self.header), len(sizes)
        )
        return b"".join([fixed, struct.pack(f"<{len(sizes)}Q", *sizes), self.header, *inline])


class UcxSender(Sender):
    """See Sender. After close() returned, UCX reads no source any more, or the student never learns that it did."""

    def __init__(self, link: Link, token: bytes, *, num_slots: int, slot_bytes: int) -> None:
        self._lock = threading.RLock()
        self._link = link
        self._token = token
        self._num_slots = num_slots
        self._slot_bytes = slot_bytes
        self._num_puts = 0
        self._outbox: deque[_Outgoing] = deque()  # not announced
        self._moving: deque[_Outgoing] = deque()  # announced, not read to the end
        # Read to the end. An acknowledgement of any other put would free its sender's place, but not its memory.
        self._unacknowledged: dict[int, _Outgoing] = {}
        self._lost: str | None = None
        self._closed = False
        link.settle()

    def put(self, fill: FillId, *, header: bytes, parts: Sequence[torch.Tensor]) -> Ticket:
        with self._lock:
            sources = check_put(
                fill, header=header, parts=parts, num_slots=self._num_slots, slot_bytes=self._slot_bytes
            )
            self._check_open(f"{fill} was put")
            if self._lost is None and (end := self._link.end) is not None:
                self._lose(f"the student is gone: {end}")
            if self._lost is not None:
                raise PeerLost(self._lost)
            if len(sources) > _MAX_PARTS:
                sources = check_put(
                    fill, header=header, parts=[joined(sources)], num_slots=self._num_slots, slot_bytes=self._slot_bytes
                )
            self._num_puts += 1
            outgoing = _Outgoing(Ticket(self._num_puts), fill, header, sources)
            self._outbox.append(outgoing)
            try:
                self._flush()
            except TransportError as error:
                self._lose(str(error))
            self._link.settle(has_news=self._lost is not None)
            return outgoing.ticket

    def poll(self) -> list[Ticket]:
        with self._lock:
            self._check_open("it was polled")
            tickets: list[Ticket] = []
            if self._lost is None:
                try:
                    end = self._link.end  # asked first: nothing can follow what is heard then
                    tickets = self._listen()
                    if end is not None and not self._link.is_busy:
                        self._lose(f"the student is gone: {end}")
                    if self._lost is None:
                        tickets += self._confirm()
                    if self._lost is None:
                        self._flush()
                except TransportError as error:
                    self._lose(str(error))
            self._link.settle(has_news=self._lost is not None)
            if not tickets and self._lost is not None:
                raise PeerLost(self._lost)
            return tickets

    @property
    def unfinished(self) -> int:
        return len(self._outbox) + len(self._moving) + len(self._unacknowledged)

    def wait_fds(self) -> tuple[int, ...]:
        return () if self._closed else (self._link.fileno(),)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._link.close()
            self._outbox.clear()
            self._moving.clear()
            self._unacknowledged.clear()

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise TransportClosed(f"{what} after close()")

    def _flush(self) -> None:
        """Announce what may go now, in the order of the puts."""
        while self._outbox and len(self._moving) < _MAX_MOVING:
            outgoing = self._outbox.popleft()
            announcement = outgoing.announcement()
            assert len(announcement) <= MAX_CONTROL_BYTES
            said = self._link.say(announcement)
            if outgoing.is_inline:
                outgoing.transfers.append(said)
            else:
                for part, source in enumerate(outgoing.sources):
                    tag = payload_tag(self._token, outgoing.fill, outgoing.num_bytes, part)
                    outgoing.transfers.append(self._link.send(as_bytes(source.tensor), tag=tag))
            if outgoing.is_inline and not outgoing.is_moving:
                self._unacknowledged[outgoing.ticket.number] = outgoing
            else:
                self._moving.append(outgoing)

    def _confirm(self) -> list[Ticket]:
        """Say which fills were read whole while their sources were there. Returns those that the student has already
        acknowledged: of a short one it may hear before we hear that it has left."""
        tickets: list[Ticket] = []
        for outgoing in [outgoing for outgoing in self._moving if not outgoing.is_moving]:
            self._moving.remove(outgoing)
            errors = [error for transfer in outgoing.transfers if (error := transfer.error()) is not None]
            if errors:
                self._lose(f"{outgoing.fill} could not be sent: {errors[0]}")
                break
            if outgoing.is_acknowledged:
                tickets.append(outgoing.ticket)
                continue
            if not outgoing.is_inline:
                self._link.say(TICKET.pack(KIND_SENT, outgoing.ticket.number))
            self._unacknowledged[outgoing.ticket.number] = outgoing
        return tickets

    def _listen(self) -> list[Ticket]:
        said, offers = self._link.poll()
        for offer in offers:  # a stranger's
            self._link.drop(offer)
        tickets: list[Ticket] = []
        for message in said:
            if message[:1] == KIND_ACK and len(message) == TICKET.size:
                number = TICKET.unpack(message)[1]
                outgoing = self._unacknowledged.pop(number, None)
                if outgoing is not None:
                    tickets.append(outgoing.ticket)
                elif not self._acknowledge_early(number):
                    self._lose("the student broke the protocol: it acknowledged what was not sent")
            elif message == KIND_GOODBYE:
                self._lose("the student closed its end")
            else:
                self._lose("the student broke the protocol: it sent a message of no known kind")
            if self._lost is not None:
                break
        return tickets

    def _acknowledge_early(self, number: int) -> bool:
        """False: no such put can have reached the student whole, or it was acknowledged before."""
        for outgoing in self._moving:
            if outgoing.ticket.number == number and outgoing.is_inline and not outgoing.is_acknowledged:
                outgoing.is_acknowledged = True
                return True
        return False

    def _lose(self, reason: str) -> None:
        if self._lost is None:
            self._lost = reason
            self._link.let_go(goodbye=True)
