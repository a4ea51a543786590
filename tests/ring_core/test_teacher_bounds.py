"""What a student asks for can't make the teacher hold more than its slots, nor compute what does not fit."""

from __future__ import annotations

import pickle

import pytest

from ring.core.messages import FillId, RefusalCode, Request
from ring.core.teacher import DropStudent, Refuse
from tests.ring_core.asks import head, refusals, teacher, tokens


def test_more_requests_than_slots_are_refused() -> None:
    machine = teacher("s", num_slots=2)
    for seq in range(2):
        assert machine.request("s", tokens(seq, slot=seq), now_s=0.0) == []
    assert refusals(machine.request("s", tokens(2), now_s=0.0)) == [(FillId(2, 0, 0), RefusalCode.OVERLOADED)]
    machine.request("s", tokens(3), now_s=0.0)
    assert machine.stats(now_s=0.0).queued == 2


def test_a_slot_may_be_asked_for_again_before_its_ticket_is_back() -> None:
    """The student sees a fill before the teacher sees its ticket; it must not be punished for being quick."""
    machine = teacher("s", num_slots=2)
    for seq in range(2):
        machine.request("s", tokens(seq, slot=seq), now_s=0.0)
    machine.computed(machine.next_batch(now_s=0.0).work, now_s=0.0)
    for seq in (2, 3):
        assert machine.request("s", tokens(seq, slot=seq - 2), now_s=0.0) == []
    machine.computed(machine.next_batch(now_s=0.0).work, now_s=0.0)
    # But a student that takes nothing can't make the teacher hold more than that.
    assert refusals(machine.request("s", tokens(4), now_s=0.0)) == [(FillId(4, 0, 0), RefusalCode.OVERLOADED)]


@pytest.mark.parametrize(
    ("request_", "numbers"),
    [
        (tokens(0, num=101), ("101", "100")),
        (tokens(0, num=0, rows=0), ("0 tokens", "100")),
        (tokens(0, num=100, rows=101), ("101 rows", "100")),
        (tokens(0, num=100, rows=100, slot=4), ("slot 4", "4 slots")),
        (head(0, num_bytes=801), ("801", "800")),
    ],
)
def test_a_request_that_does_not_fit_is_invalid_with_both_numbers(request_: Request, numbers: tuple[str, ...]) -> None:
    machine = teacher("s", max_rows=100)
    [refusal] = machine.request("s", request_, now_s=0.0)
    assert isinstance(refusal, Refuse)
    assert refusal.code is RefusalCode.INVALID
    assert all(number in refusal.message for number in numbers)


def test_an_answer_larger_than_a_slot_is_invalid() -> None:
    machine = teacher(max_rows=1000)
    machine.student_joined("s", num_slots=1, slot_bytes=79, row_bytes=8, now_s=0.0)
    [refusal] = machine.request("s", tokens(0, rows=10), now_s=0.0)
    assert isinstance(refusal, Refuse)
    assert "80 bytes; a slot holds 79" in refusal.message
    assert machine.request("s", tokens(1, rows=9), now_s=0.0) == []


def test_too_many_students_are_refused_with_the_reason() -> None:
    machine = teacher("a", "b", max_students=2)
    assert not machine.can_join
    [drop] = machine.student_joined("c", num_slots=1, slot_bytes=8, row_bytes=8, now_s=0.0)
    assert isinstance(drop, DropStudent)
    assert drop.student == "c"
    assert "2 students" in drop.reason
    machine.student_left("a", now_s=0.0)
    assert machine.student_joined("c", num_slots=1, slot_bytes=8, row_bytes=8, now_s=0.0) == []


def test_a_request_of_a_stranger_is_answered_with_the_door() -> None:
    assert teacher().request("x", tokens(0), now_s=0.0) == [DropStudent("x", "a request before the handshake")]


def test_requests_that_are_cancelled_over_and_over_take_no_memory() -> None:
    machine = teacher("s")
    machine.request("s", tokens(0), now_s=0.0)
    machine.next_batch(now_s=0.0)  # the teacher is busy for a while
    sizes = []
    for seq in range(1, 400):
        machine.request("s", tokens(seq, slot=1), now_s=0.0)
        machine.cancel("s", FillId(seq, 0, 1), now_s=0.0)
        sizes.append(len(pickle.dumps(machine)))
    assert max(sizes[200:]) <= max(sizes[:200]) + 32
