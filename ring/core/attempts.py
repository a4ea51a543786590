"""Attempts: which request is asked of which replica into which slot, and what is left when an attempt is given up.

The only place where slots, requests and replicas change together, so that they can't disagree. A request holds a place
of the ring from its first dispatch until its release: a request that waits to be asked again can't lose its place to
later ones, which nobody could take before it.
"""

from __future__ import annotations

from ring.core.actions import Action, Arm, CancelFill, Disarm, DropReplica, Note, Send, SendPing
from ring.core.config import RingConfig
from ring.core.deadlines import Deadlines
from ring.core.messages import FillHeader, FillId, Request, TokenRequest
from ring.core.replicas import Fleet, Replica, ReplicaEvent, ReplicaState
from ring.core.requests import Entry, Requests
from ring.core.slots import SlotEvent, SlotTable
from ring.core.stats import RetryCause


class Attempts:
    """Slots, requests and replicas of one ring. Checks nothing about the caller: `StudentMachine` does."""

    def __init__(self, config: RingConfig) -> None:
        self._config = config
        self.slots = SlotTable(config.num_slots)
        self.requests = Requests()
        self.fleet = Fleet()
        self.quarantined: dict[FillId, str] = {}  # given-up fills that may still write, and the replica of each
        self.retries = dict.fromkeys(RetryCause, 0)
        self.deadlines: Deadlines[FillId] = Deadlines(config.request_timeout_s)
        # A stalled replica that shows no life for as long again is dropped.
        self.stalls: Deadlines[str] = Deadlines(config.request_timeout_s)
        self.silences: Deadlines[str] = Deadlines(config.peer_timeout_s)
        self.pings: Deadlines[str] = Deadlines(config.ping_interval_s)

    def dispatch(self, now_s: float, actions: list[Action]) -> None:
        """Ask for all that can be asked for now, in seq order."""
        if not self.fleet.num_usable:
            return
        reserved = 0  # free slots that earlier requests, still backing off, will need
        for entry in self.requests.waiting():
            if self.slots.num_free <= reserved:
                return
            if not self._ask(entry, now_s, actions):
                reserved += 1
        while self.slots.num_free > reserved and self.requests.num_admitted < self._config.depth:
            pending = self.requests.next_pending()
            if pending is None or not self._ask(pending, now_s, actions):
                return

    def complete(self, entry: Entry, sender: Replica, header: FillHeader, now_s: float) -> None:
        """The fill was accepted."""
        # A replica answers what it owes one after the other: this one began when it was sent or the last one ended.
        service_s = now_s - max(entry.sent_s, sender.last_fill_s)
        fill = self.requests.complete(entry, header)
        self.slots.move(fill.slot, SlotEvent.COMPLETE)
        self.deadlines.stop(fill)
        self.fleet.ended(sender, fill)
        if isinstance(entry.payload, TokenRequest):
            self.fleet.sample(sender, service_s=service_s, tokens=entry.cost_tokens, now_s=now_s)
        self.fleet.proved(sender)
        sender.last_fill_s = now_s
        sender.crc_errors_in_a_row = 0
        sender.fills += 1
        sender.bytes_received += header.num_bytes

    def give_up(self, entry: Entry, cause: RetryCause, actions: list[Action], *, cancel: bool = False) -> None:
        """End the present attempt; the request waits to be asked again."""
        replica = self.known(entry.replica)
        fill = self.requests.give_up(entry)
        self.slots.move(fill.slot, SlotEvent.GIVE_UP)
        self.quarantined[fill] = replica.name
        self.deadlines.stop(fill)
        self.fleet.ended(replica, fill)
        replica.retries += 1
        self.retries[cause] += 1
        actions.append(Disarm(replica.name, fill, refused=cause is RetryCause.REFUSED))
        if cancel:
            actions.append(CancelFill(replica.name, fill))
            replica.cancelled[fill] = None
            if len(replica.cancelled) > self._config.num_slots:
                # Bounded: where the data plane drops a cancelled fill by itself, no answer ever comes.
                del replica.cancelled[next(iter(replica.cancelled))]

    def fence(self, fill: FillId) -> bool:
        """Nothing of a given-up fill can land any more. False: no slot waited for it."""
        if self.quarantined.pop(fill, None) is None:
            return False
        self.slots.move(fill.slot, SlotEvent.FENCE)
        return True

    def is_last_word(self, name: str, fill: FillId) -> bool:
        """Whether this answer concerns a fill of that replica that was given up; if it was cancelled, the replica's
        data path lives again."""
        sender = self.fleet.get(name)
        if sender is None or fill not in sender.cancelled:
            return self.quarantined.get(fill) == name
        del sender.cancelled[fill]
        if sender.state is ReplicaState.STALLED:
            self.revive(sender)
        return True

    def revive(self, stalled: Replica) -> None:
        """Its data path showed life: it is asked again, if it stays."""
        if stalled.leaving:
            return
        self.stalls.stop(stalled.name)
        self.fleet.move(stalled, ReplicaEvent.LIFE)

    def stall(self, replica: Replica, overdue: FillId, now_s: float, actions: list[Action]) -> None:
        """An attempt is past its deadline: the replica loses all it has, and is not asked for now."""
        timeout_s = self._config.request_timeout_s
        replica.last_error = f"seq {overdue.seq} was not filled within {timeout_s:g} s"
        actions.append(Note("warning", f"{replica.name} stalled: {replica.last_error}; its requests go to others"))
        for entry in tuple(replica.in_flight.values()):
            late = now_s >= entry.sent_s + timeout_s
            self.give_up(entry, RetryCause.DEADLINE if late else RetryCause.STALLED, actions, cancel=True)
        self.fleet.failed(replica, spent_s=timeout_s, now_s=now_s)
        self.fleet.move(replica, ReplicaEvent.STALL)
        self.stalls.start(replica.name, now_s)

    def lose(self, replica: Replica, now_s: float, actions: list[Action]) -> None:
        """The replica's channel is gone, by no doing of ours: where it owed answers that is a failure. A data path that
        breaks with each payload would keep requests from other replicas for ever else."""
        if replica.in_flight:
            self.fleet.failed(replica, spent_s=_owed_s(replica, now_s), now_s=now_s, can_be_death=True)
        self.disconnect(replica, actions)

    def disconnect(self, replica: Replica, actions: list[Action]) -> None:
        """The replica's channel is gone or going: all that it has is given up."""
        for entry in tuple(replica.in_flight.values()):
            self.give_up(entry, RetryCause.DOWN, actions)
        replica.cancelled.clear()
        for deadlines in (self.stalls, self.silences, self.pings):
            deadlines.stop(replica.name)
        self.fleet.move(replica, ReplicaEvent.LEAVE)

    def drop(self, replica: Replica, error: str, actions: list[Action]) -> None:
        """Disconnect a replica on our own account."""
        replica.last_error = replica.drop_error = error
        self.disconnect(replica, actions)
        actions.append(DropReplica(replica.name, error))

    def first_deadline_s(self) -> float | None:
        firsts = (d.first_s() for d in (self.deadlines, self.stalls, self.silences, self.pings))
        return min((first_s for first_s in firsts if first_s is not None), default=None)

    def on_timer(self, now_s: float, actions: list[Action]) -> None:
        """Do what is due, at exactly its time or later."""
        while (name := self.silences.pop_due(now_s)) is not None:
            silent = self.known(name)
            if silent.in_flight:
                # Small messages may pass where large ones never do: it greets and is asked again and again.
                self.fleet.failed(silent, spent_s=_owed_s(silent, now_s), now_s=now_s)
            self.drop(silent, f"not heard from for {self._config.peer_timeout_s:g} s", actions)
        while (fill := self.deadlines.pop_due(now_s)) is not None:
            overdue = self.requests.in_flight(fill)
            assert overdue is not None  # a deadline ends with its attempt
            self.stall(self.known(overdue.replica), fill, now_s, actions)
        while (name := self.stalls.pop_due(now_s)) is not None:
            stalled = self.known(name)
            self.drop(stalled, f"stalled: {stalled.last_error}", actions)
        while (name := self.pings.pop_due(now_s)) is not None:
            actions.append(SendPing(name))
            self.pings.start(name, now_s)
        for entry in self.requests.waiting():
            if entry.retry_at_s is not None and now_s >= entry.retry_at_s:
                entry.forgive()

    def excuse(self, now_s: float) -> None:
        """Where a ping has been due for long, nobody looked, and no ping was open that a replica could have answered:
        that time is not its."""
        ping_s = self.pings.first_s()
        if ping_s is None or now_s - ping_s < self._config.peer_timeout_s / 2:
            return
        by_s = now_s - ping_s
        for deadlines in (self.deadlines, self.stalls, self.silences, self.pings):
            deadlines.put_off(by_s, now_s)
        self.requests.put_off(by_s, now_s)

    def known(self, name: str) -> Replica:
        replica = self.fleet.get(name)
        assert replica is not None  # deadlines and entries name replicas of the fleet only
        return replica

    def _ask(self, entry: Entry, now_s: float, actions: list[Action]) -> bool:
        """Start the next attempt of a request; a slot is free. False: no replica may be asked for it now."""
        replica = self.fleet.choose(entry.cost_tokens, entry.refused_by, now_s, is_retry=entry.attempt > 0)
        if replica is None:
            if entry.retry_at_s is None:
                entry.back_off(now_s)
            return False
        fill = self.requests.dispatch(entry, self.slots.request(), replica.name, now_s)
        self.fleet.dispatched(replica, fill, entry)
        self.deadlines.start(fill, now_s)
        actions.append(Arm(replica.name, fill, entry.expect.num_bytes))
        request = Request(fill=fill, payload=entry.payload, time_left_s=self._config.request_timeout_s)
        actions.append(Send(replica.name, request))
        return True


def _owed_s(replica: Replica, now_s: float) -> float:
    """For how long it has owed its oldest answer."""
    return now_s - min(entry.sent_s for entry in replica.in_flight.values())
