"""The student's machine: slots, requests, replicas and leases as one sans-IO state machine.

Events and `now_s` in, actions out; no clock, lock, socket, tensor or randomness. A call that is illegal in the present
state raises LocalProtocolError and changes nothing; what a replica does wrong is counted, dropped and answered with
actions. docs/ring-protocol.md tells the whole protocol.
"""

from __future__ import annotations

import math
from types import MappingProxyType

from ring.core.acceptance import difference
from ring.core.actions import Action, Deliverable, Disarm, Fatal, Lease, Lost, Note
from ring.core.attempts import Attempts
from ring.core.config import Expectation, RingConfig
from ring.core.deadlines import UnservedClock
from ring.core.errors import LocalProtocolError
from ring.core.messages import FillHeader, FillId, Payload, RefusalCode
from ring.core.replicas import Replica, ReplicaEvent, ReplicaState
from ring.core.requests import Entry
from ring.core.slots import SlotEvent, SlotState
from ring.core.stats import DropCause, RetryCause, RingStats

__all__ = ["MAX_CRC_ERRORS_IN_A_ROW", "Expectation", "StudentMachine"]

#: A replica whose fills fail their CRC that often in a row is dropped: its path is broken, not unlucky.
MAX_CRC_ERRORS_IN_A_ROW = 3


