"""The student's requests from submission to release: their order, their attempts, and which must be asked again."""

from __future__ import annotations

import bisect
import enum
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ring.core.config import Expectation
from ring.core.errors import LocalProtocolError
from ring.core.messages import FillHeader, FillId, Payload

#: A request that every usable replica refused is asked again after this, doubled each time up to the maximum.
RETRY_MIN_S = 0.5
RETRY_MAX_S = 10.0


class RequestState(enum.Enum):
    PENDING = "pending"  # submitted, never dispatched: holds no place in the ring
    IN_FLIGHT = "in flight"  # one attempt is under way
    WAITING = "waiting"  # its attempt was given up; keeps its place, to be asked again
    FILLED = "filled"
    LEASED = "leased"
    RELEASED = "released"  # forgotten


class RequestEvent(enum.Enum):
    DISPATCH = "dispatch"
    COMPLETE = "complete"
    GIVE_UP = "give up"
    LEASE = "lease"
    RELEASE = "release"


REQUEST_TRANSITIONS: Mapping[tuple[RequestState, RequestEvent], RequestState] = MappingProxyType(
    {
        (RequestState.PENDING, RequestEvent.DISPATCH): RequestState.IN_FLIGHT,
        (RequestState.WAITING, RequestEvent.DISPATCH): RequestState.IN_FLIGHT,
        (RequestState.IN_FLIGHT, RequestEvent.COMPLETE): RequestState.FILLED,
        (RequestState.IN_FLIGHT, RequestEvent.GIVE_UP): RequestState.WAITING,
        (RequestState.FILLED, RequestEvent.LEASE): RequestState.LEASED,
        (RequestState.LEASED, RequestEvent.RELEASE): RequestState.RELEASED,
    }
)


@dataclass(kw_only=True)
class Entry:
    """One request. `attempt` is the number of the present or next attempt; `fill`, `replica`, `sent_s` are the last
    attempt's. `refused_by`: replicas not to be asked before `retry_at_s`; `unservable_by`: those that say that they
    never can serve it."""

    seq: int
    payload: Payload
    expect: Expectation
    state: RequestState = RequestState.PENDING
    attempt: int = 0
    fill: FillId | None = None
    replica: str = ""
    sent_s: float = 0.0
    header: FillHeader | None = None
    refused_by: set[str] = field(default_factory=set)
    unservable_by: set[str] = field(default_factory=set)
    num_backoffs: int = 0
    retry_at_s: float | None = None

    @property
    def cost_tokens(self) -> int:
        # Head pieces cost no tokens, yet they are work too: at least one, so that they spread over replicas.
        return max(1, self.expect.cost_tokens)

    @property
    def is_filled(self) -> bool:
        return self.state is RequestState.FILLED

    def move(self, event: RequestEvent) -> None:
        """Raises LocalProtocolError: `event` is illegal in the present state; nothing changed."""
        after = REQUEST_TRANSITIONS.get((self.state, event))
        if after is None:
            allowed = [e.name for (state, e) in REQUEST_TRANSITIONS if state is self.state]
            raise LocalProtocolError(
                f"seq {self.seq}: {event.name} is illegal in {self.state.name}; allowed: {allowed}"
            )
        self.state = after

    def back_off(self, now_s: float) -> None:
        self.retry_at_s = now_s + min(RETRY_MIN_S * 2.0**self.num_backoffs, RETRY_MAX_S)
        self.num_backoffs = min(self.num_backoffs + 1, 16)  # bounded so that the power can't overflow

    def forgive(self) -> None:
        """Every replica may be asked again."""
        self.refused_by.clear()
        self.retry_at_s = None


class Requests:
    """All requests between submission and release. What is in flight can be found by its fill."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._undelivered: deque[Entry] = deque()  # not leased yet, in seq order
        self._pending: deque[Entry] = deque()
        self._waiting: list[int] = []  # sorted seqs
        self._in_flight: dict[FillId, Entry] = {}
        self._num_unfilled = 0
        self.last_seq: int | None = None

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_admitted(self) -> int:
        """Requests that hold a place in the ring: dispatched once and not released yet."""
        return len(self._entries) - len(self._pending)

    @property
    def num_unfilled(self) -> int:
        return self._num_unfilled

    def first_unfilled(self) -> int | None:
        return next((e.seq for e in self._undelivered if e.state is not RequestState.FILLED), None)

    def in_flight(self, fill: FillId) -> Entry | None:
        return self._in_flight.get(fill)

    def leased(self, seq: int) -> Entry:
        """Raises LocalProtocolError: `seq` is not leased."""
        entry = self._entries.get(seq)
        if entry is None or entry.state is not RequestState.LEASED:
            found = "unknown or released already" if entry is None else entry.state.name
            raise LocalProtocolError(f"seq {seq}: RELEASE is illegal, it is {found}; allowed: LEASED")
        return entry

    def next_pending(self) -> Entry | None:
        return self._pending[0] if self._pending else None

    def next_undelivered(self) -> Entry | None:
        return self._undelivered[0] if self._undelivered else None

    def waiting(self) -> Iterator[Entry]:
        """Those to be asked again, in seq order; may be changed while iterating."""
        return (self._entries[seq] for seq in tuple(self._waiting))

    def forget_refusals(self, replica: str) -> None:
        """It may be asked for all of them again, those in flight elsewhere included, should they be given up."""
        for entry in self._entries.values():
            entry.refused_by.discard(replica)
            entry.unservable_by.discard(replica)

    def submit(self, entry: Entry) -> None:
        self._entries[entry.seq] = entry
        self._undelivered.append(entry)
        self._pending.append(entry)
        self._num_unfilled += 1
        self.last_seq = entry.seq

    def dispatch(self, entry: Entry, slot: int, replica: str, now_s: float) -> FillId:
        was_pending = entry.state is RequestState.PENDING
        entry.move(RequestEvent.DISPATCH)
        if was_pending:
            taken = self._pending.popleft()
            assert taken is entry  # pending requests are dispatched in seq order
        else:
            del self._waiting[bisect.bisect_left(self._waiting, entry.seq)]
        fill = FillId(entry.seq, entry.attempt, slot)
        entry.fill, entry.replica, entry.sent_s = fill, replica, now_s
        self._in_flight[fill] = entry
        return fill

    def put_off(self, by_s: float, now_s: float) -> None:
        """Everything in flight counts as sent so much later, now at the latest."""
        for entry in self._in_flight.values():
            entry.sent_s = min(entry.sent_s + by_s, now_s)

    def give_up(self, entry: Entry) -> FillId:
        """The present attempt is over; returns its fill."""
        fill = self._end_attempt(entry, RequestEvent.GIVE_UP)
        entry.attempt += 1
        bisect.insort(self._waiting, entry.seq)
        return fill

    def complete(self, entry: Entry, header: FillHeader) -> FillId:
        fill = self._end_attempt(entry, RequestEvent.COMPLETE)
        entry.header = header
        self._num_unfilled -= 1
        return fill

    def lease(self) -> Entry | None:
        """The next request in seq order, if it is filled."""
        entry = self.next_undelivered()
        if entry is None or entry.state is not RequestState.FILLED:
            return None
        entry.move(RequestEvent.LEASE)
        self._undelivered.popleft()
        return entry

    def release(self, entry: Entry) -> None:
        entry.move(RequestEvent.RELEASE)
        del self._entries[entry.seq]

    def _end_attempt(self, entry: Entry, event: RequestEvent) -> FillId:
        entry.move(event)
        assert entry.fill is not None
        del self._in_flight[entry.fill]
        return entry.fill
