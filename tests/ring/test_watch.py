"""A turn of the pump looks at the replicas that have news, at no others, and misses nobody's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from ring.pump import Pump
from ring.session import Session
from ring.watch import Attention, Watch
from teacher.forward import TeacherModel
from tests.ring.rig import Teacher, all_up, consume, open_ring

#: Only ends a test that hangs: all that is waited for is there already.
GUARD_S = 30.0


@contextmanager
def eventfds(count: int) -> Iterator[list[int]]:
    fds = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(count)]
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def test_only_those_with_news_are_named() -> None:
    watch = Watch()
    with eventfds(3) as (first, second, third):
        watch.watch("a", [first, second])
        watch.watch("b", [third])
        assert watch.wait(timeout_s=0) == set()
        os.eventfd_write(second, 1)
        assert watch.wait(timeout_s=GUARD_S) == {"a"}
        watch.watch("a", [first])
        assert watch.wait(timeout_s=0) == set(), "it is not told of what it no longer has"


def test_a_descriptor_that_another_replica_got_meanwhile_stays_watched() -> None:
    """A session ends, and the next one that is opened gets its numbers, before either is told."""
    watch = Watch()
    with eventfds(1) as (shared,):
        watch.watch("a", [shared])
        watch.watch("b", [shared])
        watch.watch("a", [])
        os.eventfd_write(shared, 1)
        assert watch.wait(timeout_s=GUARD_S) == {"b"}


def test_a_closed_descriptor_is_news_of_its_owner() -> None:
    watch = Watch()
    with eventfds(1) as (lasting,):
        closed = os.eventfd(0)
        watch.watch("a", [closed])
        watch.watch("b", [lasting])
        os.close(closed)
        assert watch.wait(timeout_s=GUARD_S) == {"a"}


def test_whoever_was_told_something_is_looked_at_before_anybody_sleeps() -> None:
    attention = Attention(["a", "b"])
    assert attention.take(now_s=0.0) == {"a", "b"}
    assert attention.take(now_s=0.5) == set()
    attention.call("b")
    assert attention.is_needed
    assert attention.take(now_s=0.6) == {"b"}
    assert not attention.is_needed
    assert attention.take(now_s=1.0) == {"a", "b"}, "now and then all are"


def test_descriptors_are_asked_for_anew_only_where_they_may_be_others() -> None:
    attention, asked = Attention(["a", "b"]), []

    def fds_of(name: str) -> list[int]:
        asked.append(name)
        return fds[name]

    with eventfds(3) as (first, second, own):
        fds = {"a": [first], "b": [second]}
        attention.take(now_s=0.0)
        os.eventfd_write(second, 1)
        attention.sleep(timeout_s=GUARD_S, fds_of=fds_of, others=[own])
        assert attention.take(now_s=0.1) == {"b"}
        attention.moved("b")
        os.eventfd_write(own, 1)
        attention.sleep(timeout_s=GUARD_S, fds_of=fds_of, others=[own])
        assert sorted(asked) == ["a", "b", "b"]


def test_a_turn_costs_no_more_with_replicas_that_have_no_news(
    model: TeacherModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request at a time, so that three of four replicas have none. Each turn used to look at all four."""
    counts = {"turns": 0, "looks": 0}

    def count(owner: type, name: str, what: str) -> None:
        act = getattr(owner, name)

        def counted(*arguments: Any) -> Any:
            counts[what] += 1
            return act(*arguments)

        monkeypatch.setattr(owner, name, counted)

    with ExitStack() as stack:
        teachers = [stack.enter_context(Teacher(model)) for _ in range(4)]
        ring = stack.enter_context(open_ring(model, *teachers, depth=1))
        all_up(ring)
        count(Pump, "_turn", "turns")
        count(Session, "recv", "looks")
        consume(ring, model, range(60))
        stats = ring.stats().machine
    assert (stats.fills, stats.retries) == (60, 0)
    assert counts["turns"] > 60
    assert counts["looks"] < 2 * counts["turns"], counts
