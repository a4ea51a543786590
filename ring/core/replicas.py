"""The replicas of a run: their states in one table, what each holds, and which gets the next request.

The choice is the least expected completion time: (tokens it owes + tokens asked) x its seconds per token. It costs the
number of busy replicas, which the ring's depth bounds, not the number of replicas: idle ones are kept sorted. While
others serve, those that have failed since their last accepted fill get one new request at a time, ever less often.
"""

from __future__ import annotations

import bisect
import enum
import heapq
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ring.core.errors import LocalProtocolError
from ring.core.messages import FillId
from ring.core.requests import Entry
from ring.core.stats import DropCause, ReplicaStats

#: Weight that a replica's past keeps with each new sample of its speed.
DECAY_FRAC = 0.8
#: After this many times the time that it predicts for its last request, an idle replica's estimate is stale, and it is
#: tried as if it were no slower than the others. Otherwise a replica that was slow once would never be asked again,
#: however fast it became; trying one that still is costs at most a twentieth of its time.
TRUST_FACTOR = 20.0
#: A replica that failed is tried again after up to so many times what its last failure cost: a twentieth again.
MAX_PAUSE_FACTOR = 20.0
#: One that failed so often since its last accepted fill is not asked at once for what a better one refused.
MANY_FAILURES = 3
#: Floor of the estimate, so that what a replica owes counts even where fills take no time.
MIN_S_PER_TOKEN = 1e-9


class ReplicaState(enum.Enum):
    DOWN = "down"
    UP = "up"  # is asked
    STALLED = "stalled"  # missed a deadline; not asked until its data path shows life
    DRAINING = "draining"  # finishes what it holds; not asked


class ReplicaEvent(enum.Enum):
    JOIN = "join"
    STALL = "stall"
    LIFE = "life"
    DRAIN = "drain"
    LEAVE = "leave"


REPLICA_TRANSITIONS: Mapping[tuple[ReplicaState, ReplicaEvent], ReplicaState] = MappingProxyType(
    {
        (ReplicaState.DOWN, ReplicaEvent.JOIN): ReplicaState.UP,
        (ReplicaState.UP, ReplicaEvent.STALL): ReplicaState.STALLED,
        (ReplicaState.DRAINING, ReplicaEvent.STALL): ReplicaState.STALLED,
        (ReplicaState.STALLED, ReplicaEvent.LIFE): ReplicaState.UP,
        (ReplicaState.UP, ReplicaEvent.DRAIN): ReplicaState.DRAINING,
        (ReplicaState.UP, ReplicaEvent.LEAVE): ReplicaState.DOWN,
        (ReplicaState.STALLED, ReplicaEvent.LEAVE): ReplicaState.DOWN,
        (ReplicaState.DRAINING, ReplicaEvent.LEAVE): ReplicaState.DOWN,
    }
)


@dataclass(kw_only=True)
class Load:
    """How fast a replica answers, from decayed sums, so that fills that come in bursts count by their tokens."""

    seconds: float = 0.0
    tokens: float = 0.0

    def add(self, *, service_s: float, tokens: int) -> None:
        self.seconds = self.seconds * DECAY_FRAC + service_s
        self.tokens = self.tokens * DECAY_FRAC + tokens

    @property
    def seconds_per_token(self) -> float | None:
        return max(self.seconds / self.tokens, MIN_S_PER_TOKEN) if self.tokens else None


@dataclass(kw_only=True)
class Replica:
    """One replica over all its lives.

    `num_failures`: since its last accepted fill; one with any is still tried. `num_strikes`: failures close upon each
    other, whatever it filled between them; they lengthen the pause until `trial_s`. `serves`: it counts as a teacher
    that serves the run: it has not failed, or all its failures can have been deaths of its process (`only_died`) and it
    has another now, or there was but one. `leaving`: its session ends once its last fills are taken."""

    name: str
    state: ReplicaState = ReplicaState.DOWN
    epoch: str | None = None
    num_failures: int = 0
    leaving: bool = False
    serves: bool = True
    only_died: bool = True
    num_strikes: int = 0
    strikes_until_s: float = float("-inf")  # a failure after that is the first again
    trial_s: float = float("-inf")
    in_flight: dict[FillId, Entry] = field(default_factory=dict)
    owed_tokens: int = 0
    cancelled: dict[FillId, None] = field(default_factory=dict)  # in this session, not answered yet
    load: Load = field(default_factory=Load)
    trusted_until_s: float = float("-inf")
    stale: bool = False  # its estimate is
    last_fill_s: float = float("-inf")
    crc_errors_in_a_row: int = 0
    noted: set[DropCause] = field(default_factory=set)
    num_joins: int = 0
    fills: int = 0
    bytes_received: int = 0
    retries: int = 0
    last_error: str | None = None
    drop_error: str | None = None  # why this side dropped it, which a later "connection refused" must not hide

    @property
    def connected(self) -> bool:
        return self.state is not ReplicaState.DOWN

    @property
    def proven(self) -> bool:
        return self.num_failures == 0

    def describe(self) -> str:
        errors = [self.last_error or "no error"]
        if self.drop_error is not None and self.drop_error != self.last_error:
            errors.append(f"before that: {self.drop_error}")
        return f"{self.name} is {self.state.value}, last error: {'; '.join(errors)}"

    def stats(self) -> ReplicaStats:
        return ReplicaStats(
            name=self.name,
            state=self.state.value,
            epoch=self.epoch,
            num_joins=self.num_joins,
            in_flight=len(self.in_flight),
            fills=self.fills,
            bytes_received=self.bytes_received,
            retries=self.retries,
            seconds_per_token=self.load.seconds_per_token,
            last_error=self.last_error,
        )


