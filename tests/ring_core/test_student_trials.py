"""A replica that has failed is tried again, ever less often, so that it costs a small share of the time only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count, pairwise

import pytest

from ring.core.messages import FillId, RefusalCode
from tests.ring_core.driver import Driver, stalled_ring

TIMEOUT_S = 10.0


def ring_of_two(*, timeout_s: float = TIMEOUT_S, depth: int = 2) -> Driver:
    ring = Driver(depth=depth, num_spares=2, request_timeout_s=timeout_s, peer_timeout_s=1e6, teacher_timeout_s=1e6)
    ring.up("good")
    ring.up("bad", epoch="one process")
    return ring


def asked_of(ring: Driver, name: str) -> FillId:
    return next(fill for fill, (asked, _) in ring.asked.items() if asked == name)


def never_answers(ring: Driver, fill: FillId) -> None:
    """Its data path passes nothing; it is connected again by the same process, as small messages do pass."""
    ring.wait(TIMEOUT_S)
    del ring.asked[fill]  # it was cancelled, and is no longer of interest
    ring.down("bad")
    ring.up("bad", epoch="one process")


def fails_its_passes(ring: Driver, fill: FillId) -> None:
    ring.wait(0.1)
    ring.refuse(fill, RefusalCode.FAILED)


def answers_wrongly(ring: Driver, fill: FillId) -> None:
    ring.wait(0.1)
    ring.answer(fill, ring.header(fill, num_rows=99))
    ring.up("bad", epoch="one process")


def breaks_off(ring: Driver, fill: FillId) -> None:
    """Its connection ends whenever it is to move a payload."""
    ring.wait(0.1)
    ring.down("bad")
    ring.up("bad", epoch="one process")


def falls_silent(ring: Driver, fill: FillId) -> None:
    """It answers pings for a while after it was asked."""
    ring.wait(0.9 * TIMEOUT_S)
    ring.down("bad", error="not heard from")
    ring.up("bad", epoch="one process")


def trials(ring: Driver, fail: Callable[[Driver, FillId], None], *, duration_s: float, step_s: float) -> list[float]:
    """When a new request was asked of the bad replica, while the good one answers all it is asked at once."""
    when_s = []
    seqs = count(len(ring.submitted))
    end_s = ring.now_s + duration_s
    while ring.now_s < end_s:
        for name, fill in ring.sends(ring.submit(next(seqs))):
            if name == "bad":
                assert fill.attempt == 0, "what was given up goes to the one that serves"
                when_s.append(ring.now_s)
                fail(ring, fill)
        ring.fill_all()
        assert ring.consume(), "each request was filled at once by the other"
        ring.wait(step_s)
    return when_s


@pytest.mark.parametrize(("fail", "cost_s"), [(never_answers, TIMEOUT_S), (falls_silent, 0.9 * TIMEOUT_S)])
def test_one_that_never_answers_is_tried_after_longer_and_longer_pauses(
    fail: Callable[[Driver, FillId], None], cost_s: float
) -> None:
    when_s = trials(ring_of_two(), fail, duration_s=130 * cost_s, step_s=0.5)
    pauses_s = [after - before - cost_s for before, after in pairwise(when_s)]
    for pause_s, times in zip(pauses_s, (0, 1, 3, 7, 15, 20, 20, 20, 20)[: len(pauses_s)], strict=True):
        assert times * cost_s <= pause_s <= times * cost_s + 1.0
    assert len(pauses_s) >= 8


@pytest.mark.parametrize("fail", [fails_its_passes, answers_wrongly, breaks_off])
def test_one_that_fails_at_once_costs_a_twentieth_of_the_time_too(fail: Callable[[Driver, FillId], None]) -> None:
    when_s = trials(ring_of_two(), fail, duration_s=40.0, step_s=0.02)
    assert 40.0 / (22 * 0.1) <= len(when_s) <= 40.0 / (21 * 0.1) + 6  # the first six follow closer upon each other
    assert all(after - before >= 20 * 0.1 for before, after in pairwise(when_s[6:]))


def test_it_is_tried_with_one_request_at_a_time() -> None:
    ring = ring_of_two(depth=6)
    ring.submit(0, 1)
    ring.refuse(asked_of(ring, "bad"), RefusalCode.FAILED)
    asked = [name for name, _ in ring.sends(ring.submit(2, 3, 4))]
    assert asked == ["bad", "good", "good"]


def test_one_fill_is_enough_to_be_asked_as_the_others_are() -> None:
    ring = ring_of_two(depth=6)
    ring.submit(0, 1)
    ring.refuse(asked_of(ring, "bad"), RefusalCode.FAILED)
    ring.submit(2)
    ring.wait(0.5)
    ring.fill_all()  # two of the good one, one of the bad one
    ring.consume()
    assert Counter(name for name, _ in ring.sends(ring.submit(3, 4, 5, 6, 7, 8))) == {"good": 4, "bad": 2}


def test_fills_between_two_failures_do_not_shorten_the_pause() -> None:
    ring = ring_of_two()
    for pause_s in (0.0, 10.0, 30.0):
        ring.submit(*range(len(ring.submitted), len(ring.submitted) + 2))
        ring.fill(asked_of(ring, "good"))
        never_answers(ring, asked_of(ring, "bad"))
        ring.fill_all()
        ring.consume()
        failed_s = ring.now_s

        def is_tried(ring: Driver = ring) -> bool:
            name, fill = ring.sends(ring.submit(len(ring.submitted)))[0]
            ring.fill(fill)
            ring.consume()
            return name == "bad"

        if pause_s:
            ring.wait(failed_s + pause_s - 0.001 - ring.now_s)
            assert not is_tried()
            ring.wait(0.001)
        assert is_tried(), "and it fills this one"


def test_after_a_long_good_time_a_failure_is_the_first_again() -> None:
    ring = ring_of_two()
    for _ in range(3):
        ring.submit(*range(len(ring.submitted), len(ring.submitted) + 2))
        ring.fill(asked_of(ring, "good"))
        never_answers(ring, asked_of(ring, "bad"))
        ring.fill_all()
        ring.consume()
        assert ring.sends(ring.submit(len(ring.submitted)))[0][0] == "bad", "at once"
        ring.fill_all()
        ring.consume()
        ring.wait(2 * 20 * TIMEOUT_S + 1.0)


def test_a_new_process_is_tried_at_once() -> None:
    ring = ring_of_two()
    trials(ring, never_answers, duration_s=100.0, step_s=0.5)
    assert ring.sends(ring.submit(len(ring.submitted)))[0][0] == "good"
    ring.down("bad")
    ring.up("bad", epoch="another")
    assert ring.sends(ring.submit(len(ring.submitted)))[0][0] == "bad"


def test_without_another_it_is_asked_whatever_it_did() -> None:
    ring = ring_of_two()
    trials(ring, never_answers, duration_s=100.0, step_s=0.5)
    ring.down("good")
    assert ring.sends(ring.submit(len(ring.submitted)))[0][0] == "bad"


def test_what_was_known_of_its_speed_before_it_failed_does_not_count() -> None:
    ring = Driver(request_timeout_s=TIMEOUT_S, peer_timeout_s=1e6)
    ring.up("a", epoch="one process")
    for seq in range(10):
        ring.submit(seq)
        ring.wait(0.1)
        ring.fill_all()
        ring.consume()
    assert ring.machine.stats(now_s=ring.now_s).replicas[0].seconds_per_token == pytest.approx(0.01)
    ring.submit(10)
    ring.refuse(next(iter(ring.asked)), RefusalCode.FAILED)
    ring.wait(0.5)
    ring.wait(5.0)
    ring.fill_all()
    assert ring.machine.stats(now_s=ring.now_s).replicas[0].seconds_per_token == pytest.approx(0.5)


def test_silence_costs_what_the_request_waited_for_it() -> None:
    """A replica that answers pings for long and then falls silent has cost more than the silence."""
    ring = Driver(depth=2, num_spares=2, request_timeout_s=100.0, peer_timeout_s=5.0, teacher_timeout_s=1e6)
    ring.up("good")
    ring.up("bad", epoch="one process")
    for _ in range(2):
        ring.submit(len(ring.submitted), len(ring.submitted) + 1)
        ring.fill(asked_of(ring, "good"))
        ring.wait(50.0)
        for _ in range(20):
            ring.wait(0.25, heard=False)
            ring.machine.heard("good", now_s=ring.now_s)
        ring.up("bad", epoch="one process")
        ring.fill_all()
        ring.consume()
    tried_s = ring.now_s
    while ring.sends(ring.submit(len(ring.submitted)))[0][0] == "good":
        ring.fill_all()
        ring.consume()
        ring.wait(0.5)
    assert 55.0 - 1.0 <= ring.now_s - tried_s <= 55.0 + 1.0


def test_replicas_that_break_off_for_ever_cannot_keep_a_request_from_an_honest_one() -> None:
    ring = Driver(depth=1, teacher_timeout_s=60.0)
    for name in ("a", "b", "honest"):
        ring.up(name, epoch=name)
    ring.submit(0)
    for _ in range(10):
        name = next(name for name, _ in ring.asked.values())
        if name == "honest":
            break
        ring.down(name)
        ring.wait(0.25)
        ring.up(name, epoch=name)
    ring.fill_all()
    assert ring.consume() == [0]


@pytest.mark.parametrize("is_new", [False, True], ids=["its connection broke", "its process died"])
def test_a_replica_that_breaks_off_over_every_request_does_not_put_the_end_off(is_new: bool) -> None:
    """One whose process is another each time is believed to serve while it is up; its absence adds up."""
    ring = Driver(teacher_timeout_s=60.0, peer_timeout_s=1e6)
    ring.up("bad", epoch="0")
    ring.submit(0)
    lives = 0
    while ring.ended is None and lives < 100:
        ring.wait(20.0)
        ring.down("bad")
        lives += 1
        ring.wait(5.0)
        if ring.ended is None:
            ring.up("bad", epoch=str(lives if is_new else 0))
    assert ring.ended is not None
    assert lives == (12 if is_new else 4)


def test_a_connection_that_breaks_once_does_not_end_a_run_whose_answers_take_long() -> None:
    """Longer than --teacher-timeout, as --request-timeout allows: the replica is at work all the while."""
    ring = Driver(depth=1, request_timeout_s=300.0, teacher_timeout_s=60.0, peer_timeout_s=1e6)
    ring.up("a", epoch="one process")
    ring.submit(0)
    ring.wait(70.0)
    ring.down("a")
    ring.wait(0.25)
    ring.up("a", epoch="one process")
    ring.wait(70.0)
    assert ring.ended is None
    ring.fill_all()
    assert ring.consume() == [0]


def test_a_stalled_replica_that_is_leaving_is_not_asked_again() -> None:
    ring = stalled_ring()
    ring.machine.leaving("a", now_s=ring.now_s)
    ring.do(ring.machine.came_late("a", 1, now_s=ring.now_s))
    assert ring.machine.stats(now_s=ring.now_s).replicas[0].state == "stalled"
    assert [name for name, _ in ring.sends(ring.submit(2))] == ["b"]
    ring.down("a")
    ring.up("a")
    assert ring.machine.stats(now_s=ring.now_s).replicas[0].state == "up"
