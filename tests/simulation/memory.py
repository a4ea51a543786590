"""Slot memory with real bytes: every payload names the fill that it answers, so that a wrong byte has a name."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

from ring.core.messages import FillId

ROW_BYTES = 8
SLOT_BYTES = 192
FINGERPRINT = "the model"


def states(*, student_epoch: str, teacher_epoch: str, fill: FillId, input_hash: bytes, num_bytes: int) -> bytes:
    """The states that this teacher would send for this fill: a digest of its name, and the name, over and over."""
    name = f"<{student_epoch} {fill.seq}/{fill.attempt}@{fill.slot} {teacher_epoch} {input_hash.hex()}>".encode()
    name = blake2b(name, digest_size=8).digest() + name
    return (name * (num_bytes // len(name) + 1))[:num_bytes]


class SlotMemory:
    """The slots of one life of a student. It outlives that life, as a mapped memfd does.

    guard: told of every write before it lands."""

    def __init__(self, num_slots: int, slot_bytes: int, guard: Callable[[FillId], None]) -> None:
        self.slot_bytes = slot_bytes
        self._slots = [bytearray(slot_bytes) for _ in range(num_slots)]
        self._guard = guard
        self.num_writes = [0] * num_slots

    def write(self, fill: FillId, begin: int, data: bytes) -> None:
        self._guard(fill)
        self._slots[fill.slot][begin : begin + len(data)] = data
        self.num_writes[fill.slot] += 1

    def read(self, slot: int, num_bytes: int) -> bytes:
        return bytes(self._slots[slot][:num_bytes])
