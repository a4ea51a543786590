"""What every backend checks alike: whether a fill may be armed, whether a payload was armed, whether a put fits.

Kept in one place so that the same mistake raises the same error whatever the transport.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from ring.core.errors import LocalProtocolError
from ring.core.messages import FillId
from transport.contract import MAX_HEADER_BYTES
from transport.memory import byte_tensor, check_plain

#: Every number of a FillId travels as a 64-bit integer.
MAX_FILL_NUMBER = 2**63 - 1


class Part(NamedTuple):
    """Where the bytes of one tensor of a put are; keeps them alive."""

    tensor: torch.Tensor
    address: int
    num_bytes: int


class ArmedFills:
    """The fills that a Receiver expects: at most one a slot."""

    def __init__(self, *, num_slots: int, slot_bytes: int) -> None:
        self._num_slots = num_slots
        self._slot_bytes = slot_bytes
        self._by_slot: dict[int, tuple[FillId, int]] = {}

    def arm(self, fill: FillId, *, num_bytes: int, quarantined: Collection[FillId] = ()) -> None:
        """Expect `fill`. Raises LocalProtocolError: see Receiver.arm; nothing changed.

        quarantined: given-up fills that can still write into their slots."""
        check_fill(fill, num_slots=self._num_slots)
        if not 0 <= num_bytes <= self._slot_bytes:
            raise LocalProtocolError(
                f"{fill}: armed with {num_bytes} bytes; a slot holds 0 to {self._slot_bytes} bytes"
            )
        if fill.slot in self._by_slot:
            raise LocalProtocolError(f"{fill}: its slot is armed for {self._by_slot[fill.slot][0]}; disarm that first")
        for other in quarantined:
            if other.slot == fill.slot:
                raise LocalProtocolError(f"{fill}: its slot can still be written by {other}, which was given up")
        self._by_slot[fill.slot] = (fill, num_bytes)

    def expects(self, fill: FillId, num_bytes: int) -> bool:
        """Whether exactly this payload may land."""
        return self._by_slot.get(fill.slot) == (fill, num_bytes)

    def discard(self, fill: FillId) -> bool:
        """Stop expecting it; False: it was not expected."""
        if self._by_slot.get(fill.slot, (None, 0))[0] != fill:
            return False
        del self._by_slot[fill.slot]
        return True

    def drain(self) -> list[FillId]:
        """Stop expecting all of them."""
        fills = [fill for fill, _ in self._by_slot.values()]
        self._by_slot.clear()
        return fills


def check_fill(fill: FillId, *, num_slots: int) -> None:
    """Raises LocalProtocolError: a number is out of range."""
    if not 0 <= fill.slot < num_slots:
        raise LocalProtocolError(f"{fill}: slot is out of range; allowed: 0 to {num_slots - 1}")
    # Pieces of the head have negative seqs.
    if not (abs(fill.seq) <= MAX_FILL_NUMBER and 0 <= fill.attempt <= MAX_FILL_NUMBER):
        raise LocalProtocolError(
            f"{fill}: seq or attempt is out of range; allowed: up to {MAX_FILL_NUMBER}, attempts from 0"
        )


def check_put(
    fill: FillId, *, header: bytes, parts: Sequence[torch.Tensor], num_slots: int, slot_bytes: int
) -> list[Part]:
    """The parts that are not empty. Raises LocalProtocolError: see Sender.put.

    It comes right before a copy that leaves no cache warm, so it counts: views of each tensor cost 30 us a fill."""
    check_fill(fill, num_slots=num_slots)
    if len(header) > MAX_HEADER_BYTES:
        raise LocalProtocolError(f"{fill}: a header of {len(header)} bytes; allowed: {MAX_HEADER_BYTES}")
    sources: list[Part] = []
    for tensor in parts:
        check_plain(tensor)
        if tensor.nbytes > 0:
            sources.append(Part(tensor, tensor.data_ptr(), tensor.nbytes))
    num_bytes = total_bytes(sources)
    if num_bytes > slot_bytes:
        raise LocalProtocolError(f"{fill}: {num_bytes} bytes were put; a slot holds {slot_bytes}")
    return sources


def joined(parts: Sequence[Part]) -> torch.Tensor:
    """A copy of all their bytes."""
    return torch.cat([byte_tensor(part.tensor) for part in parts]) if parts else torch.empty(0, dtype=torch.uint8)


def total_bytes(parts: Sequence[Part]) -> int:
    return sum(part.num_bytes for part in parts)


def copy_into(slot: torch.Tensor, parts: Sequence[Part]) -> None:
    """Write the parts, which `check_put` found to fit, one after the other to the beginning of a slot; releases the GIL
    meanwhile."""
    address = slot.data_ptr()
    for part in parts:
        # An eighth faster than Tensor.copy_, which does not write past the cache, and takes no core from the forward.
        ctypes.memmove(address, part.address, part.num_bytes)
        address += part.num_bytes
