"""The student's machine when replicas die, stall, refuse and come back (R5). All deadlines are virtual and exact."""

from __future__ import annotations

import pytest

from ring.core.actions import (
    Action,
    CancelFill,
    Disarm,
    DropReplica,
    Note,
    SendPing,
)
from ring.core.messages import FillId, RefusalCode
from ring.core.stats import DropCause, RetryCause
from tests.ring_core.driver import F0, Driver, dropped, lost, microbatch, stalled_ring

# ---- deadlines -------------------------------------------------------------------------------------------------


def test_a_stalled_replica_whose_late_fill_the_transport_dropped_is_asked_again() -> None:
    ring = Driver(depth=1, request_timeout_s=10.0, peer_timeout_s=100.0)
    ring.up("a")
    ring.up("b")
    ring.submit(0)
    ring.wait(10.0)
    stats = {replica.name: replica.state for replica in ring.machine.stats(now_s=ring.now_s).replicas}
    assert stats == {"a": "stalled", "b": "up"}
    ring.do(ring.machine.came_late("a", 2, now_s=ring.now_s))
    after = ring.machine.stats(now_s=ring.now_s)
    assert {replica.name: replica.state for replica in after.replicas} == {"a": "up", "b": "up"}
    assert after.drops_by_cause[DropCause.LATE] == 2
    assert lost(ring.wait(9.0)) == []
    ring.do(ring.machine.came_late("a", 1, now_s=ring.now_s))  # it is no news that it is up
    ring.do(ring.machine.came_late("nobody", 1, now_s=ring.now_s))


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


@pytest.mark.case(62)
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


@pytest.mark.case(51)
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
    if answer == "fill":
        ring.fill(F0)
    else:
        ring.refuse(F0, RefusalCode.FAILED)
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


@pytest.mark.parametrize("slept_s", [7.0, 3600.0])
def test_time_in_which_this_side_slept_is_held_against_nobody(slept_s: float) -> None:
    """It was stopped, or its machine suspended: no ping was open that a replica could have answered."""
    ring = Driver(peer_timeout_s=5.0, request_timeout_s=60.0, ping_interval_s=1.0)
    ring.up("a")
    ring.up("b")
    ring.submit(0, 1)
    ring.wait(0.5)
    ring.now_s += slept_s
    actions = ring.do(ring.machine.on_timer(now_s=ring.now_s))
    assert [a.replica for a in actions if isinstance(a, SendPing)] == ["a", "b"]
    assert len(actions) == 2, "nothing is given up"
    ring.machine.heard("a", now_s=ring.now_s)
    actions = ring.wait(5.0, heard=False)
    assert dropped(actions) == ["b", "a"], "and from then on silence counts"


def test_what_is_heard_after_this_side_slept_has_its_deadline_from_then_on() -> None:
    """The pump takes messages and fills before it looks at the time."""
    ring = Driver(depth=2, peer_timeout_s=5.0, request_timeout_s=60.0, ping_interval_s=1.0)
    ring.up("a")
    ring.submit(0)
    ring.wait(0.5)
    ring.now_s += 50.0
    ring.fill_all()
    ring.consume()
    ring.submit(1)
    ring.do(ring.machine.on_timer(now_s=ring.now_s))
    woke_s = ring.now_s
    while not dropped(ring.wait(0.25, heard=False)):
        assert ring.now_s < woke_s + 6.0
    assert ring.now_s == woke_s + 5.0


def test_what_was_asked_while_nobody_looked_is_put_off_no_further_than_anew() -> None:
    """The trainer asks in the midst of a gap that counts as one only later."""
    ring = Driver(depth=2, peer_timeout_s=5.0, request_timeout_s=60.0, ping_interval_s=1.0)
    ring.up("a")
    ring.now_s = 1.0 + 2.4  # a ping has been due since 1
    ring.submit(0)
    asked_s = ring.now_s
    ring.now_s = 1.0 + 2.6
    ring.do(ring.machine.on_timer(now_s=ring.now_s))
    attempts = ring.machine._attempts
    assert attempts.deadlines.first_s() == ring.now_s + 60.0
    ring.now_s += 0.5
    ring.fill_all()
    rate_s = ring.machine.stats(now_s=ring.now_s).replicas[0].seconds_per_token
    assert rate_s is not None
    assert 0.499 <= rate_s * microbatch(0)[1].cost_tokens <= ring.now_s - asked_s, "it was not asked in the future"