class Fleet:
    """All replicas that were ever heard of. Whatever changes a replica's load or state does it through the fleet,
    which keeps the usable ones in order."""

    def __init__(self) -> None:
        self._replicas: dict[str, Replica] = {}
        self._num_usable = 0
        self._num_serving = 0
        self._stalled: dict[str, Replica] = {}
        self._doubted: dict[str, Replica] = {}  # usable, not proven
        self._trials: list[tuple[float, str]] = []  # (trial_s, name) of the idle ones of these; sorted
        self._busy: dict[str, Replica] = {}  # proven; so are all below
        self._idle_known: list[tuple[float, str]] = []  # (seconds per token, name), sorted
        self._idle_stale: list[tuple[float, str]] = []  # as idle_known
        self._idle_new: list[str] = []  # no estimate yet; sorted
        self._estimates: list[tuple[float, str]] = []  # heap of (trusted until, name); outdated ones are skipped
        self._rates_s = 0.0  # sum over those with a good estimate
        self._num_rates = 0
        self.ever_joined = False

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    @property
    def num_usable(self) -> int:
        return self._num_usable

    @property
    def num_serving(self) -> int:
        return self._num_serving

    def get(self, name: str) -> Replica | None:
        return self._replicas.get(name)

    def add(self, name: str) -> Replica:
        return self._replicas.setdefault(name, Replica(name=name))

    def stalled(self) -> tuple[Replica, ...]:
        return tuple(self._stalled.values())

    def move(self, replica: Replica, event: ReplicaEvent) -> None:
        """Raises LocalProtocolError: `event` is illegal in the replica's state; nothing changed."""
        after = REPLICA_TRANSITIONS.get((replica.state, event))
        if after is None:
            allowed = [e.name for (state, e) in REPLICA_TRANSITIONS if state is replica.state]
            raise LocalProtocolError(
                f"replica {replica.name}: {event.name} is illegal in {replica.state.name}; allowed: {allowed}"
            )
        self._unlist(replica)
        replica.state = after
        self._list(replica)

    def join(self, replica: Replica, epoch: str) -> None:
        """It finished its handshake. With another epoch it is another process, perhaps on another machine: nothing is
        held against it but that it has not served yet."""
        replica.load = Load()
        if epoch != replica.epoch:
            replica.num_strikes, replica.trial_s = 0, float("-inf")
        # A connection may break once; one that breaks again and again serves nobody.
        replica.serves |= replica.only_died and replica.num_strikes <= 1
        replica.leaving = False
        replica.epoch = epoch
        replica.crc_errors_in_a_row = 0
        replica.num_joins += 1
        self.ever_joined = True
        self.move(replica, ReplicaEvent.JOIN)

    def failed(self, replica: Replica, *, spent_s: float, now_s: float, can_be_death: bool = False) -> None:
        """It missed a deadline, fell silent or broke its connection while it was asked, answered wrongly, or refused,
        which cost `spent_s`.

        While others serve, it is not tried again for 0, 1, 3, 7 ... times that, at most 20 times."""
        self._unlist(replica)
        replica.num_failures += 1
        replica.serves = False
        replica.only_died &= can_be_death
        replica.num_strikes = 1 if now_s > replica.strikes_until_s else min(replica.num_strikes + 1, 16)
        pause_s = spent_s * min(2.0 ** (replica.num_strikes - 1) - 1.0, MAX_PAUSE_FACTOR)
        replica.trial_s = max(replica.trial_s, now_s + pause_s)
        # Longer than the longest pause, after which it may take some time more to fail.
        replica.strikes_until_s = max(replica.strikes_until_s, now_s + 2 * MAX_PAUSE_FACTOR * spent_s)
        self._list(replica)

    def proved(self, replica: Replica) -> None:
        """A fill of it was accepted."""
        self._unlist(replica)
        replica.num_failures, replica.serves, replica.only_died = 0, True, True
        self._list(replica)

    def dispatched(self, replica: Replica, fill: FillId, entry: Entry) -> None:
        self._unlist(replica)
        replica.in_flight[fill] = entry
        replica.owed_tokens += entry.cost_tokens
        self._list(replica)

    def ended(self, replica: Replica, fill: FillId) -> None:
        """An attempt is over."""
        self._unlist(replica)
        replica.owed_tokens -= replica.in_flight.pop(fill).cost_tokens
        self._list(replica)

    def sample(self, replica: Replica, *, service_s: float, tokens: int, now_s: float) -> None:
        """The replica needed `service_s` for `tokens`. What was known before a failure does not count any more, nor
        does a stale estimate."""
        self._unlist(replica)
        if replica.stale or not replica.proven:
            replica.load = Load()
        replica.load.add(service_s=service_s, tokens=tokens)
        replica.stale = False
        predicted_s = tokens * (replica.load.seconds_per_token or 0.0)
        replica.trusted_until_s = now_s + TRUST_FACTOR * predicted_s
        heapq.heappush(self._estimates, (replica.trusted_until_s, replica.name))
        self._list(replica)

    def choose(
        self, cost_tokens: int, avoid: Collection[str], now_s: float, *, is_retry: bool = False
    ) -> Replica | None:
        """The usable replica outside `avoid` that would answer first; ties go to the first name.

        One that failed is chosen when its pause is over, it owes nothing and the request is new; else only where no
        proven one is left: the one that failed the fewest times, but none that failed often while one in `avoid` did
        less so. Replicas that fail at once and come back at once would keep a request from the others otherwise."""
        self._find_stale(now_s)
        if self._trials and not is_retry and self._trials[0][0] <= now_s:
            return self._replicas[self._trials[0][1]]
        mean_s = max(self._rates_s / self._num_rates, MIN_S_PER_TOKEN) if self._num_rates else 1.0
        proven = self._first_to_answer(cost_tokens, avoid, mean_s)
        if proven is not None:
            return proven
        doubted = [
            (r.num_failures, (r.owed_tokens + cost_tokens) * (r.load.seconds_per_token or mean_s), name)
            for name, r in self._doubted.items()
            if name not in avoid
        ]
        if not doubted:
            return None
        num_failures, _, name = min(doubted)
        if num_failures >= MANY_FAILURES and any(self._is_better(other, num_failures) for other in avoid):
            return None
        return self._replicas[name]

    def _is_better(self, name: str, num_failures: int) -> bool:
        replica = self._replicas[name]
        return replica.state is ReplicaState.UP and replica.num_failures < num_failures

    def _first_to_answer(self, cost_tokens: int, avoid: Collection[str], mean_s: float) -> Replica | None:
        candidates = [
            ((r.owed_tokens + cost_tokens) * (r.load.seconds_per_token or mean_s), name)
            for name, r in self._busy.items()
            if name not in avoid
        ]
        known = next(((rate, name) for rate, name in self._idle_known if name not in avoid), None)
        if known is not None:
            candidates.append((cost_tokens * known[0], known[1]))
        stale = next(((rate, name) for rate, name in self._idle_stale if name not in avoid), None)
        if stale is not None:
            candidates.append((cost_tokens * min(stale[0], mean_s), stale[1]))
        new = next((name for name in self._idle_new if name not in avoid), None)
        if new is not None:
            candidates.append((cost_tokens * mean_s, new))
        return self._replicas[min(candidates)[1]] if candidates else None

    def _find_stale(self, now_s: float) -> None:
        while self._estimates and now_s >= self._estimates[0][0]:
            replica = self._replicas[heapq.heappop(self._estimates)[1]]
            if now_s >= replica.trusted_until_s and not replica.in_flight:
                self._unlist(replica)
                replica.stale = True
                self._list(replica)

    def _list(self, replica: Replica) -> None:
        if replica.state is ReplicaState.STALLED:
            self._stalled[replica.name] = replica
        if replica.state is not ReplicaState.UP:
            return
        self._num_usable += 1
        self._num_serving += replica.serves
        if not replica.proven:
            self._doubted[replica.name] = replica
            if not replica.in_flight:
                bisect.insort(self._trials, (replica.trial_s, replica.name))
            return
        rate_s = replica.load.seconds_per_token
        if rate_s is not None and not replica.stale:
            self._rates_s += rate_s
            self._num_rates += 1
        if replica.in_flight:
            self._busy[replica.name] = replica
        elif rate_s is None:
            bisect.insort(self._idle_new, replica.name)
        else:
            bisect.insort(self._idle_stale if replica.stale else self._idle_known, (rate_s, replica.name))

    def _unlist(self, replica: Replica) -> None:
        self._stalled.pop(replica.name, None)
        if replica.state is not ReplicaState.UP:
            return
        self._num_usable -= 1
        self._num_serving -= replica.serves
        if not replica.proven:
            del self._doubted[replica.name]
            if not replica.in_flight:
                del self._trials[bisect.bisect_left(self._trials, (replica.trial_s, replica.name))]
            return
        rate_s = replica.load.seconds_per_token
        if rate_s is not None and not replica.stale:
            self._num_rates -= 1
            # Exactly zero when none is left, whatever the rounding of the sums before.
            self._rates_s = self._rates_s - rate_s if self._num_rates else 0.0
        if replica.in_flight:
            del self._busy[replica.name]
        elif rate_s is None:
            del self._idle_new[bisect.bisect_left(self._idle_new, replica.name)]
        else:
            idle = self._idle_stale if replica.stale else self._idle_known
            del idle[bisect.bisect_left(idle, (rate_s, replica.name))]
