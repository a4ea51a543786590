"""The student's machine: order, memory, acceptance and sharing out (R1-R3, R6, R9). Faults: test_student_faults.py."""

from __future__ import annotations

import dataclasses
import pickle
from collections import Counter

import pytest

from ring.core.actions import Arm, Deliverable, Disarm, DropReplica, Fatal, Note, Send
from ring.core.config import RingConfig
from ring.core.errors import ConfigError, LocalProtocolError
from ring.core.messages import FillId, HeadRequest, RefusalCode, WireDtype
from ring.core.stats import DropCause, RetryCause
from tests.ring_core.driver import Driver, microbatch

# ---- delivery (R1) ---------------------------------------------------------------------------------------------


def test_fills_are_delivered_in_seq_order_whatever_the_order_of_arrival() -> None:
    ring = Driver(depth=4)
    ring.up("a")
    fills = [fill for _, fill in ring.sends(ring.submit(0, 1, 2, 3))]
    for fill in (fills[2], fills[1], fills[3]):
        actions = ring.fill(fill)
        assert not any(isinstance(action, Deliverable) for action in actions)
        assert ring.lease() is None
    assert Deliverable(0) in ring.fill(fills[0])
    assert ring.consume() == [0, 1, 2, 3]
    assert ring.lease() is None


def test_a_fill_is_delivered_once_however_often_it_arrives() -> None:
    ring = Driver()
    ring.up("a")
    [(_, fill)] = ring.sends(ring.submit(0))
    header = ring.header(fill)
    ring.fill(fill)
    for _ in range(2):
        ring.do(ring.machine.arrived("a", fill, header.num_bytes, header, None, now_s=0.0))
    assert ring.consume() == [0]
    ring.do(ring.machine.arrived("a", fill, header.num_bytes, header, None, now_s=0.0))
    assert ring.lease() is None
    stats = ring.machine.stats(now_s=0.0)
    assert (stats.fills, stats.drops_by_cause[DropCause.NOT_ASKED]) == (1, 3)


def test_seqs_may_start_negative_and_have_gaps() -> None:
    ring = Driver(depth=4)
    ring.up("a")
    ring.submit(-3, -1, 0, 7)
    ring.fill_all()
    assert ring.consume() == [-3, -1, 0, 7]


def test_a_lease_names_the_slot_the_fill_and_its_header() -> None:
    ring = Driver()
    ring.up("a")
    [(_, fill)] = ring.sends(ring.submit(5))
    header = ring.header(fill)
    ring.fill(fill)
    lease = ring.lease()
    assert lease is not None
    assert (lease.seq, lease.slot, lease.fill, lease.replica, lease.header) == (5, fill.slot, fill, "a", header)


def test_several_leases_may_be_held_and_released_in_any_order() -> None:
    ring = Driver(depth=3)
    ring.up("a")
    ring.submit(0, 1, 2)
    ring.fill_all()
    assert [lease.seq for lease in (ring.lease(), ring.lease(), ring.lease()) if lease is not None] == [0, 1, 2]
    for seq in (2, 0, 1):
        ring.release(seq)
    assert ring.machine.stats(now_s=0.0).num_free == 5


# ---- memory is bounded (R2) ------------------------------------------------------------------------------------


def test_at_most_depth_requests_are_out_whatever_is_submitted() -> None:
    ring = Driver(depth=3, num_spares=2, max_pending=5)
    ring.up("a")
    assert ring.machine.can_submit == 5
    assert len(ring.sends(ring.submit(0, 1, 2, 3, 4, 5, 6, 7))) == 3
    assert ring.machine.can_submit == 0
    ring.fill_all()
    assert ring.machine.stats(now_s=0.0).num_in_flight == 0  # filled slots hold their place
    lease = ring.lease()
    assert lease is not None
    assert ring.machine.stats(now_s=0.0).num_in_flight == 0  # so do leased ones
    assert [fill.seq for _, fill in ring.sends(ring.release(0))] == [3]
    assert ring.machine.can_submit == 1


@pytest.mark.parametrize("depth", [1, 2, 8])
def test_every_depth_streams_to_the_end_in_its_slots_alone(depth: int) -> None:
    ring = Driver(depth=depth, num_spares=0)
    ring.up("a")
    todo, got = list(range(30)), []
    while len(got) < 30:
        while todo and ring.machine.can_submit:
            ring.submit(todo.pop(0))
        ring.fill_all()
        got += ring.consume()
    assert got == list(range(30))
    assert {fill.slot for _, fill in ring.sends(ring.log)} == set(range(depth))


