"""What one seed means: how many students and replicas, their sizes and speeds, and every fault with its time.

A scenario is plain data, so that a failing one can be told in a line for each fault, and shrunk by leaving faults out.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.simulation.data_plane import Style


class FaultKind(enum.Enum):
    """What befalls a replica, a student, or the link between the two, for `for_s` seconds."""

    KILL_REPLICA = "kill replica"  # a new life after for_s
    STOP_REPLICA = "stop replica"
    SLOW_REPLICA = "slow replica"
    LYING_REPLICA = "lying replica"  # its next answers are wrong, one each way that there is
    FAILING_REPLICA = "failing replica"  # its forward passes raise
    BREAKING_REPLICA = "breaking replica"  # its connection ends some time after it was asked, which it never answers
    DRAIN_REPLICA = "drain replica"  # a new life for_s after the drain began
    OTHER_MODEL = "other model"  # restarted with another fingerprint, then with the right one
    CRASH_STUDENT = "crash student"  # resumes after for_s
    STOP_STUDENT = "stop student"
    SLOW_STUDENT = "slow student"
    CUT_LINK = "cut link"
    CUT_TO_STUDENT = "cut link one way, towards s"
    CUT_TO_REPLICA = "cut link one way, towards r"
    FLAKY_LINK = "flaky link"  # control messages get lost, repeated and reordered
    UNRELIABLE_ARRIVALS = "unreliable arrivals"  # the data plane loses, repeats and delays what it reports


#: What befalls replicas for good.
DOOMS = (
    FaultKind.KILL_REPLICA,
    FaultKind.STOP_REPLICA,
    FaultKind.LYING_REPLICA,
    FaultKind.FAILING_REPLICA,
    FaultKind.CUT_LINK,
    FaultKind.CUT_TO_STUDENT,
    FaultKind.CUT_TO_REPLICA,
)
#: What may happen in any scenario. The other kind has scenarios of its own, so that seeds mean what they always did.
ANYWHERE = tuple(kind for kind in FaultKind if kind is not FaultKind.BREAKING_REPLICA)
FOREVER_S = 1e9
MAX_TOKENS = 40  # of a microbatch


@dataclass(frozen=True, kw_only=True)
class Fault:
    at_s: float
    kind: FaultKind
    replica: int
    student: int
    for_s: float

    def __str__(self) -> str:
        how_long = "for good" if self.for_s >= FOREVER_S else f"for {self.for_s:.2f} s"
        who = {"replica": f"r{self.replica}", "model": f"r{self.replica}", "student": f"s{self.student}"}
        words = self.kind.value.split()
        targets = sorted({who[word] for word in words if word in who}) or [f"r{self.replica} and s{self.student}"]
        return f"t={self.at_s:.3f} {self.kind.value}: {', '.join(targets)} {how_long}"


@dataclass(frozen=True, kw_only=True)
class ReplicaPlan:
    starts_s: float
    seconds_per_token: float
    style: Style
    crc: bool


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """num_rows 0: nothing of it counts, so it is not asked for."""

    num_tokens: int
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One run of the simulator. `doom`: what happens to the `doomed` replicas at `doom_s`, if anything; they come back
    at `revival_s`, if ever. `steps_a_checkpoint`: how often a position becomes durable."""

    seed: int
    microbatches: tuple[tuple[Microbatch, ...], ...]  # of each student
    num_head_pieces: int
    replicas: tuple[ReplicaPlan, ...]
    depth: int
    num_spares: int
    max_pending: int
    request_timeout_s: float
    peer_timeout_s: float
    teacher_timeout_s: float
    student_timeout_s: float
    step_s: float
    late_release: bool
    steps_a_checkpoint: int
    max_batch_tokens: int
    one_request_a_pass: bool
    max_delay_s: float
    copy_s: float
    encodes: bool
    faults: tuple[Fault, ...]
    doom: FaultKind | None = None
    doomed: tuple[int, ...] = ()
    doom_s: float = FOREVER_S
    revival_s: float = FOREVER_S
    breaks_after_s: float = 0.0  # a breaking replica, after it was asked

    @property
    def num_students(self) -> int:
        return len(self.microbatches)

    @property
    def all_are_doomed(self) -> bool:
        return len(self.doomed) == len(self.replicas)

    @property
    def quiet_s(self) -> float:
        """When the last fault has passed and every replica has started."""
        ends = [fault.at_s + fault.for_s for fault in self.faults] + [plan.starts_s for plan in self.replicas]
        if self.revival_s < FOREVER_S:
            ends.append(self.revival_s)
        return max(ends)

    @property
    def busy_s(self) -> float:
        """About how long all work takes without faults."""
        batches = [batch for batches in self.microbatches for batch in batches]
        tokens_s = sum(batch.num_tokens for batch in batches) * max(plan.seconds_per_token for plan in self.replicas)
        steps_s = max(len(batches) for batches in self.microbatches) * self.step_s
        return max(steps_s, (tokens_s + len(batches) * self.copy_s) / len(self.replicas))

    @property
    def patience_s(self) -> float:
        """How long all work may take once it is quiet: what it takes on the slowest replica alone, and then some."""
        tokens = sum(batch.num_tokens for batches in self.microbatches for batch in batches)
        slowest_s = max(plan.seconds_per_token for plan in self.replicas)
        steps = max(len(batches) for batches in self.microbatches)
        work_s = 2 * tokens * slowest_s + 4 * steps * (self.step_s + self.copy_s)
        # A replica that fails for ever is tried with a new request now and then, and may cost it its deadline; where no
        # other slot is free also the time until it is dropped, when nobody can write that slot any more. The pauses
        # grow to twenty deadlines, so that six tries take what the work above may, and each further one its share.
        tries_s = 2 * 6 * len(self.doomed) * self.request_timeout_s + work_s / 10 if self.doomed else 0.0
        return work_s + tries_s + 12 * self.request_timeout_s + 40.0


