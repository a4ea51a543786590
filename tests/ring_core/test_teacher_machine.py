"""The teacher's machine under every interleaving that hypothesis finds: students that join, ask, cancel, repeat, leave
and stay silent, while passes end well and badly."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ring.core.errors import LocalProtocolError
from ring.core.jobs import JobState
from ring.core.messages import FillId, Request
from ring.core.teacher import DropStudent, Put, Refuse, TeacherAction, TeacherConfig, TeacherMachine, Work
from tests.ring_core.asks import head, tokens

NAMES = ("a", "b", "c")
NUM_SLOTS = 3
MAX_BATCH_TOKENS = 30


class TeacherLife(RuleBasedStateMachine):
    """The model: what each student asked in its present session, and how each request was answered."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.machine = TeacherMachine(
            TeacherConfig(max_batch_tokens=MAX_BATCH_TOKENS, max_rows=50, max_tokens=50, max_students=2)
        )
        self.session: dict[str, int] = {}
        self.num_sessions = 0
        self.next_seq = 0
        self.open: dict[tuple[str, int, FillId], Request] = {}  # asked, neither refused nor put
        self.answers: set[tuple[str, int, FillId]] = set()
        self.cancelled: set[tuple[str, int, FillId]] = set()
        self.sending: set[tuple[str, int, FillId]] = set()
        self.computing: list[tuple[Work, ...]] = []
        self.draining = False

    def do(self, actions: list[TeacherAction]) -> None:
        for action in actions:
            if isinstance(action, DropStudent):
                self.forget(action.student)
                continue
            fill = action.request.fill if isinstance(action, Put) else action.fill
            key = (action.student, self.session[action.student], fill)
            assert key in self.open, "an answer to what was not asked, or a second one"
            assert key not in self.answers
            request = self.open.pop(key)
            self.answers.add(key)
            if isinstance(action, Put):
                assert action.request == request
                assert min(action.forward_s, action.queue_s, action.idle_s) >= 0.0
                assert key not in self.cancelled, "cancelled before it was put, and put"
                self.sending.add(key)

    def forget(self, name: str) -> None:
        self.session.pop(name, None)
        for keys in (self.sending, self.cancelled):
            keys -= {key for key in keys if key[0] == name}
        for key in [key for key in self.open if key[0] == name]:
            del self.open[key]

    def open_of(self, name: str) -> list[FillId]:
        return [key[2] for key in self.open if key[0] == name]

    @initialize()
    def start(self) -> None:
        self.joins("a")

    @rule(name=st.sampled_from(NAMES))
    def joins(self, name: str) -> None:
        self.forget(name)
        actions = self.machine.student_joined(name, num_slots=NUM_SLOTS, slot_bytes=300, row_bytes=8, now_s=self.now_s)
        if len(self.session) < 2 and not self.draining:
            assert actions == []
            self.num_sessions += 1
            self.session[name] = self.num_sessions
        else:
            assert [type(action) for action in actions] == [DropStudent]

    @rule(name=st.sampled_from(NAMES))
    def leaves(self, name: str) -> None:
        self.forget(name)
        self.do(self.machine.student_left(name, now_s=self.now_s))

    @precondition(lambda self: self.session)
    @rule(
        data=st.data(),
        num=st.integers(0, 60),
        slot=st.integers(0, NUM_SLOTS),
        time_left_s=st.sampled_from((0.0, 2.0, 60.0)),
    )
    def asks(self, data: st.DataObject, num: int, slot: int, time_left_s: float) -> None:
        name = data.draw(st.sampled_from(sorted(self.session)))
        self.next_seq += 1
        request = tokens(self.next_seq, slot=slot, num=num, rows=min(num, 45), time_left_s=time_left_s)
        self.open[name, self.session[name], request.fill] = request
        self.do(self.machine.request(name, request, now_s=self.now_s))

    @precondition(lambda self: self.session)
    @rule(data=st.data(), num_bytes=st.integers(0, 320))
    def asks_for_the_head(self, data: st.DataObject, num_bytes: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.session)))
        self.next_seq += 1
        request = head(self.next_seq, slot=self.next_seq % NUM_SLOTS, num_bytes=num_bytes)
        self.open[name, self.session[name], request.fill] = request
        self.do(self.machine.request(name, request, now_s=self.now_s))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def asks_twice(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.open)))
        assert self.machine.request(key[0], self.open[key], now_s=self.now_s) == []

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancels(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.open)))
        self.do(self.machine.cancel(key[0], key[2], now_s=self.now_s))
        self.cancelled.add(key)

    @precondition(lambda self: self.sending)
    @rule(data=st.data())
    def cancels_too_late(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.sending)))
        assert self.machine.cancel(key[0], key[2], now_s=self.now_s) == []

    @rule(max_requests=st.none() | st.integers(1, 3))
    def takes_a_batch(self, max_requests: int | None) -> None:
        queued = self.machine.stats(now_s=self.now_s).queued
        batch = self.machine.next_batch(now_s=self.now_s, max_requests=max_requests)
        assert len(batch.work) <= (max_requests or queued)
        assert len(batch.work) + len(batch.actions) <= queued
        assert batch.work or len(batch.actions) == queued, "something waits, and nothing was taken"
        assert {work.kind for work in batch.work} <= {batch.kind}
        costs = [self.machine._computing[work.key].cost_tokens for work in batch.work]
        assert len(costs) < 2 or sum(costs) <= MAX_BATCH_TOKENS
        self.do(list(batch.actions))
        if batch.work:
            self.computing.append(batch.work)

    @precondition(lambda self: self.computing)
    @rule(data=st.data(), well=st.booleans())
    def a_pass_ends(self, data: st.DataObject, well: bool) -> None:
        work = self.computing.pop(data.draw(st.integers(0, len(self.computing) - 1)))
        if well:
            self.do(self.machine.computed(work, now_s=self.now_s))
        else:
            actions = self.machine.failed(work, "boom", now_s=self.now_s)
            assert all(isinstance(action, Refuse) for action in actions)
            self.do(actions)
        for item in work:
            assert item.key not in self.open, "computed and not answered"

    @precondition(lambda self: self.sending)
    @rule(data=st.data())
    def a_fill_is_sent(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.sending)))
        self.sending.discard(key)
        self.do(self.machine.sent(key[0], key[2], now_s=self.now_s))

    @rule(seconds=st.sampled_from((0.0, 1.0, 30.0)), heard=st.booleans())
    def time_passes(self, seconds: float, heard: bool) -> None:
        self.now_s += seconds
        if heard:
            for name in self.session:
                self.machine.heard(name, now_s=self.now_s)
        self.do(self.machine.on_timer(now_s=self.now_s))
        deadline_s = self.machine.next_deadline_s()
        assert deadline_s is None or deadline_s > self.now_s

    @precondition(lambda self: self.num_sessions > 6)
    @rule()
    def drains(self) -> None:
        self.draining = True
        self.do(self.machine.drain(now_s=self.now_s))

    @rule()
    def illegal_calls_change_nothing(self) -> None:
        before = pickle.dumps(self.machine)
        later_s = self.now_s + 1.0
        for batch in self.computing:
            with pytest.raises(LocalProtocolError):
                self.machine.computed([*batch, batch[0]], now_s=later_s)
        for name, _, fill in self.open:
            with pytest.raises(LocalProtocolError):
                self.machine.sent(name, fill, now_s=later_s)
        assert pickle.dumps(self.machine) == before

    @invariant()
    def counts_agree(self) -> None:
        stats = self.machine.stats(now_s=self.now_s)
        students = self.machine._students
        assert set(students) == set(self.session)
        assert stats.sending == len(self.sending)
        assert stats.computing == sum(len(work) for work in self.computing)
        assert stats.queued == sum(len(student.queue) for student in students.values())
        assert stats.queued_tokens == sum(j.cost_tokens for s in students.values() for j in s.queue.values())
        held = {(s.name, s.session, fill) for s in students.values() for fill in s.jobs}
        assert held == set(self.open) | self.sending, "a request was forgotten, or kept after its answer"
        assert self.machine.drained == (self.draining and stats.queued + stats.computing + stats.sending == 0)

    @invariant()
    def memory_is_bounded(self) -> None:
        for student in self.machine._students.values():
            assert len(student.jobs) <= 2 * NUM_SLOTS
            assert len(student.last_fills) <= NUM_SLOTS
            assert student.num_sending == sum(job.state is JobState.SENDING for job in student.jobs.values())
        assert len(self.machine._queue._order) == sum(bool(s.queue) for s in self.machine._students.values())

    def teardown(self) -> None:
        """Once students are quiet, everything is answered and the teacher drains."""
        for name in self.session:
            self.machine.heard(name, now_s=self.now_s)
        while self.machine.stats(now_s=self.now_s).queued:
            self.takes_a_batch(None)
        for work in self.computing:
            self.do(self.machine.computed(work, now_s=self.now_s))
        self.computing.clear()
        assert not self.open
        for name, _, fill in list(self.sending):
            self.machine.sent(name, fill, now_s=self.now_s)
        self.machine.drain(now_s=self.now_s)
        assert self.machine.drained


TeacherLife.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestTeacherLife = TeacherLife.TestCase
