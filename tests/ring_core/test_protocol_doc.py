"""docs/ring-protocol.md says what the code does; and the tables themselves make sense."""

from __future__ import annotations

import enum

import pytest

from ring.core import tables
from ring.core.errors import LocalProtocolError
from ring.core.jobs import JOB_TRANSITIONS, JobEvent, JobState
from ring.core.replicas import REPLICA_TRANSITIONS, ReplicaEvent, ReplicaState
from ring.core.requests import REQUEST_TRANSITIONS, RequestEvent, RequestState
from ring.core.slots import SLOT_TRANSITIONS, SlotEvent, SlotState, SlotTable
from tests.ring_core import protocol_doc

Edges = list[tuple[enum.Enum, enum.Enum, enum.Enum]]
MACHINES: dict[str, tuple[Edges, type[enum.Enum], type[enum.Enum], enum.Enum]] = {
    "slot": ([(*key, to) for key, to in SLOT_TRANSITIONS.items()], SlotState, SlotEvent, SlotState.FREE),
    "request": ([(*k, to) for k, to in REQUEST_TRANSITIONS.items()], RequestState, RequestEvent, RequestState.PENDING),
    "replica": ([(*k, to) for k, to in REPLICA_TRANSITIONS.items()], ReplicaState, ReplicaEvent, ReplicaState.DOWN),
    "job": ([(*key, to) for key, to in JOB_TRANSITIONS.items()], JobState, JobEvent, JobState.QUEUED),
}


@pytest.mark.parametrize("name", tables.TABLES)
def test_the_protocol_page_shows_each_table_as_the_code_has_it(name: str) -> None:
    shown = protocol_doc.blocks(protocol_doc.PAGE.read_text(encoding="utf-8"))
    assert shown[name] == tables.render(name), "run python -m tests.ring_core.protocol_doc"


def test_the_protocol_page_shows_no_table_that_the_code_lacks() -> None:
    assert set(protocol_doc.blocks(protocol_doc.PAGE.read_text(encoding="utf-8"))) == set(tables.TABLES)


@pytest.mark.parametrize("name", MACHINES)
def test_every_state_can_be_reached_and_every_event_happens(name: str) -> None:
    edges, states, events, start = MACHINES[name]
    reached = {start}
    while more := {after for state, _, after in edges if state in reached} - reached:
        reached |= more
    assert reached == set(states)
    assert {event for _, event, _ in edges} == set(events)


def test_a_slot_never_leaves_quarantine_but_by_a_fence_and_is_read_only_when_filled() -> None:
    """R4 in one table: whatever else changes, these edges must not."""
    assert {event for state, event in SLOT_TRANSITIONS if state is SlotState.QUARANTINED} == {SlotEvent.FENCE}
    assert [state for (state, event) in SLOT_TRANSITIONS if event is SlotEvent.LEASE] == [SlotState.FILLED]
    assert [state for (state, event) in SLOT_TRANSITIONS if event is SlotEvent.REQUEST] == [SlotState.FREE]


@pytest.mark.parametrize("event", SlotEvent)
@pytest.mark.parametrize("state", SlotState)
def test_a_slot_moves_by_the_table_or_not_at_all(state: SlotState, event: SlotEvent) -> None:
    to_get_there = {
        SlotState.FREE: [],
        SlotState.REQUESTED: [SlotEvent.REQUEST],
        SlotState.FILLED: [SlotEvent.REQUEST, SlotEvent.COMPLETE],
        SlotState.LEASED: [SlotEvent.REQUEST, SlotEvent.COMPLETE, SlotEvent.LEASE],
        SlotState.QUARANTINED: [SlotEvent.REQUEST, SlotEvent.GIVE_UP],
    }
    slots = SlotTable(3)
    for step in to_get_there[state]:
        slots.move(1, step)
    assert slots.state(1) is state
    expected = SLOT_TRANSITIONS.get((state, event))
    if expected is None:
        with pytest.raises(
            LocalProtocolError, match=rf"slot 1: {event.name} is illegal in {state.name}; allowed: \['\w+'"
        ):
            slots.move(1, event)
        assert slots.state(1) is state
    else:
        slots.move(1, event)
        assert slots.state(1) is expected
    assert sum(slots.count(s) for s in SlotState) == 3
    assert slots.num_free == slots.count(SlotState.FREE)
