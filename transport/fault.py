"""A backend around another one that loses, delays, repeats, damages and cuts, as its seed says; for tests of the ring.

Delays are counted in calls of `poll()`, not in seconds, so that a run depends on nothing but the seed and the calls.
Faults of the sender are those of a slow, dying or misbehaving teacher; those of the receiver are a transport that
breaks its word to report each fill exactly once.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ring.core.errors import PeerLost, TransportClosed
from ring.core.messages import Description, FillId
from transport.contract import Arrival, Backend, Capabilities, Fence, Receiver, Sender, Ticket
from transport.fills import Part, check_put, joined
from transport.memory import SlotArena
from transport.wakeup import Wakeup


@dataclass(frozen=True, kw_only=True)
class FaultPlan:
    """Shares of the puts and of the arrivals that go wrong; at most one fault befalls each.

    A put is dropped (its ticket completes, nothing is sent), delayed, corrupted in one byte, or cut (half of it is
    written, then the link ends). An arrival is lost, repeated, or postponed.
    """

    drop_frac: float = 0.0
    delay_frac: float = 0.0
    corrupt_frac: float = 0.0
    cut_frac: float = 0.0
    lose_frac: float = 0.0
    repeat_frac: float = 0.0
    postpone_frac: float = 0.0
    max_delay_polls: int = 20

    def put_faults(self) -> dict[str, float]:
        return {
            "drop": self.drop_frac,
            "delay": self.delay_frac,
            "corrupt": self.corrupt_frac,
            "cut": self.cut_frac,
        }

    def arrival_faults(self) -> dict[str, float]:
        return {"lose": self.lose_frac, "repeat": self.repeat_frac, "postpone": self.postpone_frac}


def fault(inner: Backend, *, seed: int, plan: FaultPlan) -> FaultyBackend:
    """`inner` with the faults of `plan`. Each channel opened has its own faults, set by `seed` and its number."""
    return FaultyBackend(inner, seed=seed, plan=plan)


class FaultyBackend:
    """A Backend. `injected` counts the faults of all its channels by kind."""

    def __init__(self, inner: Backend, *, seed: int, plan: FaultPlan) -> None:
        self._inner = inner
        self._seed = seed
        self._plan = plan
        self._num_opened: Counter[str] = Counter()
        self.injected: Counter[str] = Counter()

    def capabilities(self) -> Capabilities:
        inner = self._inner.capabilities()
        return dataclasses.replace(
            inner, name=f"fault-{inner.name}", crc_by_default=inner.crc_by_default or self._plan.corrupt_frac > 0
        )

    def unavailable(self) -> str | None:
        return self._inner.unavailable()

    def open_receiver(self, arena: SlotArena, *, bind_host: str, encrypt: bool = False) -> Receiver:
        dice = self._dice("receiver", self._plan.arrival_faults())
        return FaultyReceiver(self._inner.open_receiver(arena, bind_host=bind_host, encrypt=encrypt), dice)

    def open_sender(self, description: Description, *, num_slots: int, slot_bytes: int, timeout_s: float) -> Sender:
        dice = self._dice("sender", self._plan.put_faults())
        inner = self._inner.open_sender(description, num_slots=num_slots, slot_bytes=slot_bytes, timeout_s=timeout_s)
        return FaultySender(inner, dice, num_slots=num_slots, slot_bytes=slot_bytes)

    def _dice(self, side: str, faults: dict[str, float]) -> _Dice:
        self._num_opened[side] += 1
        rng = random.Random(f"{self._seed}/{side}/{self._num_opened[side]}")
        return _Dice(rng, faults, self.injected, self._plan.max_delay_polls)


class _Dice:
    """Decides what befalls the next put or arrival of one endpoint."""

    def __init__(
        self, rng: random.Random, faults: dict[str, float], injected: Counter[str], max_delay_polls: int
    ) -> None:
        self._rng = rng
        self._faults = faults
        self._injected = injected
        self._max_delay_polls = max_delay_polls

    def roll(self) -> str | None:
        """The kind of fault; None: none."""
        left = self._rng.random()
        for kind, frac in self._faults.items():
            if left < frac:
                self._injected[kind] += 1
                return kind
            left -= frac
        return None

    def delay_polls(self) -> int:
        return self._rng.randint(1, self._max_delay_polls)

    def position(self, num_bytes: int) -> int:
        return self._rng.randrange(num_bytes)


@dataclass
class _Postponed:
    """An arrival that is reported after some more polls."""

    polls_left: int
    arrival: Arrival


class FaultyReceiver(Receiver):
    """See Receiver and FaultPlan."""

    def __init__(self, inner: Receiver, dice: _Dice) -> None:
        self._inner = inner
        self._dice = dice
        self._postponed: list[_Postponed] = []
        self._more = Wakeup()

    def describe(self) -> Description:
        return self._inner.describe()

    def arm(self, fill: FillId, *, num_bytes: int) -> None:
        self._inner.arm(fill, num_bytes=num_bytes)

    def disarm(self, fill: FillId, *, refused: bool = False) -> Fence:
        self._postponed = [later for later in self._postponed if later.arrival.fill != fill]
        return self._inner.disarm(fill, refused=refused)

    def poll(self) -> list[Arrival]:
        arrivals = self._due()
        try:
            fresh = self._inner.poll()
        except PeerLost:
            if not arrivals and not self._postponed:
                raise
            fresh = []
        for arrival in fresh:
            kind = self._dice.roll()
            if kind in (None, "repeat"):
                arrivals.append(arrival)
            if kind in ("repeat", "postpone"):
                self._postponed.append(_Postponed(self._dice.delay_polls(), arrival))
        if self._postponed:
            self._more.set()
        else:
            self._more.clear()
        return arrivals

    def poll_fenced(self) -> list[FillId]:
        return self._inner.poll_fenced()

    def wait_fds(self) -> tuple[int, ...]:
        own = self._more.fileno()
        return (*self._inner.wait_fds(), own) if own >= 0 else self._inner.wait_fds()

    @property
    def dropped(self) -> int:
        return self._inner.dropped

    def close(self) -> None:
        self._inner.close()
        self._more.close()

    def forget(self) -> None:
        self._inner.forget()
        self._more.close()

    def _due(self) -> list[Arrival]:
        for later in self._postponed:
            later.polls_left -= 1
        due = [later.arrival for later in self._postponed if later.polls_left <= 0]
        self._postponed = [later for later in self._postponed if later.polls_left > 0]
        return due


@dataclass
class _Delayed:
    """A put that is made after some more polls."""

    polls_left: int
    ticket: Ticket
    fill: FillId
    header: bytes
    parts: Sequence[torch.Tensor]


class FaultySender(Sender):
    """See Sender and FaultPlan."""

    def __init__(self, inner: Sender, dice: _Dice, *, num_slots: int, slot_bytes: int) -> None:
        self._inner = inner
        self._dice = dice
        self._num_slots = num_slots
        self._slot_bytes = slot_bytes
        self._num_puts = 0
        self._delayed: list[_Delayed] = []
        self._dropped: list[Ticket] = []  # complete, as far as the teacher can tell
        self._ours: dict[Ticket, Ticket] = {}  # by the inner ticket
        self._is_cut = False
        self._more = Wakeup()

    def put(self, fill: FillId, *, header: bytes, parts: Sequence[torch.Tensor]) -> Ticket:
        sources = check_put(fill, header=header, parts=parts, num_slots=self._num_slots, slot_bytes=self._slot_bytes)
        self._check_cut()
        kind = self._dice.roll()
        self._num_puts += 1
        ticket = Ticket(self._num_puts)
        if kind == "drop":
            self._dropped.append(ticket)
        elif kind == "delay":
            self._delayed.append(_Delayed(self._dice.delay_polls(), ticket, fill, header, parts))
        elif kind == "cut":
            whole = joined(sources)
            self._inner.put(fill, header=header, parts=[whole[: whole.numel() // 2]])
            self._inner.close()
            self._is_cut = True
        elif kind == "corrupt":
            self._ours[self._put_corrupted(fill, header, sources)] = ticket
        else:
            self._ours[self._inner.put(fill, header=header, parts=parts)] = ticket
        self._tell()
        self._check_cut()
        return ticket

    def poll(self) -> list[Ticket]:
        if not self._dropped:
            self._check_cut()
        tickets, self._dropped = self._dropped, []
        if not self._is_cut:
            try:
                self._put_due()
                tickets += [self._ours.pop(ticket) for ticket in self._inner.poll()]
            except PeerLost:
                if not tickets:
                    raise
        self._tell()
        return tickets

    @property
    def unfinished(self) -> int:
        return len(self._ours) + len(self._delayed) + len(self._dropped)

    def wait_fds(self) -> tuple[int, ...]:
        own = self._more.fileno()
        return (*self._inner.wait_fds(), own) if own >= 0 else ()

    def close(self) -> None:
        self._inner.close()
        self._more.close()

    def _put_due(self) -> None:
        for later in self._delayed:
            later.polls_left -= 1
        due = [later for later in self._delayed if later.polls_left <= 0]
        self._delayed = [later for later in self._delayed if later.polls_left > 0]
        for later in due:
            self._ours[self._inner.put(later.fill, header=later.header, parts=later.parts)] = later.ticket

    def _put_corrupted(self, fill: FillId, header: bytes, sources: Sequence[Part]) -> Ticket:
        if not sources:
            damaged = bytearray(header or b"\0")
            damaged[self._dice.position(len(damaged))] ^= 1
            return self._inner.put(fill, header=bytes(damaged), parts=[])
        whole = joined(sources)
        whole[self._dice.position(whole.numel())] ^= 1
        return self._inner.put(fill, header=header, parts=[whole])

    def _check_cut(self) -> None:
        if self._is_cut:
            if self._more.fileno() < 0:
                raise TransportClosed("a closed channel was used")
            raise PeerLost("the link was cut on purpose")

    def _tell(self) -> None:
        if self._delayed or self._dropped or self._is_cut:
            self._more.set()
        else:
            self._more.clear()
