"""The student's machine: order and exactly once (R1), bounded memory (R2), refused calls, stats (R9)."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable

import pytest

from ring.core.actions import (
    Arm,
    Deliverable,
    Disarm,
    Send,
)
from ring.core.config import RingConfig
from ring.core.errors import ConfigError, LocalProtocolError
from ring.core.messages import FillId
from ring.core.stats import DropCause
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
    todo = list(range(30))
    got: list[int] = []
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
    illegal: list[Callable[[], object]] = [
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
        {"depth": 4095, "num_spares": 2},
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
        "bytes_received": 128, "retries": 0, "drops": 0, "teacher_stall_s": 1.0,
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