def scenario(seed: int) -> Scenario:
    """The scenario of a seed. In a third of them some or all replicas are doomed; half of them are of a hard kind."""
    rng = Random(f"scenario {seed}")
    what = _any_scenario(seed, rng)
    kinds = {
        1: _unreliable_arrivals,
        3: _stopped_with_few_spares,
        5: _refusals_again,
        7: _one_honest_replica,
        8: _one_that_does_not_break,
        9: _slow_writes,
    }
    hard = kinds.get(seed % 10)
    what = dataclasses.replace(what, faults=_faults(what, rng))
    return what if hard is None else hard(what, rng)


def _any_scenario(seed: int, rng: Random) -> Scenario:
    num_students, num_replicas = rng.choice((1, 1, 2, 3)), rng.choice((1, 2, 2, 3, 4))
    style = rng.choice((*Style, None))  # None: each replica its own
    crc = rng.random() < 0.6
    replicas = tuple(_replica(rng, i, style or rng.choice(tuple(Style)), crc) for i in range(num_replicas))
    microbatches = tuple(_microbatches(rng, rng.randint(30, 150)) for _ in range(num_students))
    doomed: tuple[int, ...] = ()
    if rng.random() < 1 / 3:
        num_doomed = rng.choice((num_replicas, rng.randint(1, num_replicas)))
        doomed = tuple(sorted(rng.sample(range(num_replicas), num_doomed)))
    whole_doom = len(doomed) == num_replicas
    doom_s = rng.uniform(2.0, 20.0) if doomed else FOREVER_S
    # Longer than any fault that is not doom, but where the end is to come soon.
    teacher_timeout_s = rng.uniform(15.0, 40.0) if whole_doom else rng.uniform(150.0, 300.0)
    revives = whole_doom and rng.random() < 0.5
    depth, max_batch_tokens = rng.choice((1, 2, 3, 4, 6)), rng.choice((40, 80, 160))
    copy_s, max_delay_s = rng.choice((0.001, 0.05, 0.3)), rng.choice((0.002, 0.02, 0.2))
    burst_s = _burst_s(replicas, num_askers=num_students, depth=depth, copy_s=copy_s, max_delay_s=max_delay_s)
    return Scenario(
        seed=seed,
        microbatches=microbatches,
        num_head_pieces=rng.choice((0, 0, 3)),
        replicas=replicas,
        depth=depth,
        num_spares=rng.choice((0, 1, 2, 2, 3)),
        max_pending=rng.choice((1, 2, 4)),
        request_timeout_s=burst_s * rng.uniform(1.0, 2.0) if rng.random() < 0.5 else rng.uniform(3.0, 10.0) + burst_s,
        peer_timeout_s=rng.uniform(2.0, 6.0),
        teacher_timeout_s=teacher_timeout_s,
        student_timeout_s=rng.uniform(6.0, 20.0),
        step_s=rng.choice((0.05, 0.2, 0.5)),
        late_release=rng.random() < 0.3,
        steps_a_checkpoint=rng.choice((1, 4, 7)),
        max_batch_tokens=max_batch_tokens,
        one_request_a_pass=rng.random() < 0.3,
        max_delay_s=max_delay_s,
        copy_s=copy_s,
        encodes=seed % 4 == 0,
        faults=(),
        doom=_doom(rng, replicas) if doomed else None,
        doomed=doomed,
        doom_s=doom_s,
        revival_s=doom_s + teacher_timeout_s + 60.0 if revives else FOREVER_S,
    )


