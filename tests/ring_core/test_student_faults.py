"""The student's machine when replicas die, stall, refuse and come back: fencing (R4), re-dispatch and loss (R5).

All deadlines are in virtual time and exact.
"""

from __future__ import annotations

import pytest

from ring.core.actions import Action, CancelFill, Disarm, DropReplica, Lost, Note, SendPing
from ring.core.errors import LocalProtocolError
from ring.core.messages import FillId, RefusalCode
from ring.core.stats import DropCause, RetryCause
from tests.ring_core.driver import Driver, microbatch

F0 = FillId(0, 0, 0)


def dropped(actions: list[Action]) -> list[str]:
    return [action.replica for action in actions if isinstance(action, DropReplica)]


def lost(actions: list[Action]) -> list[str]:
    return [action.message for action in actions if isinstance(action, Lost)]


# ---- deadlines -------------------------------------------------------------------------------------------------


def test_an_attempt_is_given_up_at_exactly_its_deadline() -> None:
    ring = Driver(request_timeout_s=10.0, peer_timeout_s=100.0)
    ring.up("a")
    ring.up("b")
    ring.wait(3.0)
    ring.submit(0)
    ring.now_s = 12.999
    assert not any(isinstance(a, Disarm) for a in ring.do(ring.machine.on_timer(now_s=12.999)))
    actions = ring.do(ring.machine.on_timer(now_s=13.0))
    assert [type(a).__name__ for a in actions if not isinstance(a, SendPing)] == [
        "Note", "Disarm", "CancelFill", "Arm", "Send",
    ]  # fmt: skip
    assert ring.sends(actions) == [("b", FillId(0, 1, 1))]


def test_case_62_a_stopped_teacher_loses_its_request_and_is_never_reported_as_done() -> None:
    """SIGSTOP: the control plane is silent too, so the silence ends it before the request's deadline does."""
    ring = Driver(request_timeout_s=60.0, peer_timeout_s=5.0)
    ring.up("a")
    ring.submit(0)
    ring.begin(F0)
    ring.up("b")
    done: list[Action] = []
    while ring.now_s < 6.0:
        ring.machine.heard("b", now_s=ring.now_s)
        done += ring.wait(0.5, heard=False)
    assert dropped(done) == ["a"]
    assert ring.sends(done) == [("b", FillId(0, 1, 1))]
    assert ring.lease() is None
    assert ring.machine.stats(now_s=6.0).num_quarantined == 1
    ring.fill(FillId(0, 1, 1))
    assert ring.consume() == [0]
    ring.land(F0)  # it wakes up: into quarantine, where nobody reads
    assert ring.machine.stats(now_s=6.0).num_quarantined == 0


def test_case_51_one_late_answer_is_not_taken_for_the_next_requests() -> None:
    ring = Driver(depth=1, request_timeout_s=0.1, peer_timeout_s=100.0)
    ring.up("a")
    ring.up("b")
    ring.submit(0)
    ring.begin(F0)
    late = ring.header(F0)
    ring.wait(0.1)
    ring.fill(FillId(0, 1, 1))
    assert ring.consume() == [0]
    [(name, next_fill)] = ring.sends(ring.submit(1))
    assert name == "b"  # a is stalled
    del ring.pending[F0]
    actions = ring.do(ring.machine.arrived("a", F0, late.num_bytes, late, None, now_s=ring.now_s))
    assert [a.text for a in actions if isinstance(a, Note)] != []
    assert ring.lease() is None
    ring.fill(next_fill)
    assert ring.consume() == [1]
    assert ring.machine.stats(now_s=0.1).drops_by_cause[DropCause.LATE] == 1


def test_a_stalled_replica_loses_all_its_requests_to_the_others() -> None:
    ring = Driver(depth=4, num_spares=4, request_timeout_s=10.0, peer_timeout_s=100.0)
    ring.up("a")
    ring.submit(0, 1)
    ring.wait(4.0)
    ring.submit(2, 3)
    ring.up("b")
    actions = ring.wait(6.0)
    assert [a.fill.seq for a in actions if isinstance(a, CancelFill)] == [0, 1, 2, 3]
    assert [(name, fill.seq) for name, fill in ring.sends(actions)] == [("b", seq) for seq in range(4)]
    causes = ring.machine.stats(now_s=ring.now_s).retries_by_cause
    assert (causes[RetryCause.DEADLINE], causes[RetryCause.STALLED]) == (2, 2)
    assert dropped(actions) == []


def stalled_ring() -> Driver:
    """Replica a is stalled with seqs 0 and 1 given up and being written; b has them now."""
    ring = Driver(depth=4, num_spares=4, request_timeout_s=10.0, peer_timeout_s=100.0)
    ring.up("a")
    ring.submit(0, 1)
    ring.begin(F0)
    ring.up("b")
    ring.wait(10.0)
    return ring


