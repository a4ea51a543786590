"""The contract of the data plane: a teacher's `Sender` writes fills into a student's slots through a `Receiver`.

One contract serves one-sided writes (shm, local) and posted receives (zmq, ucx): a fill is armed by the student
before it is asked for, so a payload always finds its slot, and what was not armed never lands. The clauses T1-T10 of
docs/transport-contract.md are checked for every registered backend by tests/conformance.py.

Threads: one thread owns a Receiver or Sender and makes all calls but `close()`, which any thread may make.
"""

from __future__ import annotations

import abc
import enum
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ring.core.errors import DeadlineExceeded, TransportClosed
from ring.core.messages import Description, FillId
from transport.memory import SlotArena

#: A fill's header (encoded `ring.core.messages.FillHeader`) is opaque to backends and at most this long.
MAX_HEADER_BYTES = 1024


class Fence(enum.Enum):
    """Whether a given-up fill can still touch its slot."""

    FENCED = "fenced"  # no byte of it can land any more: the slot may be reused
    PENDING = "pending"  # it may: the slot stays quarantined until `poll_fenced()` names the fill


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a backend promises, checked by the conformance suite (T10).

    `one_sided`: the teacher writes the slot itself. `same_host_only`: both sides must share a kernel.
    `notices_peer_death`: the data plane itself raises PeerLost when the peer's process dies.
    `bounce_bytes_per_peer`: most bytes it buffers for a peer besides the slots (R2).
    `crc_by_default`: whether the path can corrupt bytes so that the ring should check them.
    `encrypts`: with `encrypt` nobody else can read or change what travels, or speak in the peer's place.
    `rdma`: it found an RDMA device here that it can use.
    """

    name: str
    one_sided: bool
    same_host_only: bool
    notices_peer_death: bool
    bounce_bytes_per_peer: int
    crc_by_default: bool
    encrypts: bool = False
    rdma: bool = False


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A fill is whole: `num_bytes` of payload are in its slot. `header` is what the teacher gave to `put`."""

    fill: FillId
    num_bytes: int
    header: bytes


@dataclass(frozen=True)
class Ticket:
    """Names one `put` of one Sender."""

    number: int


class Endpoint(abc.ABC):
    """What both sides share: something to wait on, and an end."""

    @abc.abstractmethod
    def wait_fds(self) -> tuple[int, ...]:
        """Descriptors that become readable when `poll()` may have news, given that it was polled until it had none.

        A ticket that is ready to be returned is news. After close(): empty but for a Receiver with pending fences."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give everything back. Idempotent; wakes a thread blocked in a wait of this endpoint, and the other side."""


