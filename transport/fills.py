"""What every backend checks alike: whether a fill may be armed, whether a payload was armed, whether a put fits.

Kept in one place so that the same mistake raises the same error whatever the transport.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence

import torch

from ring.core.errors import LocalProtocolError
from ring.core.messages import FillId
from transport.contract import MAX_HEADER_BYTES
from transport.memory import byte_tensor

#: Every number of a FillId travels as a 64-bit integer.
MAX_FILL_NUMBER = 2**63 - 1


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
) -> list[torch.Tensor]:
    """The parts as flat byte tensors, empty ones left out. Raises LocalProtocolError: see Sender.put."""
    check_fill(fill, num_slots=num_slots)
    if len(header) > MAX_HEADER_BYTES:
        raise LocalProtocolError(f"{fill}: a header of {len(header)} bytes; allowed: {MAX_HEADER_BYTES}")
    sources = [source for source in map(byte_tensor, parts) if source.numel() > 0]
    num_bytes = total_bytes(sources)
    if num_bytes > slot_bytes:
        raise LocalProtocolError(f"{fill}: {num_bytes} bytes were put; a slot holds {slot_bytes}")
    return sources


def total_bytes(sources: Sequence[torch.Tensor]) -> int:
    return sum(source.numel() for source in sources)


def copy_into(slot: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
    """Write flat byte tensors one after the other to the beginning of a slot; releases the GIL meanwhile."""
    if total_bytes(sources) > slot.numel():
        raise LocalProtocolError(f"{total_bytes(sources)} bytes don't fit into {slot.numel()}")
    offset = 0
    for source in sources:
        # An eighth faster than Tensor.copy_, which does not write past the cache, and takes no core from the forward.
        ctypes.memmove(slot.data_ptr() + offset, source.data_ptr(), source.numel())
        offset += source.numel()