def _burst_s(
    replicas: Sequence[ReplicaPlan], *, num_askers: int, depth: int, copy_s: float, max_delay_s: float
) -> float:
    """What one replica needs for all that the students can have asked it, and for one answer more."""
    answer_s = MAX_TOKENS * max(plan.seconds_per_token for plan in replicas) + 1.5 * copy_s + 0.02
    return (depth * num_askers + 1) * answer_s + 8 * max_delay_s


def _within_deadlines(what: Scenario) -> Scenario:
    """Its replicas may be slower than those that the deadline was made for."""
    burst_s = _burst_s(
        what.replicas,
        num_askers=what.num_students,
        depth=what.depth,
        copy_s=what.copy_s,
        max_delay_s=what.max_delay_s,
    )
    return dataclasses.replace(what, request_timeout_s=max(what.request_timeout_s, burst_s))


def _stopped_with_few_spares(what: Scenario, rng: Random) -> Scenario:
    """Replicas that stop while they may write shared memory: all slots may end in quarantine."""
    num_replicas = rng.randint(2, 3)
    stopped = _doomed_for_good(
        what,
        FaultKind.STOP_REPLICA,
        num_doomed=num_replicas - 1,
        replicas=tuple(_replica(rng, i, Style.SHM, False) for i in range(num_replicas)),
        num_spares=rng.choice((0, 0, 1)),
    )
    return _within_deadlines(stopped)


def _one_honest_replica(what: Scenario, rng: Random) -> Scenario:
    """All others lie for ever, connect again at once, and come first by name."""
    num_replicas = rng.randint(3, 4)
    plans = [_replica(rng, i, rng.choice(tuple(Style)), True) for i in range(num_replicas)]
    return _doomed_for_good(
        what,
        FaultKind.LYING_REPLICA,
        num_doomed=num_replicas - 1,
        # Slow enough for the one that lied before to be back in time for the next attempt.
        replicas=tuple(dataclasses.replace(plan, starts_s=0.0, seconds_per_token=0.03) for plan in plans),
        request_timeout_s=10.0,
        depth=rng.choice((1, 1, 2)),
        doom_s=0.0,
    )


def _one_that_does_not_break(what: Scenario, rng: Random) -> Scenario:
    """The connections of all others end some time after they were asked, for ever, and are back at once."""
    num_replicas = rng.randint(2, 4)
    plans = [_replica(rng, i, rng.choice((Style.TCP, Style.RDMA)), True) for i in range(num_replicas)]
    breaking = _doomed_for_good(
        what,
        FaultKind.BREAKING_REPLICA,
        num_doomed=num_replicas - 1,
        replicas=tuple(dataclasses.replace(plan, starts_s=0.0) for plan in plans),
        doom_s=0.0,
        depth=rng.choice((1, 1, 2)),
    )
    breaking = _within_deadlines(breaking)
    late_s = rng.uniform(0.7, 0.9) * breaking.request_timeout_s
    return dataclasses.replace(breaking, breaks_after_s=rng.choice((0.0, 0.05, late_s, late_s)))


def _doomed_for_good(what: Scenario, doom: FaultKind, *, num_doomed: int, **changes: Any) -> Scenario:
    return dataclasses.replace(
        what,
        faults=(),
        doom=doom,
        doomed=tuple(range(num_doomed)),
        revival_s=FOREVER_S,
        teacher_timeout_s=200.0,
        **({"doom_s": min(what.doom_s, 5.0)} | changes),
    )