def test_requests_submitted_before_any_replica_go_to_the_first_one() -> None:
    ring = Driver(depth=2)
    assert ring.sends(ring.submit(0, 1)) == []
    assert [(name, fill.seq) for name, fill in ring.sends(ring.up("a"))] == [("a", 0), ("a", 1)]


def test_a_slot_is_armed_with_the_expected_bytes_before_its_request_is_sent() -> None:
    ring = Driver()
    ring.up("a")
    payload, expect = microbatch(0)
    arm, send = ring.submit(0)
    assert arm == Arm("a", FillId(0, 0, 0), expect.num_bytes)
    assert isinstance(send, Send)
    assert (send.request.fill, send.request.payload, send.request.time_left_s) == (FillId(0, 0, 0), payload, 60.0)


# ---- refused calls change nothing ------------------------------------------------------------------------------


def test_illegal_calls_are_refused_whole() -> None:
    ring = Driver(depth=2, max_pending=1)
    ring.up("a")
    ring.submit(0, 1, 2)
    ring.fill(FillId(0, 0, 0))
    ring.lease()
    machine, payload_expect = ring.machine, microbatch(3)
    illegal = [
        lambda: machine.submit(3, *payload_expect, now_s=9.0),  # can_submit is 0
        lambda: machine.submit(2, *payload_expect, now_s=9.0),  # not ascending
        lambda: machine.submit(-5, *payload_expect, now_s=9.0),
        lambda: machine.release(1, now_s=9.0),  # in flight
        lambda: machine.release(2, now_s=9.0),  # pending
        lambda: machine.release(99, now_s=9.0),  # unknown
        lambda: machine.replica_up("a", epoch="e", fingerprint="fp", now_s=9.0),  # up already
        lambda: machine.replica_up("b", epoch="e", fingerprint="other", now_s=9.0),
        lambda: machine.on_timer(now_s=float("nan")),
        lambda: machine.release(0, now_s=float("inf")),
    ]
    for call in illegal:
        before = pickle.dumps(machine)
        with pytest.raises(LocalProtocolError):
            call()
        assert pickle.dumps(machine) == before
    ring.release(0)
    before = pickle.dumps(machine)
    with pytest.raises(LocalProtocolError, match=r"seq 0: RELEASE is illegal.*released already"):
        machine.release(0, now_s=9.0)
    assert pickle.dumps(machine) == before


def test_the_first_replica_sets_the_fingerprint_where_none_was_given() -> None:
    ring = Driver()
    ring.machine = type(ring.machine)(ring.config, epoch="student-1", now_s=0.0)
    ring.do(ring.machine.replica_down("z", error="unreachable", now_s=0.0))
    ring.up("a")
    with pytest.raises(LocalProtocolError, match=r"replica b has fingerprint other.*allowed: the run's, fp"):
        ring.machine.replica_up("b", epoch="e", fingerprint="other", now_s=0.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"depth": 0},
        {"depth": 2.5},
        {"depth": True},
        {"num_spares": -1},
        {"depth": 65_535, "num_spares": 2},
        {"max_pending": 0},
        {"request_timeout_s": 0.0},
        {"teacher_timeout_s": float("nan")},
        {"peer_timeout_s": float("inf")},
        {"peer_timeout_s": 1.0, "ping_interval_s": 1.0},
    ],
)
def test_a_config_out_of_range_is_refused_naming_the_value(changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(changes))}.*got|.*got.*{next(iter(changes))}"):
        RingConfig(**{"depth": 4, **changes})


# ---- acceptance (R3) -------------------------------------------------------------------------------------------

WRONG_ANSWERS = {
    DropCause.WRONG_ROWS: {"num_rows": 5},
    DropCause.WRONG_DTYPE: {"dtype": WireDtype.FP16},  # case 40: bf16 must not come as fp16
    DropCause.WRONG_HASH: {"input_hash": b"other"},
    DropCause.WRONG_FINGERPRINT: {"fingerprint": "other"},
    DropCause.WRONG_FILL: {"fill": FillId(1, 0, 1)},
    DropCause.WRONG_BYTES: {"num_bytes": 63},
}


