"""One run: all students and replicas, the links between them, the faults of a scenario, and how it must end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from tests.simulation.clock import Clock, Violation
from tests.simulation.connection import Connection
from tests.simulation.data_plane import Receiver, Unreliable, open_channel
from tests.simulation.faults import Faults
from tests.simulation.invariants import Checks
from tests.simulation.memory import FINGERPRINT
from tests.simulation.network import Direction, Pipe
from tests.simulation.replica_life import ReplicaLife
from tests.simulation.scenario import FOREVER_S, FaultKind, ReplicaPlan, Scenario
from tests.simulation.student_life import Session, StudentLife

#: Far above what any scenario needs: more means that something is done over and over without time passing.
MAX_EVENTS = 300_000


@dataclass(kw_only=True)
class Outcome:
    """How a run ended. `lost`: students whose run ended for want of a teacher, and that nobody started again. `met`:
    what befell it, and how often."""

    num_events: int
    num_checks: int
    end_s: float
    fills: int
    lost: tuple[int, ...]
    met: Counter[str]


@dataclass(kw_only=True)
class Link:
    """Between one student's machine and one replica's."""

    to_replica: Direction
    to_student: Direction
    unreliable: Unreliable


@dataclass(kw_only=True)
class Host:
    """Where the lives of one replica run. `doomed`: nothing that an earlier fault promised brings it back."""

    name: str
    plan: ReplicaPlan
    life: ReplicaLife | None = None
    num_lives: int = 0
    doomed: bool = False


@dataclass(kw_only=True)
class Rank:
    """One student over all its lives. `lineage`: what the surviving lineage has trained on, in order (R1)."""

    number: int
    life: StudentLife | None = None
    num_lives: int = 0
    lineage: list[int]
    durable: int = 0
    done: bool = False
    lost: bool = False


class World:
    def __init__(self, what: Scenario, *, log: Callable[[str], None] | None = None) -> None:
        self.scenario = what
        self.clock = Clock()
        self.traces = log is not None
        self._log = log
        self.met: Counter[str] = Counter()
        self.checks = Checks(self.met)
        self._fills = 0
        self.hosts = {f"r{i}": Host(name=f"r{i}", plan=plan) for i, plan in enumerate(what.replicas)}
        self.ranks = [Rank(number=i, lineage=[]) for i in range(what.num_students)]
        self.links = {(rank, name): self._link(rank, name) for rank in range(len(self.ranks)) for name in self.hosts}
        self._num_connections = 0

    def rng(self, purpose: str) -> Random:
        return Random(f"{self.scenario.seed} {purpose}")

    def log(self, text: str) -> None:
        if self._log is not None:
            self._log(f"t={self.clock.now_s:9.4f} {text}")

    # ---- the run -------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Raises Violation: a promise was broken."""
        for host in self.hosts.values():
            self.clock.at(host.plan.starts_s, partial(self.start_replica, host))
        for rank in self.ranks:
            self.clock.at(0.0, partial(self._start_student, rank))
        Faults(self).schedule()
        limit_s, num_events = self._limit_s(), 0
        while not all(rank.done or rank.lost for rank in self.ranks):
            if not self.clock.step():
                raise Violation("nothing will ever happen again, and there is work left")
            num_events += 1
            if self.clock.now_s > limit_s or num_events > MAX_EVENTS:
                raise Violation(f"no end after {num_events} events, {limit_s:.0f} s: {self._describe()}")
        self._check_end()
        return Outcome(
            num_events=num_events,
            num_checks=self.checks.num,
            end_s=self.clock.now_s,
            fills=self._fills,
            lost=tuple(rank.number for rank in self.ranks if rank.lost),
            met=self.met,
        )

    def _limit_s(self) -> float:
        """When all must be over (R5): once it is quiet there is progress, and without a teacher there is an end."""
        what = self.scenario
        if not what.all_are_doomed or what.revival_s < FOREVER_S:
            # All slots may be quarantined by replicas that stopped for good: that is an end too.
            return what.quiet_s + what.patience_s + (what.teacher_timeout_s if what.doomed else 0.0)
        slack_s = 3 * what.request_timeout_s + what.peer_timeout_s + 30.0
        return max(what.quiet_s, what.doom_s) + what.teacher_timeout_s + slack_s

    def _check_end(self) -> None:
        for rank in self.ranks:
            if rank.lost:
                continue
            expected = list(range(len(self.scenario.microbatches[rank.number])))
            if rank.lineage != expected or rank.durable != len(expected):
                raise Violation(f"s{rank.number} trained on {rank.lineage}, durable {rank.durable}: not each once")

    def _describe(self) -> str:
        texts = []
        for rank in self.ranks:
            if rank.life is not None and not rank.done:
                stats = rank.life.machine.stats(now_s=self.clock.now_s)
                texts.append(f"s{rank.number} is at {len(rank.lineage)}, {stats}")
        return "; ".join(texts)

    # ---- students ------------------------------------------------------------------------------------------------

    def _start_student(self, rank: Rank) -> None:
        rank.num_lives += 1
        self.met["resumed"] += rank.num_lives > 1
        del rank.lineage[rank.durable :]
        rank.life = StudentLife(self, rank=rank.number, number=rank.num_lives, position=rank.durable)
        rank.life.deliver(lambda: None)

    def trained(self, number: int, seq: int) -> None:
        """R1, R7: exactly once and in order, in the surviving lineage."""
        lineage = self.ranks[number].lineage
        if seq != len(lineage):
            raise Violation(f"s{number} trains on microbatch {seq}; {len(lineage)} is next")
        lineage.append(seq)

    def durable(self, number: int, position: int) -> None:
        self.ranks[number].durable = max(position, self.ranks[number].durable)

    def student_done(self, life: StudentLife) -> None:
        rank = self.ranks[life.rank]
        stats = life.machine.stats(now_s=self.clock.now_s)
        left = stats.num_in_flight + stats.num_filled + stats.num_leased + stats.pending + stats.waiting
        if left or not stats.submitted == stats.fills == stats.released:
            raise Violation(f"{life.name} is done, and something is left: {stats}")
        rank.durable = len(rank.lineage)  # the checkpoint at the end is waited for
        rank.done = True
        self._end_life(life)

    def student_lost(self, life: StudentLife, message: str) -> None:
        """R5: only when nobody served it for all that time; with the names of all replicas; and with a checkpoint."""
        rank, what = self.ranks[life.rank], self.scenario
        unserved_s = self.clock.now_s - life.last_accepted_s
        stats = life.machine.stats(now_s=self.clock.now_s)
        nothing_to_ask_with = stats.num_free + stats.num_in_flight == 0 < stats.num_quarantined
        expected = what.all_are_doomed or (what.doom is FaultKind.STOP_REPLICA and nothing_to_ask_with)
        if not expected or unserved_s < what.teacher_timeout_s - 1e-6:
            raise Violation(f"{life.name} gave up after {unserved_s:.3f} s without a fill: {message}")
        if any(f"{name} is" not in message for name in self.hosts):
            raise Violation(f"{life.name}: not every replica is named: {message}")
        rank.durable = len(rank.lineage)
        self._end_life(life)
        self.met["lost with all slots in quarantine"] += nothing_to_ask_with
        self.met["lost for good" if what.revival_s == FOREVER_S else "lost, and started again"] += 1
        if what.revival_s < FOREVER_S:
            self.clock.at(max(what.revival_s, self.clock.now_s) + 1.0, lambda: self._start_student(rank))
        else:
            rank.lost = True

    def crash(self, rank: Rank, for_s: float) -> None:
        """Kill a student's process; the next one begins where the last durable checkpoint says."""
        life = rank.life
        if life is None or not life.alive:
            return
        self._count(life)
        life.die()
        self.clock.after(for_s, partial(self._start_student, rank))

    def _end_life(self, life: StudentLife) -> None:
        self._count(life)
        life.finish()

    def _count(self, life: StudentLife) -> None:
        stats = life.machine.stats(now_s=self.clock.now_s)
        self._fills += stats.fills
        for retry, num in stats.retries_by_cause.items():
            self.met[f"retry: {retry.value}"] += num
        for drop, num in stats.drops_by_cause.items():
            self.met[f"drop: {drop.value}"] += num

    # ---- replicas and connections --------------------------------------------------------------------------------

    def start_replica(self, host: Host, *, fingerprint: str = FINGERPRINT) -> None:
        if host.doomed or (host.life is not None and host.life.alive):
            return
        host.num_lives += 1
        host.life = ReplicaLife(
            self,
            host=host.name,
            number=host.num_lives,
            fingerprint=fingerprint,
            seconds_per_token=host.plan.seconds_per_token,
        )

    def restart(self, host: Host, *, fingerprint: str = FINGERPRINT) -> None:
        if not host.doomed and host.life is not None:
            host.life.die()
            self.start_replica(host, fingerprint=fingerprint)

    def connect(self, student: StudentLife, session: Session) -> Connection | None:
        """None: nobody listens there."""
        replica, link = self.hosts[session.replica].life, self.links[student.rank, session.replica]
        if replica is None or not replica.alive:
            return None
        self._num_connections += 1
        name = f"{student.name}#{self._num_connections}"
        dice = self.rng(f"pipe {name}")
        return Connection(
            name,
            student=student,
            session=session,
            replica=replica,
            # A request that came again after its slot's next one would be answered again, into memory if it is shared:
            # that is why requests need a connection which keeps their order.
            to_replica=Pipe(self.clock, dice, link.to_replica, replica, flaky=True),
            to_student=Pipe(self.clock, dice, link.to_student, student, flaky=True, repeats_late=True),
            encodes=self.scenario.encodes,
        )

    def open_channel(self, student: StudentLife, connection: Connection) -> Receiver:
        replica = connection.replica
        host = next(host for host in self.hosts.values() if host.life is replica or replica.name.startswith(host.name))
        link = self.links[student.rank, host.name]
        dice = self.rng(f"channel {connection.name}")
        receiver, connection.sender = open_channel(
            host.plan.style,
            clock=self.clock,
            rng=dice,
            memory=student.memory,
            student=student,
            replica=replica,
            direction=link.to_student,
            copy_s=self.scenario.copy_s * dice.uniform(0.5, 1.5),
            unreliable=link.unreliable,
        )
        if not replica.alive:
            connection.sender.die()
        # What the student's end says when it closes: over the same network, and never lost.
        to_replica = Pipe(self.clock, dice, link.to_replica, replica)
        receiver.tell_sender = lambda: to_replica.end(lambda: replica.connection_ended(connection))
        return receiver

    def _link(self, rank: int, name: str) -> Link:
        def direction(text: str) -> Direction:
            return Direction(name=text, min_delay_s=1e-4, max_delay_s=self.scenario.max_delay_s)

        return Link(
            to_replica=direction(f"s{rank}>{name}"),
            to_student=direction(f"{name}>s{rank}"),
            unreliable=Unreliable(rng=self.rng(f"arrivals {rank} {name}")),
        )