def _refusals_again(what: Scenario, rng: Random) -> Scenario:
    """One replica over shared memory, whose passes fail at times, and whose refusals come again and late."""
    replica = ReplicaPlan(starts_s=0.0, seconds_per_token=0.012, style=Style.SHM, crc=False)
    end_s = dataclasses.replace(what, replicas=(replica,)).busy_s

    def fault(kind: FaultKind, for_s: float) -> Fault:
        student = rng.randrange(what.num_students)
        return Fault(at_s=rng.uniform(0.0, end_s), kind=kind, replica=0, student=student, for_s=for_s)

    faults = [fault(FaultKind.FAILING_REPLICA, rng.uniform(0.1, 2.0)) for _ in range(30)]
    faults += [fault(FaultKind.FLAKY_LINK, rng.uniform(5.0, 20.0)) for _ in range(6)]
    refusing = dataclasses.replace(
        what,
        replicas=(replica,),
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        doom=None,
        doomed=(),
        doom_s=FOREVER_S,
        revival_s=FOREVER_S,
        teacher_timeout_s=300.0,
        max_delay_s=0.1,
    )
    return _within_deadlines(refusing)


def _slow_writes(what: Scenario, rng: Random) -> Scenario:
    """Shared memory, and deadlines that pass while it is written: given up in the middle, and written to the end."""
    replicas = tuple(_replica(rng, i, Style.SHM, True) for i in range(2))
    faults = tuple(dataclasses.replace(fault, replica=fault.replica % 2) for fault in what.faults)
    return dataclasses.replace(
        what,
        replicas=tuple(dataclasses.replace(plan, seconds_per_token=0.004) for plan in replicas),
        faults=faults,
        doom=None,
        doomed=(),
        doom_s=FOREVER_S,
        revival_s=FOREVER_S,
        teacher_timeout_s=300.0,
        depth=rng.choice((3, 4)),
        copy_s=0.5,
        request_timeout_s=rng.uniform(1.2, 2.0) * what.num_students,
        max_delay_s=0.02,
    )


def _unreliable_arrivals(what: Scenario, rng: Random) -> Scenario:
    """A transport that breaks its word all the time, besides whatever else happens."""
    faults = [
        Fault(
            at_s=rng.uniform(0.0, 2.0),
            kind=FaultKind.UNRELIABLE_ARRIVALS,
            replica=replica,
            student=student,
            for_s=what.busy_s + 10.0,
        )
        for replica in range(len(what.replicas))
        for student in range(what.num_students)
    ]
    return dataclasses.replace(what, faults=tuple(sorted((*what.faults, *faults), key=lambda fault: fault.at_s)))


def _doom(rng: Random, replicas: tuple[ReplicaPlan, ...]) -> FaultKind:
    """Nothing cuts the link to a replica on the same host."""
    cuts = (FaultKind.CUT_LINK, FaultKind.CUT_TO_STUDENT, FaultKind.CUT_TO_REPLICA)
    on_this_host = any(plan.style is Style.SHM for plan in replicas)
    return rng.choice([kind for kind in DOOMS if not (on_this_host and kind in cuts)])


def _microbatches(rng: Random, num: int) -> tuple[Microbatch, ...]:
    batches = []
    for _ in range(num):
        num_tokens = rng.randint(4, MAX_TOKENS)
        num_rows = 0 if rng.random() < 0.08 else rng.randint(1, min(num_tokens, 24))
        batches.append(Microbatch(num_tokens=num_tokens, num_rows=num_rows))
    return tuple(batches)


def _replica(rng: Random, number: int, style: Style, crc: bool) -> ReplicaPlan:
    return ReplicaPlan(
        starts_s=0.0 if number == 0 or rng.random() < 0.7 else rng.uniform(0.0, 20.0),
        seconds_per_token=rng.choice((0.001, 0.004, 0.012)),
        style=style,
        crc=crc,
    )


def _faults(what: Scenario, rng: Random) -> tuple[Fault, ...]:
    """Of some kinds, while there is work; each makes it longer."""
    kinds = rng.sample(ANYWHERE, rng.randint(1, len(ANYWHERE)))
    num_faults = rng.choice((0, 3, 8, 16, 30))
    end_s = min(what.doom_s, what.busy_s + num_faults)
    faults = [
        Fault(
            at_s=rng.uniform(0.0, end_s),
            kind=rng.choice(kinds),
            replica=rng.randrange(len(what.replicas)),
            student=rng.randrange(what.num_students),
            for_s=rng.choice((rng.uniform(0.01, 1.0), rng.uniform(1.0, 10.0), rng.uniform(5.0, 30.0))),
        )
        for _ in range(num_faults)
    ]
    return tuple(sorted(faults, key=lambda fault: fault.at_s))