@pytest.mark.parametrize(("cause", "changes"), WRONG_ANSWERS.items(), ids=lambda value: getattr(value, "name", ""))
def test_a_wrong_answer_is_dropped_asked_again_elsewhere_and_costs_the_connection(
    cause: DropCause, changes: dict[str, object]
) -> None:
    ring = Driver(depth=2)
    ring.up("a")
    ring.submit(0, 1)
    ring.up("b")
    actions = ring.fill(FillId(0, 0, 0), **changes)
    assert [(name, fill.seq, fill.attempt) for name, fill in ring.sends(actions)] == [("b", 0, 1), ("b", 1, 1)]
    [dropped] = [action for action in actions if isinstance(action, DropReplica)]
    assert dropped.replica == "a"
    assert "FillId(seq=0, attempt=0, slot=0)" in dropped.error
    [note] = [action for action in actions if isinstance(action, Note)]
    assert cause.value in note.text
    stats = ring.machine.stats(now_s=0.0)
    assert stats.drops_by_cause[cause] == 1
    assert stats.retries_by_cause == dict.fromkeys(RetryCause, 0) | {RetryCause.WRONG: 1, RetryCause.DOWN: 1}
    ring.fill_all()
    assert ring.consume() == [0, 1]


@pytest.mark.parametrize(
    "changes", [{"student_epoch": "student-0"}, {"teacher_epoch": "a-0"}], ids=["student", "teacher"]
)
def test_a_fill_of_a_former_life_is_never_accepted(changes: dict[str, object]) -> None:
    ring = Driver()
    ring.up("a")
    ring.submit(0)
    ring.fill(FillId(0, 0, 0), **changes)
    assert ring.lease() is None
    assert ring.machine.stats(now_s=0.0).drops_by_cause[DropCause.WRONG_EPOCH] == 1


def test_fewer_bytes_delivered_than_the_header_says_is_a_wrong_answer() -> None:
    ring = Driver()
    ring.up("a")
    ring.submit(0)
    ring.fill(FillId(0, 0, 0), num_bytes=0)
    assert ring.machine.stats(now_s=0.0).drops_by_cause[DropCause.WRONG_BYTES] == 1


def test_a_wrong_answer_is_logged_once_a_replica_and_cause_but_counted_always() -> None:
    ring = Driver()
    for _ in range(3):
        ring.up("a")
        if not ring.submitted:
            ring.submit(0)
        ring.fill(max(ring.asked), num_rows=9)
    assert ring.machine.stats(now_s=0.0).drops_by_cause[DropCause.WRONG_ROWS] == 3
    assert len([a for a in ring.log if isinstance(a, Note) and "wrong_rows" in a.text]) == 1
    assert len([a for a in ring.log if isinstance(a, DropReplica)]) == 3


def test_a_flipped_bit_is_asked_for_again_and_a_third_in_a_row_drops_the_replica() -> None:
    ring = Driver(depth=1)
    ring.up("a")
    ring.submit(0)
    for attempt in range(2):
        actions = ring.fill(max(ring.asked), crc=1)
        assert [(fill.seq, fill.attempt) for _, fill in ring.sends(actions)] == [(0, attempt + 1)]
    actions = ring.fill(max(ring.asked), crc=1)
    assert [a.replica for a in actions if isinstance(a, DropReplica)] == ["a"]
    assert ring.machine.stats(now_s=0.0).drops_by_cause[DropCause.WRONG_CRC] == 3
    assert ring.machine.stats(now_s=0.0).retries_by_cause[RetryCause.CORRUPT] == 3


def test_a_good_fill_in_between_forgives_flipped_bits() -> None:
    ring = Driver(depth=1)
    ring.up("a")
    for seq in range(4):
        ring.submit(seq)
        ring.fill(max(ring.asked), crc=1)
        ring.fill(max(ring.asked))
        assert ring.consume() == [seq]
    assert not any(isinstance(action, DropReplica) for action in ring.log)


def test_a_new_session_starts_with_no_flipped_bits() -> None:
    ring = Driver(depth=1)
    ring.up("a")
    ring.submit(0)
    for _ in range(2):
        ring.fill(max(ring.asked), crc=1)
    ring.down("a")
    ring.up("a")
    ring.fill(max(ring.asked), crc=1)
    assert not any(isinstance(action, DropReplica) for action in ring.log)