def test_a_run_is_not_lost_over_time_in_which_its_trainer_slept() -> None:
    ring = Driver(teacher_timeout_s=60.0, peer_timeout_s=5.0, ping_interval_s=1.0)
    ring.up("a")
    ring.submit(0)
    ring.down("a")
    ring.wait(20.0)
    ring.now_s += 100.0
    assert lost(ring.do(ring.machine.on_timer(now_s=ring.now_s))) == []
    assert lost(ring.wait(38.0)) == []
    assert len(lost(ring.wait(2.0))) == 1, "what it waited before and after counts"


def test_replicas_that_gave_the_trainer_up_while_it_slept_are_believed_when_they_are_back() -> None:
    ring = Driver(teacher_timeout_s=60.0, request_timeout_s=300.0, peer_timeout_s=5.0, ping_interval_s=1.0)
    for name in "ab":
        ring.up(name, epoch=name)
    ring.submit(0, 1)
    ring.wait(0.5)
    ring.now_s += 3600.0
    for name in "ab":
        ring.down(name, error="it said goodbye: not heard from for 60 s")
        ring.up(name, epoch=name)
    assert lost(ring.wait(70.0)) == [], "they are at work"
    ring.fill_all()
    assert ring.consume() == [0, 1]


def test_a_turn_that_comes_a_little_late_puts_nothing_off() -> None:
    ring = Driver(peer_timeout_s=5.0, ping_interval_s=1.0)
    ring.up("a")
    for _ in range(3):
        ring.now_s += 1.0 + 2.4
        ring.do(ring.machine.on_timer(now_s=ring.now_s))
    assert dropped(ring.log) == ["a"]


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


# ---- replicas that fail again and again --------------------------------------------------------------------------


def asked_until(ring: Driver, honest: str, *, at_most: int) -> list[str]:
    """Answer seq 0 wrongly until `honest` is asked for it; each liar connects again at once. Returns who was asked."""
    asked = []
    while len(asked) < at_most:
        while not ring.asked:
            ring.wait(0.5)
        fill, (name, _) = next(iter(ring.asked.items()))
        asked.append(name)
        if name == honest:
            break
        ring.answer(fill, ring.header(fill, input_hash=b"x"))
        ring.wait(0.3)
        ring.up(name)
    return asked


def test_replicas_that_lie_for_ever_cannot_keep_a_request_from_an_honest_one() -> None:
    """Found by the simulator: a and b lied in turn, each back before the other had answered; c was never asked, and
    as c served, the run was not lost either."""
    ring = Driver(depth=1, request_timeout_s=100.0, peer_timeout_s=1000.0)
    for name in "abc":
        ring.up(name)
    ring.submit(0)
    assert asked_until(ring, "c", at_most=9) == ["a", "b", "c"]


def test_one_failure_does_not_put_an_honest_replica_behind_those_that_lie_for_ever() -> None:
    ring = Driver(depth=1, request_timeout_s=100.0, peer_timeout_s=1000.0)
    ring.up("c")
    ring.submit(0)
    ring.up("a")
    ring.up("b")
    ring.refuse(F0, RefusalCode.FAILED)
    ring.down("c")
    ring.up("c")
    asked = asked_until(ring, "c", at_most=9)
    assert asked[-1] == "c"
    assert len(asked) <= 5


def test_a_refusal_is_forgiven_where_all_others_lie_for_ever() -> None:
    ring = Driver(depth=1, request_timeout_s=100.0, peer_timeout_s=1000.0)
    ring.up("c")
    ring.submit(0)
    ring.up("a")
    ring.up("b")
    ring.refuse(F0, RefusalCode.FAILED)
    asked = asked_until(ring, "c", at_most=12)
    assert asked[-1] == "c"
    assert len(asked) <= 7


def test_a_replica_that_failed_is_tried_with_requests_that_nobody_failed_yet() -> None:
    """Otherwise it would never be asked again, as long as another serves."""
    ring = Driver(depth=2, request_timeout_s=100.0, peer_timeout_s=1000.0)
    ring.up("a")
    ring.submit(0)
    ring.up("b")
    assert ring.sends(ring.refuse(F0, RefusalCode.FAILED)) == [("b", FillId(0, 1, 1))]
    assert ring.sends(ring.submit(1)) == [("a", FillId(1, 0, 0))]
