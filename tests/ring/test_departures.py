"""Students that leave, and why, as the teacher tells it: their two connections end one after the other."""

from __future__ import annotations

import contextlib
import re

import pytest

from ring.core.actions import DropReplica
from ring.core.messages import Goodbye
from teacher.forward import TeacherModel
from tests.ring.rig import HANG_GUARD_S, Teacher, consume, open_ring, wait_until
from tests.ring.test_service import SlowReader


def left(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Why students left, as the teacher told it."""
    return [m.partition(" left: ")[2] for m in (r.getMessage() for r in caplog.records) if " left: " in m]


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_goodbye_that_is_heard_after_the_channel_ended_is_why_the_student_left(
    model: TeacherModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """They go two ways. What it had asked for is given up at the first sign, and its place is free."""
    caplog.set_level("INFO")
    monkeypatch.setattr("teacher.students.LAST_WORD_S", HANG_GUARD_S)
    with Teacher(model, max_students=1) as asked:
        leaving = SlowReader(asked, model, num_slots=1, transport=transport)
        try:
            asked.hold_passes()
            leaving.ask(0, slot=0)
            wait_until(lambda: asked.service.stats().queued == 1, "its request")
            assert leaving.session._receiver is not None
            leaving.session._receiver.close()
            wait_until(lambda: asked.service.stats().students == 0, "the end of its channel")
            leaving.session.ping(1)  # as the trainer's pump may, which does not know yet
            leaving.session.link.send(Goodbye(reason="the student is done"))
            wait_until(lambda: bool(left(caplog)), "its leaving")
            [why] = left(caplog)
            assert re.fullmatch(r"the student is done \(the student.* (closed its end|connection ended)\)", why)
        finally:
            leaving.close()


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_student_whose_channel_ends_without_a_word_has_left(
    model: TeacherModel, caplog: pytest.LogCaptureFixture, transport: str
) -> None:
    caplog.set_level("INFO")
    with Teacher(model, max_students=1) as asked:
        gone = SlowReader(asked, model, num_slots=1, transport=transport)
        try:
            assert gone.session._receiver is not None
            gone.session._receiver.close()
            answer = gone.recv()
            assert isinstance(answer, Goodbye), "it is told at once that its channel ended"
            SlowReader(asked, model, num_slots=1, transport=transport).close()
            wait_until(lambda: len(left(caplog)) == 2, "both to have left")
            assert answer.reason in left(caplog)
        finally:
            gone.close()


def test_of_students_whose_channel_has_ended_few_are_remembered_and_nothing_is_held(
    model: TeacherModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else whoever ends its channel and comes again as somebody else has the teacher keep any number of offers."""
    monkeypatch.setattr("teacher.students.LAST_WORD_S", HANG_GUARD_S)
    with Teacher(model, max_students=2) as asked, contextlib.ExitStack() as visits:
        for _ in range(8):
            visitor = SlowReader(asked, model, num_slots=1, transport="shm")
            visits.callback(visitor.close)
            assert visitor.session._receiver is not None
            visitor.session._receiver.close()
            wait_until(lambda: asked.service.stats().students == 0, "the end of its channel")
            students = list(asked.service._students)
            assert len(students) <= 3, "as many as there are places, and the last one"
            assert [(one.offer, one.sender, one.tickets) for one in students] == [(None, None, {})] * len(students)


def test_a_student_that_comes_back_has_left_before_it_joins(
    model: TeacherModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("teacher.students.LAST_WORD_S", HANG_GUARD_S)
    with Teacher(model, max_students=1) as asked, open_ring(model, asked, transport="shm") as ring:
        consume(ring, model, range(3))
        ring._pump.post([DropReplica(asked.endpoint, "a wrong answer")])
        wait_until(lambda: ring.stats().machine.replicas[0].num_joins == 2, "the next session")
        consume(ring, model, range(3, 6))
        told = [r.getMessage() for r in caplog.records if r.name.startswith("teacher")]
        words = [word for line in told for word in ("joined", "left") if f" {word}" in line]
        assert words[:2] == ["joined", "left"], "what comes after may be more than it tells in a second"