def test_the_crc_is_compared_where_it_is_computed() -> None:
    ring = Driver(depth=2)
    ring.up("a")
    ring.submit(0, 1)
    fill = FillId(0, 0, 0)
    header = dataclasses.replace(ring.header(fill), crc=77)
    del ring.armed[0], ring.asked[fill]
    ring.do(ring.machine.arrived("a", fill, header.num_bytes, header, 77, now_s=0.0))
    assert ring.consume() == [0]


def test_an_answer_of_another_replica_than_the_one_asked_is_dropped() -> None:
    ring = Driver()
    ring.up("a")
    ring.submit(0)
    ring.up("b")
    header = dataclasses.replace(ring.header(FillId(0, 0, 0)), teacher_epoch=ring.epochs["b"])
    actions = ring.do(ring.machine.arrived("b", FillId(0, 0, 0), header.num_bytes, header, None, now_s=0.0))
    assert ring.lease() is None
    assert [type(action) for action in actions] == [Note]
    ring.do(ring.machine.refused("b", FillId(0, 0, 0), RefusalCode.INVALID, "", now_s=0.0))
    assert ring.machine.stats(now_s=0.0).drops_by_cause[DropCause.NOT_ASKED] == 2
    ring.fill(FillId(0, 0, 0))
    assert ring.consume() == [0]


def test_answers_of_replicas_never_heard_of_are_counted_and_forgotten() -> None:
    ring = Driver()
    ring.up("a")
    ring.submit(0)
    header = ring.header(FillId(0, 0, 0))
    for i in range(50):
        ring.do(ring.machine.arrived(f"stranger-{i}", FillId(9, 0, 0), 1, header, None, now_s=0.0))
        ring.machine.heard(f"stranger-{i}", now_s=0.0)
    stats = ring.machine.stats(now_s=0.0)
    assert stats.drops_by_cause[DropCause.NOT_ASKED] == 50
    assert [replica.name for replica in stats.replicas] == ["a"]


def test_an_invalid_request_ends_the_run_instead_of_being_repeated() -> None:
    ring = Driver()
    ring.up("a")
    ring.submit(0)
    actions = ring.refuse(FillId(0, 0, 0), RefusalCode.INVALID, "9000 rows; allowed: 4096")
    assert actions[-1] == Fatal("replica a can't serve seq 0: 9000 rows; allowed: 4096")
    assert ring.machine.can_submit == 0
    assert ring.machine.next_deadline_s() is None
    assert ring.do(ring.machine.on_timer(now_s=1e6)) == []
    with pytest.raises(LocalProtocolError, match="after the end of the run"):
        ring.machine.submit(1, *microbatch(1), now_s=0.0)


# ---- sharing out (R6) ------------------------------------------------------------------------------------------


def stream(ring: Driver, speeds_s: dict[str, float], num_fills: int) -> Counter[str]:
    """Replicas that serve one request after the other in their own time; returns who filled how many."""
    busy_until: dict[str, float] = {}
    done: Counter[str] = Counter()
    while sum(done.values()) < num_fills:
        while ring.machine.can_submit:
            ring.submit(len(ring.submitted))
        for name, _ in ring.asked.values():
            busy_until.setdefault(name, ring.now_s + speeds_s[name])
        name = min(busy_until, key=lambda n: (busy_until[n], n))
        ring.wait(busy_until.pop(name) - ring.now_s)
        ring.fill(next(fill for fill, (asked, _) in ring.asked.items() if asked == name))
        done[name] += 1
        ring.consume()
    return done


def test_replicas_share_the_requests_by_their_speed() -> None:
    ring = Driver(depth=8)
    ring.up("fast")
    ring.up("slow")
    done = stream(ring, {"fast": 0.1, "slow": 0.4}, 100)
    assert 75 <= done["fast"] <= 85  # 80 by speed alone


def test_equal_replicas_get_equal_shares() -> None:
    ring = Driver(depth=6)
    for name in "abc":
        ring.up(name)
    done = stream(ring, dict.fromkeys("abc", 0.2), 90)
    assert all(28 <= done[name] <= 32 for name in "abc")


def test_a_replica_that_was_slow_once_is_tried_again() -> None:
    ring = Driver(depth=4)
    ring.up("a")
    ring.up("b")
    stream(ring, {"a": 0.1, "b": 5.0}, 40)
    assert {r.name: r.seconds_per_token for r in ring.machine.stats(now_s=0.0).replicas}["b"] >= 0.5
    done = stream(ring, {"a": 0.1, "b": 0.1}, 2400)
    assert done["b"] >= 500  # all but equal once it was tried, a hundred seconds after its last fill


