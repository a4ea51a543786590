"""What must hold after every event, whatever happens. Each check says which promise of the design it stands for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from itertools import combinations
from typing import TYPE_CHECKING

from ring.core.messages import FillId
from ring.core.requests import RequestState
from ring.core.slots import SlotState
from ring.core.stats import RetryCause, RingStats
from ring.core.teacher import Batch, TeacherMachine
from tests.simulation.clock import Violation

if TYPE_CHECKING:
    from tests.simulation.replica_life import ReplicaLife
    from tests.simulation.student_life import StudentLife


def require(holds: bool, who: str, what: str, *found: object) -> None:
    if not holds:
        raise Violation(f"{who}: {what}{': ' if found else ''}{', '.join(map(repr, found))}")


class Checks:
    """Of all lives. `num` counts how often one was looked at."""

    def __init__(self, met: Counter[str]) -> None:
        self.num = 0
        self._met = met

    def write(self, life: StudentLife, fill: FillId) -> None:
        """R4: a byte may land in a slot only for the fill that was asked into it, or that it is quarantined for."""
        attempts = life.machine._attempts
        state = attempts.slots.state(fill.slot)
        # By the entry's own fill: what the machine finds by a fill is what is under test.
        entry = attempts.requests.in_flight(fill)
        asked = state is SlotState.REQUESTED and entry is not None and entry.fill == fill
        fenced_off = state is SlotState.QUARANTINED and fill in attempts.quarantined
        require(asked or fenced_off, life.name, f"{fill} is written into a slot that is {state.value} for another")
        self._met["a given-up fill was written"] += fenced_off

    def student(self, life: StudentLife) -> None:
        self.num += 1
        stats = life.machine.stats(now_s=life.clock.now_s)
        self._slots(life, stats)
        self._counts(life, stats)
        self._data_plane(life)
        if life.trainer.waits and life.ended is None:
            first = life.machine._requests.next_undelivered()
            filled = first is not None and first.state is RequestState.FILLED
            require(not filled, life.name, "the trainer sleeps, and nobody told it that its fill is there")
        if stats.fills > life.num_accepted:
            life.num_accepted, life.last_accepted_s = stats.fills, life.clock.now_s

    def _slots(self, life: StudentLife, stats: RingStats) -> None:
        """R1, R2: slots are conserved, and a request holds at most one; nothing queues beyond what was agreed."""
        by_state = (stats.num_free, stats.num_in_flight, stats.num_filled, stats.num_leased, stats.num_quarantined)
        require(sum(by_state) == life.config.num_slots, life.name, "slots are not conserved", by_state)
        live = stats.num_in_flight + stats.num_filled + stats.num_leased + stats.waiting
        require(live <= life.config.depth, life.name, "more requests hold a place than the ring is deep", by_state)
        require(stats.num_leased == len(life.trainer.held), life.name, "leases differ", by_state)
        require(stats.pending <= life.config.pending_limit, life.name, "too many pend", stats.pending)
        deadline_s = life.machine.next_deadline_s()
        in_time = stats.unserved_s <= life.config.teacher_timeout_s + 1e-6
        overslept = deadline_s is not None and deadline_s <= life.clock.now_s
        require(in_time or overslept or life.ended is not None, life.name, "unserved", stats.unserved_s)

    def _counts(self, life: StudentLife, stats: RingStats) -> None:
        """R9: what is counted adds up, within the snapshot and against what the shell did."""
        who, counts = life.name, life.counts
        held = stats.num_filled + stats.num_leased
        require(stats.fills == stats.released + held, who, "fills don't add up", stats.fills, stats.released, held)
        open_requests = held + stats.num_in_flight + stats.waiting + stats.pending
        require(stats.submitted == stats.released + open_requests, who, "requests don't add up", stats)
        require(stats.submitted == counts.submitted, who, "submitted", stats.submitted, counts.submitted)
        require(stats.released == counts.released, who, "released", stats.released, counts.released)
        attempts = stats.fills + stats.retries + stats.num_in_flight
        require(attempts == counts.sends, who, "attempts don't add up", attempts, counts.sends)
        came = counts.arrivals + counts.late
        require(came <= stats.fills + stats.drops <= came + counts.refusals, who, "drops don't add up", stats, counts)
        refused = stats.retries_by_cause[RetryCause.REFUSED]
        require(refused <= counts.refusals, who, "more refusals than came", refused, counts.refusals)
        replicas = stats.replicas
        require(sum(r.fills for r in replicas) == stats.fills, who, "fills by replica", stats)
        require(sum(r.retries for r in replicas) == stats.retries, who, "retries by replica", stats)
        require(sum(r.in_flight for r in replicas) == stats.num_in_flight, who, "in flight by replica", stats)
        require(sum(r.bytes_received for r in replicas) == stats.bytes_received, who, "bytes by replica", stats)
        require(sum(stats.retries_by_cause.values()) == stats.retries, who, "retries by cause", stats)
        up = {r.name for r in replicas if r.state != "down"}
        ready = {name for name, session in life.sessions.items() if session.is_up}
        require(up == ready, who, "replicas and sessions differ", up, ready)

    def _data_plane(self, life: StudentLife) -> None:
        """R4: armed is what is asked for; what may still land is quarantined; each quarantine has an end in sight."""
        attempts = life.machine._attempts
        receivers = life.receivers()
        for receiver in receivers:
            for fill, _ in receiver.armed.values():
                require(attempts.requests.in_flight(fill) is not None, life.name, f"{fill} is armed, not in flight")
            for fill in receiver.pending:
                require(fill in attempts.quarantined, life.name, f"{fill} may land, its slot is not quarantined")
        for fill in attempts.quarantined:
            ends = any(receiver.will_be_fenced(fill) for receiver in receivers)
            require(ends, life.name, f"{fill} is quarantined, and nothing will ever fence it")
        require(len(attempts.deadlines) == attempts.requests.num_in_flight, life.name, "a deadline without attempt")

    def replica(self, life: ReplicaLife) -> None:
        """R2 and R9 at the teacher: what is held is counted, and bounded by the slots that were offered."""
        self.num += 1
        machine, who = life.machine, life.name
        stats = machine.stats(now_s=life.clock.now_s)
        students = machine._students.values()
        require(set(machine._students) <= set(life.guests), who, "a student without connection", machine._students)
        queued = sum(len(student.queue) for student in students)
        sending = sum(student.num_sending for student in students)
        require(stats.queued == queued, who, "queued", stats.queued, queued)
        require(stats.sending == sending, who, "sending", stats.sending, sending)
        for student in students:
            bounded = student.num_unsent <= student.num_slots and len(student.jobs) <= 2 * student.num_slots
            require(bounded, who, f"{student.name} has more jobs than its slots allow", len(student.jobs))
            require(len(student.last_fills) <= student.num_slots, who, "memory of fills", len(student.last_fills))
        require(stats.sent + sending + queued <= stats.received, who, "requests don't add up", stats)
        life.fairness.between()


class Fairness:
    """Students that always wait for the same replica are served alike: over any time, the tokens of two of them differ
    by no more than what a request of each and one batch can make up."""

    def __init__(self, machine: TeacherMachine, *, max_batch_tokens: int) -> None:
        self._machine = machine
        self._max_batch_tokens = max_batch_tokens
        self._served: dict[str, int] = {}
        self._costs: dict[str, int] = {}
        self._since: dict[tuple[str, str], int] = {}  # served of one less that of the other when both began to wait

    def between(self) -> None:
        """After any event: forget those with nothing to do."""
        waiting = {name for name, student in self._machine._students.items() if student.queue}
        self._forget_all_but(waiting)

    def before(self, avoid: Collection[str]) -> None:
        """A batch is about to be taken; those that don't read what they have are none of it."""
        waiting = {name for name, student in self._machine._students.items() if student.queue and name not in avoid}
        self._forget_all_but(waiting)
        for one, other in combinations(sorted(waiting), 2):
            self._since.setdefault((one, other), self._served.get(one, 0) - self._served.get(other, 0))

    def after(self, batch: Batch) -> None:
        for work in batch.work:
            student = self._machine._students[work.student]
            cost = student.jobs[work.request.fill].cost_tokens
            self._served[work.student] = self._served.get(work.student, 0) + cost
            self._costs[work.student] = max(self._costs.get(work.student, 0), cost)
        self.between()
        for (one, other), before in self._since.items():
            difference = self._served.get(one, 0) - self._served.get(other, 0) - before
            allowed = self._costs.get(one, 0) + self._costs.get(other, 0) + self._max_batch_tokens
            require(abs(difference) <= allowed, "fairness", f"{one} and {other} wait alike; tokens apart", difference)

    def _forget_all_but(self, waiting: Collection[str]) -> None:
        if self._since:
            self._since = {pair: n for pair, n in self._since.items() if pair[0] in waiting and pair[1] in waiting}
