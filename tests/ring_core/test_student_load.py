"""Requests go to the replica that would answer first (R6)."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from ring.core.messages import FillId, HeadRequest
from tests.ring_core.driver import Driver, microbatch


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
    speeds = {r.name: r.seconds_per_token for r in ring.machine.stats(now_s=0.0).replicas}
    assert speeds["b"] is not None
    assert speeds["b"] >= 0.5
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
    ring.answer(FillId(-1, 0, 0), ring.header(FillId(-1, 0, 0), num_rows=0))
    assert ring.consume() == [-1]
    assert ring.machine.stats(now_s=3.0).replicas[0].seconds_per_token is None