class StudentMachine:
    """The ring of one trainer rank.

    The shell reports what happens (`replica_up`, `arrived`, `fenced` ...), carries out the returned actions in order,
    and calls `on_timer` when `next_deadline_s` has come. `submit`, `next_lease`, `release` are the trainer's side.
    """

    def __init__(self, config: RingConfig, *, epoch: str, fingerprint: str | None = None, now_s: float) -> None:
        """epoch: this life of the student; fills for another are dropped. fingerprint: the teacher's; None = that of
        the first replica."""
        self._config = config
        self._epoch = epoch
        self._fingerprint = fingerprint
        self._now_s = now_s
        self._attempts = Attempts(config)
        self._slots = self._attempts.slots
        self._requests = self._attempts.requests
        self._fleet = self._attempts.fleet
        self._unserved = UnservedClock(config.teacher_timeout_s, look_interval_s=config.ping_interval_s)
        self._unserved.set_running(True, now_s)
        self._ended: str | None = None
        self._submitted = 0
        self._fills = 0
        self._released = 0
        self._bytes_received = 0
        self._drops = dict.fromkeys(DropCause, 0)
        self._teacher_stall_s = 0.0
        self._teacher_forward_s = 0.0
        self._teacher_queue_s = 0.0

    # ---- the trainer's side --------------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """Lost, or ended by a Fatal: nothing is asked any more."""
        return self._ended is not None

    @property
    def can_submit(self) -> int:
        """How many more requests `submit` accepts now."""
        return 0 if self._ended else self._config.pending_limit - self._requests.num_pending

    def submit(self, seq: int, payload: Payload, expect: Expectation, *, now_s: float) -> list[Action]:
        """Ask for a fill; it comes back as the lease of `seq`, in the order of submission.

        Raises LocalProtocolError: seq does not ascend, `can_submit` is 0, or the run has ended; nothing changed."""
        now_s = self._time(now_s)
        last = self._requests.last_seq
        if self._ended:
            raise LocalProtocolError(f"seq {seq} was submitted after the end of the run: {self._ended}")
        if last is not None and seq <= last:
            raise LocalProtocolError(f"seq {seq} was submitted after seq {last}; allowed: ascending numbers")
        if self.can_submit < 1:
            raise LocalProtocolError(
                f"seq {seq} was submitted while {self._requests.num_pending} requests are pending; "
                f"allowed: {self._config.pending_limit}"
            )
        self._at(now_s)
        self._requests.submit(Entry(seq=seq, payload=payload, expect=expect))
        self._submitted += 1
        return self._settle([])

    def next_lease(self, *, now_s: float) -> Lease | None:
        """The lease of the next seq in order, if it is filled. Several leases may be held at a time."""
        self._at(self._time(now_s))
        entry = self._requests.lease()
        if entry is None:
            return None
        assert entry.fill is not None
        assert entry.header is not None
        self._slots.move(entry.fill.slot, SlotEvent.LEASE)
        return Lease(seq=entry.seq, slot=entry.fill.slot, fill=entry.fill, replica=entry.replica, header=entry.header)

    def release(self, seq: int, *, now_s: float) -> list[Action]:
        """Give the slot of a lease back; it carries the next request.

        Raises LocalProtocolError: `seq` is not leased; nothing changed."""
        now_s = self._time(now_s)
        entry = self._requests.leased(seq)
        self._at(now_s)
        assert entry.fill is not None
        self._slots.move(entry.fill.slot, SlotEvent.RELEASE)
        self._requests.release(entry)
        self._released += 1
        return self._settle([])

    # ---- replicas ------------------------------------------------------------------------------------------------

    def replica_up(self, replica: str, *, epoch: str, fingerprint: str, now_s: float) -> list[Action]:
        """A replica finished its handshake, for the first time or again.

        Raises LocalProtocolError: another fingerprint than the run's, or it is up already; nothing changed."""
        now_s = self._time(now_s)
        if self._fingerprint is not None and fingerprint != self._fingerprint:
            raise LocalProtocolError(
                f"replica {replica} has fingerprint {fingerprint}; allowed: the run's, {self._fingerprint}"
            )
        known = self._fleet.get(replica)
        if known is not None and known.connected:
            raise LocalProtocolError(f"replica {replica} came up while {known.state.value}; report replica_down first")
        self._at(now_s)
        self._fingerprint = fingerprint
        joined = self._fleet.add(replica)
        self._fleet.join(joined, epoch)
        self._requests.forget_refusals(replica)
        self._attempts.pings.start(replica, now_s)
        self._attempts.silences.start(replica, now_s)
        return self._settle([])

    def replica_down(self, replica: str, *, error: str, now_s: float) -> list[Action]:
        """A replica is gone, or could not be reached. Its fills are given up. Idempotent."""
        self._at(self._time(now_s))
        gone = self._fleet.add(replica)
        gone.last_error = error
        actions: list[Action] = []
        if gone.connected:
            self._attempts.lose(gone, self._now_s, actions)
        return self._settle(actions)

    def leaving(self, replica: str, *, now_s: float) -> None:
        """Its session is about to end: what it has sent already still counts, and nothing more is asked of it."""
        self._at(self._time(now_s))
        known = self._fleet.get(replica)
        if known is None or not known.connected:
            return
        known.leaving = True
        if known.state is ReplicaState.UP:
            self._fleet.move(known, ReplicaEvent.DRAIN)

    def heard(self, replica: str, *, now_s: float) -> None:
        """Any message came from the replica: it is not silent."""
        self._at(self._time(now_s))
        self._hear(replica)

    # ---- answers -------------------------------------------------------------------------------------------------

    def arrived(
        self, replica: str, fill: FillId, num_bytes: int, header: FillHeader, crc: int | None, *, now_s: float
    ) -> list[Action]:
        """A fill is whole in its slot. crc: what the shell computed over the slot; None where checking is off."""
        self._at(self._time(now_s))
        self._hear(replica)
        actions: list[Action] = []
        asked = self._asked(replica, fill, actions)
        if asked is None:
            return self._settle(actions)
        entry, sender = asked
        assert sender.epoch is not None  # it is connected: a replica that is down has nothing in flight
        assert self._fingerprint is not None
        wrong = difference(
            header,
            fill=fill,
            num_bytes=num_bytes,
            crc=crc,
            expect=entry.expect,
            student_epoch=self._epoch,
            teacher_epoch=sender.epoch,
            fingerprint=self._fingerprint,
        )
        if wrong is None:
            self._accept(entry, sender, header, actions)
        else:
            self._reject(entry, sender, wrong[0], f"{fill}: {wrong[1]}", actions)
        return self._settle(actions)

    def garbled(self, replica: str, fill: FillId, error: str, *, now_s: float) -> list[Action]:
        """A fill is whole in its slot, and its header can't be read: as wrong as any answer (R3)."""
        self._at(self._time(now_s))
        self._hear(replica)
        actions: list[Action] = []
        asked = self._asked(replica, fill, actions)
        if asked is not None:
            self._reject(*asked, DropCause.WRONG_HEADER, f"{fill}: {error}", actions)
        return self._settle(actions)

    def came_late(self, replica: str, count: int, *, now_s: float) -> list[Action]:
        """The transport dropped so many payloads that came whole and that nobody waited for any more. Which they were,
        and that their slots are free, is for the data plane to say: `fenced`."""
        self._at(self._time(now_s))
        self._hear(replica)
        actions: list[Action] = []
        sender = self._fleet.get(replica)
        self._count_drop(sender, DropCause.LATE, "it came after it was given up", actions, count=count)
        if sender is not None and sender.state is ReplicaState.STALLED:
            self._attempts.revive(sender)
        return self._settle(actions)

    def refused(self, replica: str, fill: FillId, code: RefusalCode, message: str, *, now_s: float) -> list[Action]:
        """The replica won't fill this attempt. That nothing of it can land is for the data plane to say: `fenced`."""
        self._at(self._time(now_s))
        self._hear(replica)
        actions: list[Action] = []
        entry, sender = self._requests.in_flight(fill), self._fleet.get(replica)
        if entry is None or sender is None or entry.replica != replica:
            if not self._attempts.is_last_word(replica, fill):
                self._count_drop(sender, DropCause.NOT_ASKED, f"it refused {fill}, not asked for", actions)
            elif fill in self._attempts.quarantined:
                actions.append(Disarm(replica, fill, refused=True))
            return self._settle(actions)
        sender.last_error = f"refused seq {fill.seq} ({code.value}): {message}"
        self._attempts.give_up(entry, RetryCause.REFUSED, actions)
        entry.refused_by.add(replica)
        if code is RefusalCode.INVALID:
            entry.unservable_by.add(replica)
            # One replica's limits may be lower than another's; while one is left that has not said so, it is asked.
            if all(other.name in entry.unservable_by for other in self._fleet if other.connected):
                self._ended = f"replica {replica} can't serve seq {fill.seq}: {message}"
                return [*self._settle(actions), Fatal(self._ended)]
        self._fleet.failed(sender, spent_s=self._now_s - entry.sent_s, now_s=self._now_s)
        if code is RefusalCode.DRAINING and sender.state is not ReplicaState.DRAINING:
            self._fleet.move(sender, ReplicaEvent.DRAIN)
        return self._settle(actions)

    def fenced(self, fill: FillId, *, now_s: float) -> list[Action]:
        """Nothing of a given-up fill can land any more. Idempotent; unknown fills change nothing."""
        self._at(self._time(now_s))
        return self._settle([]) if self._attempts.fence(fill) else []

    # ---- time ----------------------------------------------------------------------------------------------------

    def next_deadline_s(self) -> float | None:
        """When `on_timer` has something to do if nothing happens before; None: never."""
        if self._ended:
            return None
        ends = [self._attempts.first_deadline_s(), self._unserved.deadline_s(), self._unserved.look_s()]
        ends += [entry.retry_at_s for entry in self._requests.waiting()]
        return min((end_s for end_s in ends if end_s is not None), default=None)

    def on_timer(self, *, now_s: float) -> list[Action]:
        """Do what is due at `now_s`; each deadline is due at exactly its time."""
        now_s = self._at(self._time(now_s))
        actions: list[Action] = []
        if self._ended:
            return actions
        self._unserved.looked(now_s)
        self._attempts.on_timer(now_s, actions)
        self._settle(actions)
        deadline_s = self._unserved.deadline_s()
        if deadline_s is not None and now_s >= deadline_s:
            actions.append(self._lose())
        return actions

    def stats(self, *, now_s: float) -> RingStats:
        """A frozen snapshot (R9)."""
        count = self._slots.count
        return RingStats(
            num_free=count(SlotState.FREE),
            num_in_flight=count(SlotState.REQUESTED),
            num_filled=count(SlotState.FILLED),
            num_leased=count(SlotState.LEASED),
            num_quarantined=count(SlotState.QUARANTINED),
            occupancy_frac=(count(SlotState.FILLED) + count(SlotState.LEASED)) / self._config.depth,
            pending=self._requests.num_pending,
            waiting=self._requests.num_waiting,
            submitted=self._submitted,
            fills=self._fills,
            released=self._released,
            bytes_received=self._bytes_received,
            retries=sum(self._attempts.retries.values()),
            retries_by_cause=MappingProxyType(dict(self._attempts.retries)),
            drops=sum(self._drops.values()),
            drops_by_cause=MappingProxyType(dict(self._drops)),
            teacher_stall_s=self._teacher_stall_s,
            teacher_forward_s=self._teacher_forward_s,
            teacher_queue_s=self._teacher_queue_s,
            unserved_s=self._unserved.unserved_s(self._time(now_s)),
            replicas=tuple(replica.stats() for replica in self._fleet),
        )

    # ---- within --------------------------------------------------------------------------------------------------

    def _time(self, now_s: float) -> float:
        """Time as this machine sees it: never backwards, so that deadlines keep their order.

        Raises LocalProtocolError: not a time."""
        if not math.isfinite(now_s):
            raise LocalProtocolError(f"now_s is {now_s}; allowed: a finite number of seconds")
        return max(now_s, self._now_s)

    def _at(self, now_s: float) -> float:
        """Something happens now. First of all: time in which this side did not look (it was stopped, or its machine
        suspended) is held against nobody, before anything that is heard or asked now gets a deadline of its own."""
        self._now_s = now_s
        self._attempts.excuse(now_s)
        self._unserved.excuse(now_s, tolerance_s=self._config.peer_timeout_s / 2)
        return now_s

    def _hear(self, name: str) -> None:
        replica = self._fleet.get(name)
        if replica is not None and replica.connected:
            self._attempts.silences.start(name, self._now_s)

    def _asked(self, replica: str, fill: FillId, actions: list[Action]) -> tuple[Entry, Replica] | None:
        """Who waits for this fill, and who was asked for it. None: nobody waits for it any more; it is counted."""
        entry, sender = self._requests.in_flight(fill), self._fleet.get(replica)
        if entry is not None and sender is not None and entry.replica == replica:
            return entry, sender
        if self._attempts.is_last_word(replica, fill):
            self._attempts.fence(fill)
            self._count_drop(sender, DropCause.LATE, f"{fill} came after it was given up", actions)
        else:
            self._count_drop(sender, DropCause.NOT_ASKED, f"{fill} was not asked for", actions)
        return None

    def _accept(self, entry: Entry, sender: Replica, header: FillHeader, actions: list[Action]) -> None:
        self._attempts.complete(entry, sender, header, self._now_s)
        self._unserved.reset()
        self._fills += 1
        self._bytes_received += header.num_bytes
        self._teacher_stall_s += header.idle_s
        self._teacher_forward_s += header.forward_s
        self._teacher_queue_s += header.queue_s
        if self._requests.next_undelivered() is entry:
            actions.append(Deliverable(entry.seq))

    def _reject(self, entry: Entry, sender: Replica, cause: DropCause, text: str, actions: list[Action]) -> None:
        """A wrong answer (R3) costs the replica its connection; a corrupt one is only asked for again, twice."""
        self._count_drop(sender, cause, text, actions)
        sender.last_error = text
        self._fleet.failed(sender, spent_s=self._now_s - entry.sent_s, now_s=self._now_s)
        if cause is DropCause.WRONG_CRC:
            self._attempts.give_up(entry, RetryCause.CORRUPT, actions)
            sender.crc_errors_in_a_row += 1
            if sender.crc_errors_in_a_row < MAX_CRC_ERRORS_IN_A_ROW:
                return
            text = f"{sender.crc_errors_in_a_row} corrupt fills in a row: {text}"
        else:
            self._attempts.give_up(entry, RetryCause.WRONG, actions)
        self._attempts.drop(sender, text, actions)

    def _count_drop(
        self, sender: Replica | None, cause: DropCause, text: str, actions: list[Action], *, count: int = 1
    ) -> None:
        self._drops[cause] += count
        if sender is not None and cause not in sender.noted:
            sender.noted.add(cause)
            actions.append(Note("warning", f"{sender.name}: dropped an answer ({cause.value}, logged once): {text}"))

    def _settle(self, actions: list[Action]) -> list[Action]:
        """What follows from any event: stalled replicas are connected afresh when no other is left, what can be asked
        for is asked for, and the clock runs while nobody serves. Extends and returns `actions`."""
        if self._ended:
            return actions
        if not self._fleet.num_usable:
            for stalled in self._fleet.stalled():
                self._attempts.drop(stalled, f"stalled: {stalled.last_error}", actions)
        self._attempts.dispatch(self._now_s, actions)
        # Before the first replica the trainer can't submit anything, yet it waits.
        work_waits = self._requests.num_unfilled > 0 or not self._fleet.ever_joined
        served = self._fleet.num_serving > 0 and not self._is_out_of_slots()
        self._unserved.set_running(work_waits and not served, self._now_s)
        return actions

    def _is_out_of_slots(self) -> bool:
        """Only a fence can help: whatever replicas are there, nothing can be asked of them, and the trainer has nothing
        whose release would free a slot."""
        count, undelivered = self._slots.count, self._requests.next_undelivered()
        return (
            count(SlotState.QUARANTINED) > 0
            and not count(SlotState.FREE)
            and not count(SlotState.REQUESTED)
            and not count(SlotState.LEASED)
            and not (undelivered is not None and undelivered.is_filled)
        )

    def _lose(self) -> Lost:
        seq = self._requests.first_unfilled()
        waits = "nothing was submitted yet" if seq is None else f"{self._requests.num_unfilled} wait from seq {seq} on"
        if self._is_out_of_slots():
            num_quarantined, late = len(self._attempts.quarantined), sorted({*self._attempts.quarantined.values()})
            waits += f"; {num_quarantined} of {self._config.num_slots} slots may still be written by {', '.join(late)}"
        replicas = "; ".join(replica.describe() for replica in self._fleet) or "no replica was ever reached"
        self._ended = f"no replica has served this run for {self._config.teacher_timeout_s:g} s ({waits}): {replicas}"
        return Lost(self._ended)
