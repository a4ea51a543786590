"""No slot is used again while a given-up write may still land in it (R4)."""

from __future__ import annotations

from ring.core.actions import (
    Disarm,
)
from ring.core.messages import FillId, RefusalCode
from tests.ring_core.driver import F0, Driver, lost, stalled_ring


def test_late_completion_cannot_fill_a_live_slot() -> None:
    ring = Driver(depth=1, num_spares=1)
    ring.up("a")
    ring.submit(0)
    ring.begin(F0)
    ring.down("a")
    ring.up("b")
    [fill] = [fill for fill in ring.asked if fill.attempt == 1]
    assert fill.slot == 1
    for seq in range(5):  # the run goes on beside the quarantine, in the spare
        ring.fill(max(ring.asked))
        assert ring.consume() == [seq]
        assert all(fill.slot == 1 for _, fill in ring.sends(ring.submit(seq + 1)))
    ring.land(F0)
    assert ring.machine.stats(now_s=0.0).num_quarantined == 0


def test_with_no_spare_left_nothing_is_requested_until_a_fence() -> None:
    ring = Driver(depth=2, num_spares=1)
    ring.up("a")
    ring.submit(0, 1)
    for fill in (F0, FillId(1, 0, 1)):
        ring.begin(fill)
    ring.up("b")
    actions = ring.down("a")
    assert ring.sends(actions) == [("b", FillId(0, 1, 2))]
    assert ring.machine.stats(now_s=0.0).waiting == 1
    ring.fill(FillId(0, 1, 2))
    assert ring.sends(ring.land(FillId(1, 0, 1))) == [("b", FillId(1, 1, 1))]


def ring_without_a_free_slot() -> Driver:
    """Replica b serves, and both slots may still be written by a, which is gone from the control plane."""
    ring = Driver(depth=2, num_spares=0, teacher_timeout_s=30.0)
    ring.up("a")
    ring.submit(0, 1)
    for fill in (F0, FillId(1, 0, 1)):
        ring.begin(fill)
    ring.up("b")
    assert ring.sends(ring.down("a")) == []
    return ring


def test_a_ring_whose_slots_are_all_in_quarantine_ends_as_one_without_a_teacher() -> None:
    """R4, then R5: a replica that serves is of no use when there is no slot that it could fill."""
    ring = ring_without_a_free_slot()
    assert lost(ring.wait(29.9)) == []
    [message] = lost(ring.wait(0.1))
    assert "2 of 2 slots may still be written by a" in message
    assert "b is up" in message


def test_a_fence_in_time_lets_such_a_ring_go_on() -> None:
    ring = ring_without_a_free_slot()
    ring.wait(29.0)
    assert ring.sends(ring.land(F0)) == [("b", FillId(0, 1, 0))]
    ring.fill(FillId(0, 1, 0))
    assert ring.consume() == [0]
    assert ring.sends(ring.wait(0.0)) == []
    ring.fill(FillId(1, 1, 0))
    assert ring.consume() == [1]
    assert lost(ring.wait(100.0)) == []


def test_a_filled_slot_behind_a_request_that_finds_none_does_not_hold_the_end_up() -> None:
    """Seq 1 is filled, yet seq 0 must be delivered before it."""
    ring = Driver(depth=2, num_spares=0, teacher_timeout_s=30.0)
    ring.up("a")
    ring.up("b")
    assert ring.sends(ring.submit(0, 1)) == [("a", F0), ("b", FillId(1, 0, 1))]
    ring.begin(F0)
    ring.fill(FillId(1, 0, 1))
    ring.down("a")
    assert len(lost(ring.wait(30.0))) == 1


def test_while_the_trainer_reads_a_slot_the_ring_is_not_out_of_slots() -> None:
    ring = Driver(depth=2, num_spares=0, teacher_timeout_s=30.0)
    ring.up("a")
    ring.up("b")
    ring.submit(0, 1)
    ring.begin(FillId(1, 0, 1))
    ring.fill(F0)
    assert ring.lease() is not None
    ring.down("b")
    assert lost(ring.wait(100.0)) == []
    assert ring.sends(ring.release(0)) == [("a", FillId(1, 1, 0))]


