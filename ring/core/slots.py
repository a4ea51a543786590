"""The life of a slot, in one table, and the table of all slots of a ring.

Numbers only: the memory itself belongs to the shell. Every change goes through `SLOT_TRANSITIONS`, from which the table
in docs/ring-protocol.md is rendered.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType

from ring.core.errors import LocalProtocolError


class SlotState(enum.Enum):
    FREE = "free"
    REQUESTED = "requested"  # armed and asked for: one fill may land
    FILLED = "filled"  # the fill was accepted
    LEASED = "leased"  # the student reads it
    QUARANTINED = "quarantined"  # its attempt was given up, and may still be writing


class SlotEvent(enum.Enum):
    REQUEST = "request"
    COMPLETE = "complete"
    GIVE_UP = "give up"
    FENCE = "fence"
    LEASE = "lease"
    RELEASE = "release"


SLOT_TRANSITIONS: Mapping[tuple[SlotState, SlotEvent], SlotState] = MappingProxyType(
    {
        (SlotState.FREE, SlotEvent.REQUEST): SlotState.REQUESTED,
        (SlotState.REQUESTED, SlotEvent.COMPLETE): SlotState.FILLED,
        (SlotState.REQUESTED, SlotEvent.GIVE_UP): SlotState.QUARANTINED,
        # Only the data plane can say so, or the whole fill itself when it comes late.
        (SlotState.QUARANTINED, SlotEvent.FENCE): SlotState.FREE,
        (SlotState.FILLED, SlotEvent.LEASE): SlotState.LEASED,
        (SlotState.LEASED, SlotEvent.RELEASE): SlotState.FREE,
    }
)


class SlotTable:
    """The state of every slot of one ring."""

    def __init__(self, num_slots: int) -> None:
        self._states = [SlotState.FREE] * num_slots
        # Last freed, first used: the student keeps touching the same memory. Slot 0 comes first.
        self._free = list(range(num_slots - 1, -1, -1))
        self._counts = dict.fromkeys(SlotState, 0) | {SlotState.FREE: num_slots}

    def __len__(self) -> int:
        return len(self._states)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def count(self, state: SlotState) -> int:
        return self._counts[state]

    def state(self, slot: int) -> SlotState:
        return self._states[slot]

    def request(self) -> int:
        """Move a free slot to REQUESTED and return it. Raises LocalProtocolError: none is free."""
        if not self._free:
            raise LocalProtocolError(f"a slot was asked for; 0 of {len(self)} are free")
        slot = self._free[-1]
        self.move(slot, SlotEvent.REQUEST)
        return slot

    def move(self, slot: int, event: SlotEvent) -> None:
        """Raises LocalProtocolError: `event` is illegal in the slot's state; nothing changed."""
        before = self._states[slot]
        after = SLOT_TRANSITIONS.get((before, event))
        if after is None:
            allowed = [e.name for (state, e) in SLOT_TRANSITIONS if state is before]
            raise LocalProtocolError(f"slot {slot}: {event.name} is illegal in {before.name}; allowed: {allowed}")
        if before is SlotState.FREE:
            self._free.remove(slot)
        elif after is SlotState.FREE:
            self._free.append(slot)
        self._states[slot] = after
        self._counts[before] -= 1
        self._counts[after] += 1