def test_a_stalled_replica_is_not_asked_until_its_data_path_shows_life() -> None:
    ring = stalled_ring()
    assert [name for name, _ in ring.sends(ring.submit(2))] == ["b"]
    ring.machine.heard("a", now_s=ring.now_s)  # an answered ping proves nothing about fills
    assert [name for name, _ in ring.sends(ring.submit(3))] == ["b"]
    ring.refuse(FillId(1, 0, 1), RefusalCode.CANCELLED)
    assert ring.machine.stats(now_s=10.0).replicas[0].state == "up"
    assert "a" in {name for name, _ in ring.sends(ring.down("b"))}


def test_its_own_late_fill_shows_life_and_frees_its_slot() -> None:
    ring = stalled_ring()
    quarantined = ring.machine.stats(now_s=10.0).num_quarantined
    header = ring.header(F0)
    del ring.pending[F0]
    ring.do(ring.machine.arrived("a", F0, header.num_bytes, header, None, now_s=10.0))
    stats = ring.machine.stats(now_s=10.0)
    assert (stats.num_quarantined, stats.replicas[0].state) == (quarantined - 1, "up")


def test_a_stalled_replica_that_shows_no_life_is_connected_afresh() -> None:
    ring = stalled_ring()
    ring.fill_all()
    assert dropped(ring.wait(9.999)) == []
    assert dropped(ring.wait(0.001)) == ["a"]
    assert "seq 0 was not filled within 10 s" in next(a.error for a in ring.log if isinstance(a, DropReplica))


def test_the_only_replica_is_dropped_when_it_stalls_so_that_it_is_connected_afresh() -> None:
    ring = Driver(request_timeout_s=10.0, peer_timeout_s=100.0)
    ring.up("a")
    ring.submit(0, 1)
    actions = ring.wait(10.0)
    assert dropped(actions) == ["a"]
    assert [(name, fill.seq, fill.attempt) for name, fill in ring.sends(ring.up("a"))] == [("a", 0, 1), ("a", 1, 1)]


def test_when_the_last_usable_replica_goes_the_stalled_ones_are_connected_afresh() -> None:
    ring = stalled_ring()
    assert dropped(ring.down("b")) == ["a"]


def test_a_missed_deadline_outweighs_all_that_was_known_of_a_replicas_speed() -> None:
    ring = Driver(request_timeout_s=10.0, peer_timeout_s=100.0)
    ring.up("a")
    for seq in range(10):
        ring.submit(seq)
        ring.wait(0.1)
        ring.fill_all()
        ring.consume()
    assert ring.machine.stats(now_s=1.0).replicas[0].seconds_per_token == pytest.approx(0.01)
    ring.submit(10)
    ring.up("b")
    ring.wait(10.0)
    assert ring.machine.stats(now_s=11.0).replicas[0].seconds_per_token == pytest.approx(1.0)  # 10 s for 10 tokens


# ---- pings and silence ------------------------------------------------------------------------------------------


def test_every_replica_is_pinged_at_the_interval() -> None:
    ring = Driver(ping_interval_s=2.0)
    ring.up("a")
    ring.wait(1.0)
    ring.up("b")
    assert ring.machine.next_deadline_s() == 2.0
    assert [(a.replica) for a in ring.wait(4.0) if isinstance(a, SendPing)] == ["a", "b", "a", "b"]


def test_a_silent_replica_is_down_at_exactly_the_peer_timeout() -> None:
    ring = Driver(peer_timeout_s=5.0, ping_interval_s=4.0)
    ring.up("a")
    ring.wait(3.0)  # heard at 3
    ring.wait(4.999, heard=False)
    assert dropped(ring.log) == []
    assert dropped(ring.wait(0.001, heard=False)) == ["a"]


def test_each_replica_is_silent_on_its_own() -> None:
    ring = Driver(peer_timeout_s=5.0, ping_interval_s=4.0)
    ring.up("a")
    ring.up("b")
    ring.wait(3.0, heard=False)
    ring.machine.heard("a", now_s=3.0)
    assert dropped(ring.wait(2.0, heard=False)) == ["b"]
    assert dropped(ring.wait(3.0, heard=False)) == ["a"]


@pytest.mark.parametrize("answer", ["fill", "refusal"])
def test_any_answer_breaks_the_silence(answer: str) -> None:
    ring = Driver(peer_timeout_s=5.0)
    ring.up("a")
    ring.submit(0)
    ring.wait(4.0, heard=False)
    ring.fill(F0) if answer == "fill" else ring.refuse(F0, RefusalCode.FAILED)
    assert dropped(ring.wait(4.75, heard=False)) == []
    assert dropped(ring.wait(0.25, heard=False)) == ["a"]


def test_nothing_is_said_to_a_replica_that_is_down() -> None:
    ring = Driver()
    ring.up("a")
    ring.submit(0)
    ring.down("a")
    before = len(ring.log)
    ring.wait(30.0)
    assert ring.log[before:] == []