def test_with_no_spares_at_all_a_fence_at_once_is_enough() -> None:
    ring = Driver(depth=3, num_spares=0)
    ring.up("a")
    ring.submit(0, 1, 2)
    ring.up("b")
    assert [(name, fill.seq) for name, fill in ring.sends(ring.down("a"))] == [("b", 0), ("b", 1), ("b", 2)]


def test_a_fence_for_an_unknown_or_live_fill_changes_nothing() -> None:
    ring = Driver()
    ring.up("a")
    ring.submit(0)
    assert ring.machine.fenced(F0, now_s=0.0) == []
    assert ring.machine.fenced(FillId(9, 9, 3), now_s=0.0) == []
    ring.fill(F0)
    assert ring.machine.fenced(F0, now_s=0.0) == []
    assert ring.consume() == [0]


def test_a_refusal_is_passed_to_the_data_plane_as_the_replicas_word() -> None:
    """A one-sided data plane can't see by itself that a write will never begin."""
    ring = Driver(depth=1)
    ring.up("a")
    ring.up("b")
    ring.submit(0)
    assert Disarm("a", F0, refused=True) in ring.refuse(F0, RefusalCode.FAILED)
    ring = stalled_ring()
    assert [a for a in ring.log if isinstance(a, Disarm) and a.fill == F0] == [Disarm("a", F0)]
    ring.begun.remove(F0)  # the data plane could not know that the write had not begun
    assert Disarm("a", F0, refused=True) in ring.refuse(F0, RefusalCode.CANCELLED)
    assert ring.machine.stats(now_s=10.0).num_quarantined == 0


def test_an_earlier_seq_is_never_starved_of_a_slot_by_later_ones() -> None:
    """Seq 0 backs off while its slot is free; were it given to seq 1, nobody could lease anything any more."""
    ring = Driver(depth=1, num_spares=0)
    ring.up("a")
    ring.submit(0)
    ring.submit(1)
    assert ring.sends(ring.refuse(F0, RefusalCode.FAILED)) == []
    assert ring.machine.stats(now_s=0.0).num_free == 1
    assert ring.sends(ring.wait(0.5)) == [("a", FillId(0, 1, 0))]


def test_a_later_seq_does_not_take_the_last_slot_of_an_earlier_one_that_backs_off() -> None:
    ring = Driver(depth=2, num_spares=0)
    ring.up("a")
    ring.up("b")
    assert ring.sends(ring.submit(0, 1)) == [("a", F0), ("b", FillId(1, 0, 1))]
    ring.begin(FillId(1, 0, 1))
    ring.down("b")  # its write may still land, so there is one slot left for both
    assert ring.sends(ring.refuse(F0, RefusalCode.FAILED)) == []
    assert ring.sends(ring.wait(0.5)) == [("a", FillId(0, 1, 0))]


def test_cancels_that_are_never_answered_take_no_memory() -> None:
    """zmq drops a fill that was disarmed before it began: neither it nor a refusal ever comes."""
    ring = Driver(depth=4, num_spares=2, request_timeout_s=10.0, peer_timeout_s=100.0)
    ring.up("a")
    ring.up("b")
    num_unanswered = 0
    for _ in range(6):
        while ring.machine.can_submit:
            ring.submit(len(ring.submitted))
        for fill in [fill for fill, (name, _) in ring.asked.items() if name == "b"]:
            ring.refuse(fill, RefusalCode.FAILED)  # so a has them all
        ring.wait(10.0)
        given_up = [fill for fill, (name, _) in ring.asked.items() if name == "a"]
        num_unanswered += len(given_up) - 1
        for fill in given_up[1:]:
            del ring.asked[fill]
        ring.refuse(given_up[0], RefusalCode.CANCELLED)  # it lives, so it will be asked again
        ring.fill_all()
        ring.consume()
    assert num_unanswered > 6
    assert len(ring.machine._fleet.add("a").cancelled) <= 6
