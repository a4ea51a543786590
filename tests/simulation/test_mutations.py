"""The simulator can fail: each of these mistakes, made in the machines on purpose, is found within the hundred seeds.

A mistake that no seed finds would be one that the promise tests could not find either.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import pytest

from ring.core import acceptance, fair_queue, student
from ring.core.actions import Action, Deliverable, Disarm
from ring.core.attempts import Attempts
from ring.core.deadlines import Deadlines, UnservedClock
from ring.core.messages import FillHeader, FillId, RefusalCode, Request
from ring.core.replicas import Fleet, Replica
from ring.core.requests import Entry, RequestEvent, Requests, RequestState
from ring.core.slots import SlotEvent, SlotTable
from ring.core.stats import DropCause, RetryCause
from ring.core.student import StudentMachine
from ring.core.teacher import Refuse, TeacherMachine
from tests.simulation.__main__ import main
from tests.simulation.report import Failure, try_scenario
from tests.simulation.scenario import scenario
from tests.simulation.test_simulation import FAST_SEEDS
from tests.simulation.world import World

Patch = pytest.MonkeyPatch
Mutation = Callable[[Patch], None]


def any_attempt_will_do(patch: Patch) -> None:
    def in_flight(self: Requests, fill: FillId) -> Entry | None:
        entry = self._entries.get(fill.seq)
        return entry if entry is not None and entry.state is RequestState.IN_FLIGHT else None

    patch.setattr(Requests, "in_flight", in_flight)


def no_quarantine(patch: Patch) -> None:
    give_up = Attempts.give_up

    def mistaken(self: Attempts, entry: Entry, *args: Any, **kwargs: Any) -> None:
        give_up(self, entry, *args, **kwargs)
        assert entry.fill is not None
        self.fence(entry.fill)

    patch.setattr(Attempts, "give_up", mistaken)


def a_lost_connection_fences(patch: Patch) -> None:
    disconnect = Attempts.disconnect

    def mistaken(self: Attempts, replica: Replica, actions: list[Action]) -> None:
        disconnect(self, replica, actions)
        for fill in [fill for fill, name in self.quarantined.items() if name == replica.name]:
            self.fence(fill)

    patch.setattr(Attempts, "disconnect", mistaken)


def giving_up_counts_as_the_replicas_word(patch: Patch) -> None:
    give_up = Attempts.give_up

    def mistaken(
        self: Attempts, entry: Entry, cause: RetryCause, actions: list[Action], *, cancel: bool = False
    ) -> None:
        give_up(self, entry, cause, actions, cancel=cancel)
        actions[:] = [Disarm(a.replica, a.fill, refused=True) if isinstance(a, Disarm) else a for a in actions]

    patch.setattr(Attempts, "give_up", mistaken)


def a_fill_under_way_is_refused_too(patch: Patch) -> None:
    cancel = TeacherMachine.cancel

    def mistaken(self: TeacherMachine, name: str, fill: FillId, *, now_s: float) -> list[Any]:
        actions = cancel(self, name, fill, now_s=now_s)
        asker = self._students.get(name)
        is_held = asker is not None and fill in asker.jobs
        return [*actions, Refuse(name, fill, RefusalCode.CANCELLED, "cancelled")] if is_held else actions

    patch.setattr(TeacherMachine, "cancel", mistaken)


def out_of_order(patch: Patch) -> None:
    def lease(self: Requests) -> Entry | None:
        for entry in self._undelivered:
            if entry.state is RequestState.FILLED:
                entry.move(RequestEvent.LEASE)
                self._undelivered.remove(entry)
                return entry
        return None

    patch.setattr(Requests, "lease", lease)


def delivered_twice(patch: Patch) -> None:
    release = Requests.release

    def mistaken(self: Requests, entry: Entry) -> None:
        release(self, entry)
        if entry.attempt == 1:  # as if the retry had been a request of its own
            entry.state = RequestState.FILLED
            self._undelivered.appendleft(entry)
            self._entries[entry.seq] = entry

    patch.setattr(Requests, "release", mistaken)


def a_leased_slot_is_free(patch: Patch) -> None:
    move = SlotTable.move

    def mistaken(self: SlotTable, slot: int, event: SlotEvent) -> None:
        if event is SlotEvent.RELEASE:
            return
        move(self, slot, event)
        if event is SlotEvent.LEASE:
            move(self, slot, SlotEvent.RELEASE)

    patch.setattr(SlotTable, "move", mistaken)


def waiting_requests_lose_their_place(patch: Patch) -> None:
    def num_admitted(self: Requests) -> int:
        return len(self._entries) - len(self._pending) - len(self._waiting)

    patch.setattr(Requests, "num_admitted", property(num_admitted))


def nobody_is_told(patch: Patch) -> None:
    settle = StudentMachine._settle

    def mistaken(self: StudentMachine, actions: list[Action]) -> list[Action]:
        return [action for action in settle(self, actions) if not isinstance(action, Deliverable)]

    patch.setattr(StudentMachine, "_settle", mistaken)


def no_deadline(patch: Patch) -> None:
    start = Deadlines.start

    def mistaken(self: Deadlines[Any], key: Any, now_s: float) -> None:
        start(self, key, now_s + (1e9 if isinstance(key, FillId) else 0.0))

    patch.setattr(Deadlines, "start", mistaken)


def never_lost(patch: Patch) -> None:
    patch.setattr(UnservedClock, "deadline_s", lambda self: None)


def lost_while_served(patch: Patch) -> None:
    set_running = UnservedClock.set_running
    patch.setattr(UnservedClock, "set_running", lambda self, running, now_s: set_running(self, True, now_s))
    patch.setattr(UnservedClock, "reset", lambda self: None)


def first_name_first(patch: Patch) -> None:
    patch.setattr(fair_queue, "_place", lambda asker: (0, 0, asker.name))


def a_repeated_request_is_refused(patch: Patch) -> None:
    request = TeacherMachine.request

    def mistaken(self: TeacherMachine, name: str, asked: Request, *, now_s: float) -> list[Any]:
        num_repeated = self._counts["repeated"]
        actions = request(self, name, asked, now_s=now_s)
        is_repeated = self._counts["repeated"] > num_repeated
        return [Refuse(name, asked.fill, RefusalCode.OVERLOADED, "it came twice")] if is_repeated else actions

    patch.setattr(TeacherMachine, "request", mistaken)


def quarantine_hides_that_nothing_can_be_asked(patch: Patch) -> None:
    patch.setattr(StudentMachine, "_is_out_of_slots", lambda self: False)


def liars_go_first(patch: Patch) -> None:
    choose = Fleet.choose

    def mistaken(self: Fleet, cost_tokens: int, avoid: Any, now_s: float, *, is_retry: bool = False) -> Replica | None:
        doubted = (self._doubted[name] for name in sorted(self._doubted) if name not in avoid)
        return next(doubted, None) or choose(self, cost_tokens, avoid, now_s)

    patch.setattr(Fleet, "choose", mistaken)


def who_failed_is_tried_all_the_time(patch: Patch) -> None:
    failed = Fleet.failed

    def mistaken(self: Fleet, replica: Replica, *, spent_s: float, now_s: float, can_be_death: bool = False) -> None:
        failed(self, replica, spent_s=0.0, now_s=now_s, can_be_death=can_be_death)

    patch.setattr(Fleet, "failed", mistaken)


def to_break_off_is_no_failure(patch: Patch) -> None:
    patch.setattr(Attempts, "lose", lambda self, replica, now_s, actions: self.disconnect(replica, actions))


def retries_count_twice(patch: Patch) -> None:
    give_up = Attempts.give_up

    def mistaken(self: Attempts, entry: Entry, cause: RetryCause, *args: Any, **kwargs: Any) -> None:
        give_up(self, entry, cause, *args, **kwargs)
        self.retries[cause] += 1

    patch.setattr(Attempts, "give_up", mistaken)


def a_checkpoint_is_ahead(patch: Patch) -> None:
    durable = World.durable
    patch.setattr(World, "durable", lambda self, number, position: durable(self, number, position + 1))


#: What is no difference between an answer and what was expected.
NOT_COMPARED = (DropCause.LATE, DropCause.NOT_ASKED, DropCause.WRONG_HEADER)


def _accepts(cause: DropCause) -> Mutation:
    def accepts(patch: Patch) -> None:
        difference = acceptance.difference

        def mistaken(header: FillHeader, **expected: Any) -> tuple[DropCause, str] | None:
            wrong = difference(header, **expected)
            return None if wrong is not None and wrong[0] is cause else wrong

        patch.setattr(student, "difference", mistaken)

    accepts.__name__ = f"accepts_{cause.value}"
    return accepts


MUTATIONS: list[Mutation] = [
    any_attempt_will_do,
    no_quarantine,
    a_lost_connection_fences,
    giving_up_counts_as_the_replicas_word,
    a_fill_under_way_is_refused_too,
    out_of_order,
    delivered_twice,
    a_leased_slot_is_free,
    waiting_requests_lose_their_place,
    nobody_is_told,
    no_deadline,
    never_lost,
    lost_while_served,
    first_name_first,
    a_repeated_request_is_refused,
    quarantine_hides_that_nothing_can_be_asked,
    liars_go_first,
    who_failed_is_tried_all_the_time,
    to_break_off_is_no_failure,
    retries_count_twice,
    a_checkpoint_is_ahead,
    *(_accepts(cause) for cause in DropCause if cause not in NOT_COMPARED),
]


def first_failure(*, with_faults: int = 0) -> Failure | None:
    """Of the hundred seeds; with at least so many faults."""
    for what in map(scenario, FAST_SEEDS):
        if len(what.faults) < with_faults:
            continue
        result = try_scenario(what, shrinks=False)
        if isinstance(result, Failure):
            return result
    return None


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_mistake_in_the_machines_is_found(mutation: Mutation, monkeypatch: Patch) -> None:
    mutation(monkeypatch)
    assert first_failure() is not None, f"none of the seeds {FAST_SEEDS} finds it"


def test_a_failing_seed_names_a_command_that_replays_it_and_the_faults_it_takes(
    monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_quarantine(monkeypatch)
    found = first_failure(with_faults=8)
    assert found is not None
    command = next(line for line in str(found).splitlines() if line.startswith("replay: "))
    python, flag, module, *arguments = shlex.split(command.removeprefix("replay: "))
    assert (python, flag, module) == ("python", "-m", "tests.simulation")
    assert main(arguments) == 1
    shrunk = try_scenario(scenario(found.what.seed))
    assert isinstance(shrunk, Failure)
    assert len(shrunk.what.faults) < len(found.what.faults)
    assert isinstance(try_scenario(shrunk.what, shrinks=False), Failure)
    printed = capsys.readouterr().out
    assert str(shrunk) in printed
    assert all(str(fault) in printed for fault in shrunk.what.faults)