@pytest.mark.parametrize(("fast", "slow"), [("a", "b"), ("b", "a")])
def test_a_replica_that_stays_slow_is_tried_rarely(fast: str, slow: str) -> None:
    ring = Driver(depth=4)
    ring.up("a")
    ring.up("b")
    done = stream(ring, {fast: 0.1, slow: 5.0}, 2400)
    assert 2 <= done[slow] <= 6


def test_nothing_is_assumed_of_a_replica_that_was_restarted() -> None:
    ring = Driver()
    ring.up("a")
    stream(ring, {"a": 5.0}, 3)
    ring.down("a")
    ring.up("a")
    assert ring.machine.stats(now_s=ring.now_s).replicas[0].seconds_per_token is None


def test_without_estimates_requests_spread_evenly_in_name_order() -> None:
    ring = Driver(depth=6)
    for name in "cab":
        ring.up(name)
    assert [name for name, _ in ring.sends(ring.submit(0, 1, 2, 3))] == ["a", "b", "c", "a"]


def test_a_replica_that_joins_gets_the_next_request_it_would_answer_first() -> None:
    ring = Driver(depth=4)
    ring.up("a")
    ring.submit(0, 1, 2)
    ring.up("b")
    assert [name for name, _ in ring.sends(ring.submit(3))] == ["b"]


def test_the_choice_is_deterministic() -> None:
    logs = []
    for _ in range(2):
        ring = Driver(depth=8)
        for name in ("n3", "n1", "n2"):
            ring.up(name)
        stream(ring, {"n1": 0.1, "n2": 0.3, "n3": 0.2}, 60)
        logs.append(ring.log)
    assert logs[0] == logs[1]


def test_head_pieces_say_nothing_about_a_replicas_speed() -> None:
    ring = Driver()
    ring.up("a")
    payload = HeadRequest(vocab_start=0, vocab_end=4, offset=0, num_bytes=64, input_hash=microbatch(-1)[0].input_hash)
    expect = dataclasses.replace(microbatch(-1)[1], num_rows=0, cost_tokens=0)
    ring.do(ring.machine.submit(-1, payload, expect, now_s=0.0))
    ring.submitted.append(-1)
    ring.wait(3.0)
    ring.fill(FillId(-1, 0, 0), num_rows=0)
    assert ring.consume() == [-1]
    assert ring.machine.stats(now_s=3.0).replicas[0].seconds_per_token is None


# ---- what can be seen (R9) -------------------------------------------------------------------------------------


def test_stats_are_a_frozen_snapshot_that_adds_up() -> None:
    ring = Driver(depth=4)
    ring.up("a")
    ring.submit(0, 1, 2, 3, 4, 5)
    ring.fill(FillId(0, 0, 0))
    ring.fill(FillId(1, 0, 1))
    ring.lease()
    stats = ring.machine.stats(now_s=0.0)
    expected = {
        "num_free": 2, "num_in_flight": 2, "num_filled": 1, "num_leased": 1, "num_quarantined": 0,
        "occupancy_frac": 0.5, "pending": 2, "waiting": 0, "submitted": 6, "fills": 2, "released": 0,
        "bytes_received": 128, "retries": 0, "drops": 0, "student_stall_s": 0.0, "teacher_stall_s": 1.0,
        "teacher_forward_s": 0.5, "teacher_queue_s": 0.25, "unserved_s": 0.0,
    }  # fmt: skip
    assert {name: getattr(stats, name) for name in expected} == expected
    [replica] = stats.replicas
    assert (replica.name, replica.state, replica.epoch, replica.fills, replica.in_flight) == ("a", "up", "a-1", 2, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.fills = 9  # type: ignore[misc]
    with pytest.raises(TypeError):
        stats.drops_by_cause[DropCause.LATE] = 9  # type: ignore[index]
    ring.fill_all()
    assert stats.fills == 2


def test_time_that_runs_backwards_is_taken_as_standing_still() -> None:
    ring = Driver(request_timeout_s=10.0, peer_timeout_s=100.0)
    ring.up("a")
    ring.wait(5.0)
    ring.now_s = 1.0
    ring.submit(0)
    ring.do(ring.machine.on_timer(now_s=14.9))
    assert not any(isinstance(action, Disarm) for action in ring.log)
    ring.do(ring.machine.on_timer(now_s=15.0))
    assert any(isinstance(action, Disarm) for action in ring.log)
