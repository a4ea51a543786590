"""A lease: the trainer's exclusive right to read one filled slot."""

from __future__ import annotations

from typing import Protocol

import torch

from ring.core.errors import LocalProtocolError
from ring.core.messages import FillHeader


class Event(Protocol):
    """What `Lease.release(after=...)` waits for; torch.cuda.Event is one."""

    def query(self) -> bool:
        """Whether everything recorded before the event is done; never blocks."""


class LeasedSlots(Protocol):
    """Where a lease reads from and returns to: the ring."""

    def view(self, slot: int, header: FillHeader) -> torch.Tensor:
        """The states in `slot`, in place: [num_rows, hidden]."""

    def raw(self, slot: int, num_bytes: int) -> memoryview:
        """The first bytes of `slot`, in place."""

    def give_back(self, seq: int, slot: int, after: Event | None) -> None:
        """Free the slot of `seq`, now or when `after` has passed."""


class Lease:
    """From `Ring.next_lease` until `release`."""

    def __init__(self, slots: LeasedSlots, *, seq: int, slot: int, header: FillHeader) -> None:
        self._slots: LeasedSlots | None = slots
        self._slot = slot
        self.seq = seq
        self.header = header

    def tensor(self) -> torch.Tensor:
        """The states, read in place: shape [num_rows, hidden] in the wire dtype.

        Lifetime: invalid once the lease is released; with `poison_released` it then reads as NaN.
        Raises LocalProtocolError: the lease was released."""
        return self._held().view(self._slot, self.header)

    def raw(self) -> memoryview:
        """The payload's bytes, in place. Lifetime and errors as `tensor`."""
        return self._held().raw(self._slot, self.header.num_bytes)

    def release(self, after: Event | None = None) -> None:
        """Give the slot back; it may carry the next request once `after` has passed.

        Raises LocalProtocolError: already released; nothing changed.
        Lifetime: tensors viewing this slot are invalid once this returns (with `after`: once that has passed)."""
        slots = self._held()
        self._slots = None
        slots.give_back(self.seq, self._slot, after)

    def _held(self) -> LeasedSlots:
        if self._slots is None:
            raise LocalProtocolError(f"seq {self.seq}: the lease was released already; allowed: one release")
        return self._slots
