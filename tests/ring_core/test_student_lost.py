"""A run never waits for ever for its teacher, and never gives it up too early (R5). All deadlines are exact."""

from __future__ import annotations

import pytest

from ring.core.errors import LocalProtocolError
from ring.core.messages import FillId, RefusalCode
from ring.core.stats import DropCause
from tests.ring_core.driver import F0, Driver, lost, microbatch, stalled_ring


def test_the_run_is_lost_at_exactly_the_teacher_timeout_naming_all_replicas_and_errors() -> None:
    ring = Driver(teacher_timeout_s=60.0)
    ring.up("a")
    ring.submit(0, 1)
    ring.wait(10.0)
    ring.down("a", error="connection reset")
    ring.down("b", error="connection refused")
    assert lost(ring.wait(59.999)) == []
    [message] = lost(ring.wait(0.001))
    for part in ("60 s", "2 wait from seq 0 on", "a is down, last error: connection reset", "b is down", "refused"):
        assert part in message
    assert lost(ring.wait(1000.0)) == []
    with pytest.raises(LocalProtocolError, match="after the end of the run"):
        ring.machine.submit(5, *microbatch(5), now_s=ring.now_s)


def test_a_teacher_that_never_appears_is_lost_too() -> None:
    ring = Driver(teacher_timeout_s=30.0)
    [message] = lost(ring.wait(30.0))
    assert "no replica was ever reached" in message
    assert "nothing was submitted yet" in message


def test_no_teacher_is_missed_while_no_work_waits() -> None:
    ring = Driver(depth=2, teacher_timeout_s=30.0)
    ring.up("a")
    ring.submit(0)
    ring.fill_all()
    ring.down("a")
    assert lost(ring.wait(1000.0)) == []
    ring.submit(1)
    assert lost(ring.wait(29.999)) == []
    assert lost(ring.wait(0.001)) != []


def test_what_is_filled_can_still_be_leased_after_the_loss() -> None:
    ring = Driver(depth=2, teacher_timeout_s=30.0)
    ring.up("a")
    ring.submit(0, 1)
    ring.fill(F0)
    ring.down("a")
    assert lost(ring.wait(30.0)) != []
    assert ring.consume() == [0]
    assert ring.lease() is None


def test_a_restart_in_time_saves_the_run() -> None:
    ring = Driver(teacher_timeout_s=60.0)
    ring.up("a")
    ring.submit(0)
    ring.down("a")
    ring.wait(59.0)
    ring.up("a")
    assert lost(ring.wait(50.0)) == []
    ring.fill_all()
    assert ring.consume() == [0]


def test_coming_and_going_without_ever_filling_does_not_put_the_end_off() -> None:
    ring = Driver(teacher_timeout_s=60.0)
    ring.up("a")
    ring.submit(0)
    for _ in range(6):
        ring.down("a")
        assert lost(ring.wait(9.999)) == []
        ring.up("a")
        ring.wait(1.0)
    ring.down("a")
    assert lost(ring.wait(0.1)) != []


def test_a_replica_that_falls_silent_over_every_request_does_not_put_the_end_off() -> None:
    """Small messages pass and large ones never do: it greets, is asked, and is not heard from again."""
    ring = Driver(teacher_timeout_s=60.0, peer_timeout_s=5.0)
    ring.submit(0)
    while not (ended := lost(ring.log)) and ring.now_s < 100.0:
        ring.up("a")
        ring.wait(5.0, heard=False)
        ring.wait(0.25)
    assert "not heard from for 5 s" in ended[0]
    assert ring.now_s < 70.0


def test_a_replica_that_falls_silent_with_nothing_to_do_is_no_worse_a_teacher() -> None:
    ring = Driver(teacher_timeout_s=10.0, peer_timeout_s=5.0)
    ring.up("a")
    ring.wait(5.0, heard=False)
    ring.up("a")
    ring.submit(0)
    assert lost(ring.wait(12.0)) == []


