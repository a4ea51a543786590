"""What a student asks for can't make the teacher hold more than its slots, nor compute what does not fit."""

from __future__ import annotations

import pickle

import pytest

from ring.core.config import MAX_QUEUED_REQUESTS
from ring.core.messages import FillId, HeadRequest, RefusalCode, Request
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


def test_the_tokens_that_a_student_may_queue_are_bounded_whatever_slots_it_offered() -> None:
    machine = teacher("s", "t", num_slots=200, max_tokens=10, max_batch_tokens=10)
    for seq in range(MAX_QUEUED_REQUESTS):
        assert machine.request("s", tokens(seq, slot=seq), now_s=0.0) == []
    last = tokens(MAX_QUEUED_REQUESTS, slot=MAX_QUEUED_REQUESTS)
    [refusal] = machine.request("s", last, now_s=0.0)
    assert isinstance(refusal, Refuse)
    assert refusal.code is RefusalCode.OVERLOADED
    assert refusal.message == "640 tokens are queued; allowed: fewer than 640"
    assert machine.request("t", last, now_s=0.0) == [], "another student has a queue of its own"
    machine.next_batch(now_s=0.0)
    assert machine.request("s", last, now_s=0.0) == []


@pytest.mark.parametrize(
    ("offset", "num_bytes", "max_batch_tokens", "cost_tokens"),
    [(0, 64, 100, 8), (63, 1, 100, 1), (64, 1, 100, 8), (60, 36, 100, 8), (95, 1, 5, 5), (0, 96, 5, 12)],
)
def test_a_head_piece_with_bytes_of_the_digest_costs_what_is_hashed_for_it_up_to_a_pass(
    offset: int, num_bytes: int, max_batch_tokens: int, cost_tokens: int
) -> None:
    machine = teacher("s", head_column_bytes=8, max_batch_tokens=max_batch_tokens)
    payload = HeadRequest(vocab_start=0, vocab_end=8, offset=offset, num_bytes=num_bytes)
    assert machine.request("s", Request(fill=FillId(0, 0, 0), payload=payload, time_left_s=60.0), now_s=0.0) == []
    assert machine.stats(now_s=0.0).queued_tokens == cost_tokens


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
