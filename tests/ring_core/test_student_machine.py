"""The student's machine under every interleaving that hypothesis finds: replicas that come, die, stall, answer wrongly,
late, twice; and a trainer that leases and releases when it likes."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ring.core.errors import LocalProtocolError
from ring.core.messages import FillHeader, FillId, RefusalCode, WireDtype
from ring.core.replicas import ReplicaState
from ring.core.slots import SlotState
from tests.ring_core.driver import Driver, microbatch

NAMES = ("a", "b", "c")
WRONG = (
    {"num_rows": 3},
    {"dtype": WireDtype.FP16},
    {"num_bytes": 1},
    {"input_hash": b"x"},
    {"fingerprint": "x"},
    {"student_epoch": "student-0"},
    {"teacher_epoch": "x"},
    {"fill": FillId(-1, 0, 0)},
)
REPEATABLE = [code for code in RefusalCode if code is not RefusalCode.INVALID]


class StudentLife(RuleBasedStateMachine):
    ring: Driver
    answered: list[tuple[str, FillId, FillHeader]]

    @initialize(depth=st.integers(1, 4), num_spares=st.integers(0, 3), max_pending=st.integers(1, 3))
    def start(self, depth: int, num_spares: int, max_pending: int) -> None:
        self.ring = Driver(
            depth=depth, num_spares=num_spares, max_pending=max_pending, request_timeout_s=8.0, teacher_timeout_s=300.0
        )
        self.answered = []
        self.ring.up("a")

    def answerable(self) -> list[FillId]:
        """What connected replicas were asked and have not answered, given up or not."""
        ring = self.ring
        return [fill for fill, (name, _) in ring.asked.items() if name in ring.epochs and fill not in ring.pending]

    @precondition(lambda self: self.ring.machine.can_submit)
    @rule(gap=st.integers(1, 3))
    def submit(self, gap: int) -> None:
        self.ring.submit((self.ring.submitted[-1] if self.ring.submitted else -3) + gap)

    @rule(name=st.sampled_from(NAMES))
    def comes_up(self, name: str) -> None:
        if name not in self.ring.epochs:
            self.ring.up(name)

    @rule(name=st.sampled_from(NAMES))
    def goes_down(self, name: str) -> None:
        self.ring.down(name)

    @precondition(lambda self: self.answerable())
    @rule(data=st.data())
    def begins_to_write(self, data: st.DataObject) -> None:
        self.ring.begin(data.draw(st.sampled_from(self.answerable())))

    @precondition(lambda self: self.answerable())
    @rule(data=st.data())
    def fills(self, data: st.DataObject) -> None:
        fill = data.draw(st.sampled_from(self.answerable()))
        self.answered.append((self.ring.asked[fill][0], fill, self.ring.header(fill)))
        self.ring.fill(fill)

    @precondition(lambda self: self.answerable())
    @rule(data=st.data(), changes=st.sampled_from(WRONG))
    def answers_wrongly(self, data: st.DataObject, changes: dict[str, object]) -> None:
        fill = data.draw(st.sampled_from(self.answerable()))
        self.ring.answer(fill, self.ring.header(fill, **changes))

    @precondition(lambda self: self.answerable())
    @rule(data=st.data())
    def flips_a_bit(self, data: st.DataObject) -> None:
        self.ring.fill(data.draw(st.sampled_from(self.answerable())), crc=1)

    @precondition(lambda self: set(self.answerable()) - self.ring.begun)
    @rule(data=st.data(), code=st.sampled_from(REPEATABLE))
    def refuses(self, data: st.DataObject, code: RefusalCode) -> None:
        candidates = [fill for fill in self.answerable() if fill not in self.ring.begun]
        self.ring.refuse(data.draw(st.sampled_from(candidates)), code)

    @precondition(lambda self: self.ring.pending)
    @rule(data=st.data(), reported=st.booleans())
    def lands_late(self, data: st.DataObject, reported: bool) -> None:
        self.ring.land(data.draw(st.sampled_from(sorted(self.ring.pending))), reported=reported)

    @precondition(lambda self: self.answered)
    @rule(data=st.data())
    def says_it_again(self, data: st.DataObject) -> None:
        name, fill, header = data.draw(st.sampled_from(self.answered))
        self.ring.do(self.ring.machine.arrived(name, fill, header.num_bytes, header, None, now_s=self.ring.now_s))

    @precondition(lambda self: self.answerable() and len(self.ring.epochs) > 1)
    @rule(data=st.data())
    def another_answers(self, data: st.DataObject) -> None:
        fill = data.draw(st.sampled_from(self.answerable()))
        header = self.ring.header(fill)
        other = data.draw(st.sampled_from(sorted(set(self.ring.epochs) - {self.ring.asked[fill][0]})))
        header = dataclasses.replace(header, teacher_epoch=self.ring.epochs[other])
        self.ring.do(self.ring.machine.arrived(other, fill, header.num_bytes, header, None, now_s=self.ring.now_s))

    @rule()
    def leases(self) -> None:
        self.ring.lease()

    @precondition(lambda self: self.ring.leases)
    @rule(data=st.data())
    def releases(self, data: st.DataObject) -> None:
        self.ring.release(data.draw(st.sampled_from(self.ring.leases)).seq)

    @rule(seconds=st.sampled_from((0.1, 0.5, 2.0, 5.0, 8.0)), heard=st.booleans())
    def time_passes(self, seconds: float, heard: bool) -> None:
        self.ring.wait(seconds, heard=heard)

    @rule()
    def illegal_calls_change_nothing(self) -> None:
        ring, machine = self.ring, self.ring.machine
        before = pickle.dumps(machine)
        last = ring.submitted[-1] if ring.submitted else None
        if last is not None:
            with pytest.raises(LocalProtocolError):
                machine.submit(last, *microbatch(last), now_s=ring.now_s + 1.0)
        not_leased = set(ring.submitted) - {lease.seq for lease in ring.leases} | {10**6}
        for seq in sorted(not_leased)[-3:]:
            with pytest.raises(LocalProtocolError):
                machine.release(seq, now_s=ring.now_s + 1.0)
        for name in ring.epochs:
            with pytest.raises(LocalProtocolError):
                machine.replica_up(name, epoch="x", fingerprint="fp", now_s=ring.now_s + 1.0)
        assert pickle.dumps(machine) == before

    @invariant()
    def no_given_up_attempt_can_write_a_live_slot(self) -> None:
        for fill in self.ring.pending:
            assert self.ring.machine._slots.state(fill.slot) is SlotState.QUARANTINED

    @invariant()
    def memory_is_bounded(self) -> None:
        ring, attempts = self.ring, self.ring.machine._attempts
        in_flight = attempts.requests.num_in_flight
        assert len(attempts.deadlines) == in_flight == sum(len(r.in_flight) for r in attempts.fleet)
        assert sum(r.owed_tokens for r in attempts.fleet) == 10 * in_flight
        assert len(attempts.quarantined) == attempts.slots.count(SlotState.QUARANTINED)
        assert len(attempts.pings) == len(attempts.silences) == len(ring.epochs)
        assert len(attempts.stalls) == len(attempts.fleet.stalled())
        assert len(attempts.requests._entries) <= ring.config.depth + ring.config.pending_limit
        assert all(len(r.cancelled) <= ring.config.num_slots * r.connected for r in attempts.fleet)

    @invariant()
    def connections_agree(self) -> None:
        assert {r.name for r in self.ring.machine._fleet if r.connected} == set(self.ring.epochs)

    def teardown(self) -> None:
        """Once faults stop, everything that was submitted is delivered."""
        if not hasattr(self, "ring"):
            return
        ring = self.ring
        for lease in list(ring.leases):
            ring.release(lease.seq)
        for _ in range(60):
            if ring.ended is not None or ring.delivered == ring.submitted:
                return
            for fill in list(ring.pending):
                ring.land(fill)
            for name in set(NAMES) - set(ring.epochs):
                ring.up(name)
            ring.fill_all()
            ring.consume()
            for replica in list(ring.machine._fleet):
                if replica.state is ReplicaState.DRAINING:
                    ring.down(replica.name, error="goodbye")
            ring.wait(1.0)
        raise AssertionError(f"delivered {ring.delivered} of {ring.submitted}")


StudentLife.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestStudentLife = StudentLife.TestCase