class Receiver(Endpoint):
    """The student's side of the channel to one replica. The slots belong to the arena and outlive it."""

    @abc.abstractmethod
    def describe(self) -> Description:
        """What the teacher needs to open its Sender; goes into the OFFER. Valid until close()."""

    @abc.abstractmethod
    def arm(self, fill: FillId, *, num_bytes: int) -> None:
        """Let exactly one payload of exactly `num_bytes` for `fill` land in its slot.

        Raises LocalProtocolError: the slot is out of range, armed already or quarantined by a pending fence, or
        num_bytes exceeds slot_bytes; nothing changed. Raises TransportClosed."""

    @abc.abstractmethod
    def disarm(self, fill: FillId, *, refused: bool = False) -> Fence:
        """Give a fill up: it will not be reported by `poll()` any more. Idempotent; unknown fills are FENCED.

        refused: the teacher gave its word that it writes nothing of this fill (any more), now or after an earlier
        call. That is a fence for a backend whose teacher writes without asking."""

    @abc.abstractmethod
    def poll(self) -> list[Arrival]:
        """Fills that became whole since the last call, each reported exactly once; never blocks.

        Call until it returns nothing before waiting on `wait_fds()`. Payloads that were not armed, or of another size
        than armed, are dropped and counted in `dropped`.
        Raises PeerLost: the other side is gone and nothing more will come (arrived fills are reported first).
        Raises TransportClosed: after close()."""

    @abc.abstractmethod
    def poll_fenced(self) -> list[FillId]:
        """Fills that `disarm` left PENDING, or that were armed at `close()`, and that are fenced now; each once.

        While the channel is open, news of fences come with poll(). After close() this method looks for them itself,
        and wait_fds() tells when to call it again: until it is empty, some fence is pending."""

    @abc.abstractmethod
    def forget(self) -> None:
        """Close, and stop watching pending fences too: for when the slot memory itself goes away. Idempotent."""

    @property
    @abc.abstractmethod
    def dropped(self) -> int:
        """Payloads dropped because no armed fill matched them."""

    def wait(self, *, timeout_s: float) -> list[Arrival]:
        """Block until a fill is whole.

        Raises DeadlineExceeded: none became whole in time; nothing changed. Raises PeerLost, TransportClosed."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            arrivals = self.poll()
            if arrivals:
                return arrivals
            wait_readable(self, deadline_s, what=f"a fill within {timeout_s} s")


class Sender(Endpoint):
    """The teacher's side of the channel to one student."""

    @abc.abstractmethod
    def put(self, fill: FillId, *, header: bytes, parts: Sequence[torch.Tensor]) -> Ticket:
        """Begin to write `parts` one after the other into the fill's slot; never blocks, never drops.

        parts: contiguous tensors of any shape and dtype on the CPU; may be empty. They must stay unchanged until the
        ticket was returned by `poll()`, which happens exactly once, or close() has returned. A ticket is returned only
        when closing this side can't lose the fill any more.
        Raises LocalProtocolError: more bytes than a slot holds, an unknown slot, a header over MAX_HEADER_BYTES or a
        part that is not contiguous; nothing was written. Raises PeerLost, TransportClosed."""

    @abc.abstractmethod
    def poll(self) -> list[Ticket]:
        """Make progress, and return the puts that are complete: their source may be reused. Never blocks.

        Raises PeerLost: the student is gone (completed tickets are reported first). Raises TransportClosed."""

    @property
    @abc.abstractmethod
    def unfinished(self) -> int:
        """Puts whose ticket was not returned yet."""

    def wait(self, ticket: Ticket, *, timeout_s: float) -> None:
        """Block until `ticket` is complete; tickets that complete meanwhile are consumed too.

        Raises DeadlineExceeded: it is still being written. Raises PeerLost, TransportClosed."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            if ticket in self.poll():
                return
            wait_readable(self, deadline_s, what=f"put {ticket.number} within {timeout_s} s")


class Backend(Protocol):
    """A module of `transport/` that the registry names: these functions are its whole surface."""

    def capabilities(self) -> Capabilities: ...

    def unavailable(self) -> str | None:
        """None when the backend can run here, else what is missing and what to install."""

    def open_receiver(self, arena: SlotArena, *, bind_host: str, encrypt: bool = False) -> Receiver:
        """bind_host: the local address that the peer can reach, for backends that listen on the network. encrypt: the
        description holds keys, and what travels is encrypted with them, where `capabilities()` says that it can be.

        Raises ConfigError: the address can't be bound. Raises TransportError."""

    def open_sender(self, description: Description, *, num_slots: int, slot_bytes: int, timeout_s: float) -> Sender:
        """Raises RemoteProtocolError: the description makes no sense. Raises TransportError, DeadlineExceeded."""


def is_readable(endpoint: Endpoint) -> bool:
    """Whether `poll()` may have news now."""
    poller = select.poll()
    for fd in endpoint.wait_fds():
        poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def wait_readable(endpoint: Endpoint, deadline_s: float, *, what: str) -> None:
    """Sleep until the endpoint may have news. Raises DeadlineExceeded once time.monotonic() passes `deadline_s`."""
    fds = endpoint.wait_fds()
    if not fds:
        raise TransportClosed(f"waited for {what}; the channel is closed")
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise DeadlineExceeded(f"waited for {what}; it did not happen")
    # Capped so that a descriptor closed by another thread can't make this sleep for the whole deadline.
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    poller.poll(min(left_s, 0.1) * 1e3)