def test_a_replica_that_failed_counts_as_a_teacher_again_after_its_next_fill() -> None:
    ring = Driver(teacher_timeout_s=10.0, request_timeout_s=60.0)
    ring.up("a")
    ring.submit(0)
    ring.refuse(F0, RefusalCode.FAILED)
    ring.wait(0.5)
    ring.fill_all()
    ring.submit(1)
    assert lost(ring.wait(50.0)) == []


def test_what_a_former_session_left_unanswered_says_nothing_about_the_present_one() -> None:
    ring = stalled_ring()
    given_up = FillId(1, 0, 1)
    ring.down("a")
    ring.up("a")
    ring.do(ring.machine.refused("a", given_up, RefusalCode.CANCELLED, "", now_s=ring.now_s))
    assert ring.machine.stats(now_s=ring.now_s).drops_by_cause[DropCause.NOT_ASKED] == 1


def test_an_accepted_fill_sets_the_time_back() -> None:
    ring = Driver(depth=2, teacher_timeout_s=60.0)
    ring.up("a")
    ring.submit(0, 1)
    ring.down("a")
    ring.wait(50.0)
    ring.up("a")
    ring.fill(min(ring.asked))
    ring.down("a")
    assert lost(ring.wait(59.999)) == []
    assert ring.machine.stats(now_s=ring.now_s).unserved_s == pytest.approx(59.999)
    assert lost(ring.wait(0.001)) != []


def test_a_replica_that_never_answers_in_time_does_not_keep_the_run_waiting_for_ever() -> None:
    """The control plane lives, the data path does not: connecting afresh does not help, so the run ends."""
    ring = Driver(request_timeout_s=20.0, teacher_timeout_s=60.0, peer_timeout_s=5.0)
    ring.up("wedged")
    ring.submit(0)
    messages: list[str] = []
    while not messages and ring.now_s < 200.0:
        messages = lost(ring.wait(1.0))
        if ring.epochs == {} and not messages:
            ring.up("wedged")
    assert 80.0 <= ring.now_s <= 81.0  # one request's time, then the teacher timeout
    assert "wedged" in messages[0]
    assert "was not filled within 20 s" in messages[0]


@pytest.mark.parametrize("answer", ["wrong", "failed"])
def test_a_replica_that_only_answers_wrongly_does_not_keep_the_run_waiting_for_ever(answer: str) -> None:
    ring = Driver(teacher_timeout_s=60.0)
    ring.up("bad")
    ring.submit(0)
    messages: list[str] = []
    while not messages and ring.now_s < 200.0:
        if ring.epochs == {}:
            ring.up("bad")
        messages = lost(ring.wait(2.0))  # it takes its time to answer, and is up meanwhile
        for fill in list(ring.asked):
            if answer == "wrong":
                ring.answer(fill, ring.header(fill, num_rows=99))
            else:
                ring.refuse(fill, RefusalCode.FAILED, "CUDA error")
    assert 62.0 <= ring.now_s <= 64.0  # from its first wrong answer on
    assert ("row count is 99" if answer == "wrong" else "CUDA error") in messages[0]


def test_the_reason_for_dropping_a_replica_is_not_hidden_by_what_follows() -> None:
    ring = Driver(teacher_timeout_s=60.0)
    ring.up("a")
    ring.submit(0)
    ring.answer(F0, ring.header(F0, num_rows=99))
    ring.down("a", error="connection refused")
    [message] = lost(ring.wait(60.0))
    assert "connection refused" in message
    assert "row count is 99" in message


def test_one_serving_replica_is_enough() -> None:
    ring = Driver(depth=2, teacher_timeout_s=10.0, request_timeout_s=5.0, peer_timeout_s=3.0)
    ring.up("bad")
    ring.up("good")
    for seq in range(40):
        ring.submit(seq)
        for fill, (name, _) in list(ring.asked.items()):
            if name == "bad":
                ring.refuse(fill, RefusalCode.FAILED)
        ring.wait(1.0)
        ring.fill_all()
        assert ring.consume() == [seq]
    assert lost(ring.log) == []