# ---- fencing (R4) ----------------------------------------------------------------------------------------------


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


# ---- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code", [RefusalCode.FAILED, RefusalCode.OVERLOADED, RefusalCode.EXPIRED, RefusalCode.DRAINING]
)
def test_a_refused_request_goes_to_another_replica_at_once(code: RefusalCode) -> None:
    ring = Driver()
    ring.up("a")
    ring.submit(0)
    ring.up("b")
    assert ring.sends(ring.refuse(F0, code)) == [("b", FillId(0, 1, 1))]


def test_a_request_that_all_refuse_is_retried_after_half_a_second_doubling_to_ten() -> None:
    ring = Driver(depth=1, teacher_timeout_s=1000.0)
    ring.up("a")
    ring.up("b")
    ring.submit(0)
    ring.refuse(max(ring.asked), RefusalCode.FAILED)
    for delay_s in (0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0):
        assert ring.sends(ring.refuse(max(ring.asked), RefusalCode.FAILED)) == []
        assert ring.sends(ring.wait(delay_s - 0.001)) == []
        assert len(ring.sends(ring.wait(0.001))) == 1
        ring.refuse(max(ring.asked), RefusalCode.FAILED)  # the other one, at once


def test_a_replica_that_joins_is_asked_for_what_others_refused_without_waiting() -> None:
    ring = Driver()
    ring.up("a")
    ring.submit(0)
    ring.refuse(F0, RefusalCode.FAILED)
    assert [name for name, _ in ring.sends(ring.up("b"))] == ["b"]


def test_a_draining_replica_finishes_what_it_holds_and_is_not_asked_again() -> None:
    ring = Driver(depth=4)
    ring.up("a")
    ring.submit(0, 1)
    ring.up("b")
    ring.refuse(FillId(1, 0, 1), RefusalCode.DRAINING)
    assert {name for name, _ in ring.sends(ring.submit(2, 3))} == {"b"}
    ring.fill_all()
    assert ring.consume() == [0, 1, 2, 3]
    assert {r.name: r.state for r in ring.machine.stats(now_s=0.0).replicas} == {"a": "draining", "b": "up"}
    assert ring.machine.stats(now_s=0.0).replicas[0].fills == 1


def test_a_restarted_replica_is_asked_again_for_what_it_refused_while_draining() -> None:
    ring = Driver()
    ring.up("a")
    ring.submit(0)
    ring.refuse(F0, RefusalCode.DRAINING)
    ring.down("a", error="goodbye")
    assert [(name, fill.seq, fill.attempt) for name, fill in ring.sends(ring.up("a"))] == [("a", 0, 1)]


# ---- replicas come and go --------------------------------------------------------------------------------------


def test_the_requests_of_a_dead_replica_go_to_the_others_in_seq_order() -> None:
    ring = Driver(depth=4, num_spares=4)
    ring.up("a")
    ring.submit(0, 1, 2, 3)
    ring.up("b")
    assert [(n, f.seq, f.attempt) for n, f in ring.sends(ring.down("a"))] == [("b", seq, 1) for seq in range(4)]
    assert ring.machine.stats(now_s=0.0).retries_by_cause[RetryCause.DOWN] == 4


def test_replica_down_is_idempotent_and_keeps_the_last_error() -> None:
    ring = Driver()
    ring.up("a")
    ring.submit(0)
    ring.down("a", error="first")
    assert ring.down("a", error="second") == []
    assert ring.machine.stats(now_s=0.0).replicas[0].last_error == "second"


def test_work_in_flight_elsewhere_is_left_alone_when_a_replica_dies() -> None:
    ring = Driver(depth=2)
    ring.up("a")
    ring.up("b")
    ring.submit(0, 1)
    ring.down("b")
    ring.fill(F0)
    assert ring.machine.stats(now_s=0.0).retries == 1
    ring.fill_all()
    assert ring.consume() == [0, 1]


# ---- the teacher is lost (R5) ----------------------------------------------------------------------------------


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
            ring.fill(fill, num_rows=99) if answer == "wrong" else ring.refuse(fill, RefusalCode.FAILED, "CUDA error")
    assert 62.0 <= ring.now_s <= 64.0  # from its first wrong answer on
    assert ("row count is 99" if answer == "wrong" else "CUDA error") in messages[0]


def test_the_reason_for_dropping_a_replica_is_not_hidden_by_what_follows() -> None:
    ring = Driver(teacher_timeout_s=60.0)
    ring.up("a")
    ring.submit(0)
    ring.fill(F0, num_rows=99)
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
            ring.refuse(fill, RefusalCode.FAILED) if name == "bad" else None
        ring.wait(1.0)
        ring.fill_all()
        assert ring.consume() == [seq]
    assert lost(ring.log) == []
