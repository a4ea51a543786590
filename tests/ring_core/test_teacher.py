"""The teacher's machine: every request is answered once, students are served fairly, memory is bounded, drain ends."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable

import pytest

from ring.core.errors import ConfigError, LocalProtocolError
from ring.core.messages import FillId, RefusalCode
from ring.core.teacher import DropStudent, Put, Refuse, TeacherConfig, TeacherMachine, Work, WorkKind
from tests.ring_core.asks import head, refusals, seqs, teacher, tokens

# ---- one answer each -------------------------------------------------------------------------------------------


def test_a_request_is_queued_computed_put_and_sent_with_its_times() -> None:
    machine = teacher("s")
    assert machine.request("s", tokens(0), now_s=1.0) == []
    assert machine.request("s", tokens(1, slot=1), now_s=2.0) == []
    batch = machine.next_batch(now_s=5.0)
    assert seqs(batch) == [("s", 0), ("s", 1)]
    assert batch.work[0].received_s == 1.0
    first, second = machine.computed(batch.work, now_s=6.0)
    # A pass of 1 s for two; idle from 0 to 1: each on the first only.
    assert first == Put("s", batch.work[0].request, forward_s=1.0, queue_s=4.0, idle_s=1.0)
    assert second == Put("s", batch.work[1].request, forward_s=0.0, queue_s=3.0, idle_s=0.0)
    machine.sent("s", FillId(0, 0, 0), now_s=7.0)
    machine.sent("s", FillId(1, 0, 1), now_s=7.0)
    stats = machine.stats(now_s=8.0)
    assert (stats.received, stats.sent, stats.queued, stats.computing, stats.sending) == (2, 2, 0, 0, 0)
    assert stats.idle_s == 1.0 + 2.0  # before the first request, and since the pass


def test_forward_times_add_up_to_what_a_batch_took_however_many_passes_it_needed() -> None:
    machine = teacher("s")
    for seq in range(3):
        machine.request("s", tokens(seq, slot=seq), now_s=1.0)
    batch = machine.next_batch(now_s=5.0)
    puts = [
        put
        for work, now_s in zip(batch.work, (6.0, 8.0, 11.0), strict=True)
        for put in machine.computed([work], now_s=now_s)
    ]
    assert [put.forward_s for put in puts if isinstance(put, Put)] == [1.0, 2.0, 3.0]


def test_idle_time_is_charged_to_one_pass_only() -> None:
    machine = teacher("s")
    idle_s = []
    for seq, now_s in ((0, 1.0), (1, 5.0), (2, 5.0)):
        machine.request("s", tokens(seq, slot=seq), now_s=now_s)
        [put] = machine.computed(machine.next_batch(now_s=now_s).work, now_s=now_s + 1.0)
        assert isinstance(put, Put)
        idle_s.append(put.idle_s)
    assert idle_s == [1.0, 3.0, 0.0]


def test_nothing_to_do_is_an_empty_batch() -> None:
    batch = teacher("s").next_batch(now_s=0.0)
    assert (batch.work, batch.actions) == ((), ())


def test_a_failed_pass_refuses_its_requests() -> None:
    machine = teacher("s")
    machine.request("s", tokens(0), now_s=0.0)
    work = machine.next_batch(now_s=0.0).work
    assert machine.failed(work, "out of memory", now_s=1.0) == [
        Refuse("s", FillId(0, 0, 0), RefusalCode.FAILED, "out of memory")
    ]
    assert machine.stats(now_s=1.0).computing == 0


def test_a_request_that_comes_twice_is_answered_once() -> None:
    machine = teacher("s")
    for _ in range(2):
        assert machine.request("s", tokens(0), now_s=0.0) == []
    work = machine.next_batch(now_s=0.0).work
    assert len(work) == 1
    assert machine.request("s", tokens(0), now_s=0.0) == []
    machine.computed(work, now_s=0.0)
    assert machine.request("s", tokens(0), now_s=0.0) == []
    machine.sent("s", FillId(0, 0, 0), now_s=0.0)
    # Answered: its slot may be read by now. Writing it again would be the one unforgivable thing.
    assert machine.request("s", tokens(0), now_s=0.0) == []
    assert machine.next_batch(now_s=0.0).work == ()
    assert machine.stats(now_s=0.0).repeated == 4


def test_a_request_that_was_refused_at_once_is_not_answered_again_when_it_comes_twice() -> None:
    machine = teacher("s", max_tokens=4)
    large = tokens(0, num=5)
    assert refusals(machine.request("s", large, now_s=0.0)) == [(large.fill, RefusalCode.INVALID)]
    assert machine.request("s", large, now_s=0.0) == []
    machine.drain(now_s=0.0)
    late = tokens(1)
    assert refusals(machine.request("s", late, now_s=0.0)) == [(late.fill, RefusalCode.DRAINING)]
    assert machine.request("s", tokens(1), now_s=0.0) == []
    assert machine.stats(now_s=0.0).repeated == 2


def test_slots_that_were_never_offered_leave_nothing_behind() -> None:
    machine = teacher("s", num_slots=4)
    for slot in range(4, 104):
        assert machine.request("s", tokens(slot, slot=slot), now_s=0.0) != []
    assert len(machine._students["s"].last_fills) == 0


# ---- cancel ----------------------------------------------------------------------------------------------------


def test_a_queued_request_is_cancelled_at_once() -> None:
    machine = teacher("s")
    machine.request("s", tokens(0), now_s=0.0)
    assert refusals(machine.cancel("s", FillId(0, 0, 0), now_s=0.0)) == [(FillId(0, 0, 0), RefusalCode.CANCELLED)]
    assert machine.next_batch(now_s=0.0).work == ()
    assert machine.cancel("s", FillId(0, 0, 0), now_s=0.0) == []


@pytest.mark.parametrize("end", ["computed", "failed"])
def test_a_request_cancelled_while_computed_is_refused_when_that_ends(end: str) -> None:
    machine = teacher("s")
    machine.request("s", tokens(0), now_s=0.0)
    machine.request("s", tokens(1, slot=1), now_s=0.0)
    work = machine.next_batch(now_s=0.0).work
    for _ in range(2):
        assert machine.cancel("s", FillId(0, 0, 0), now_s=0.0) == []
    actions = machine.computed(work, now_s=1.0) if end == "computed" else machine.failed(work, "x", now_s=1.0)
    assert (FillId(0, 0, 0), RefusalCode.CANCELLED) in refusals(actions)
    assert [a.request.fill.seq for a in actions if isinstance(a, Put)] == ([1] if end == "computed" else [])


def test_a_fill_on_its_way_answers_for_itself_when_cancelled() -> None:
    machine = teacher("s")
    machine.request("s", tokens(0), now_s=0.0)
    machine.computed(machine.next_batch(now_s=0.0).work, now_s=0.0)
    assert machine.cancel("s", FillId(0, 0, 0), now_s=0.0) == []
    assert machine.sent("s", FillId(0, 0, 0), now_s=0.0) == []
    assert machine.stats(now_s=0.0).refused == 0


def test_cancelling_what_is_unknown_changes_nothing() -> None:
    machine = teacher("s")
    assert machine.cancel("s", FillId(5, 0, 0), now_s=0.0) == []
    assert machine.cancel("stranger", FillId(5, 0, 0), now_s=0.0) == []


# ---- batches and fairness --------------------------------------------------------------------------------------


def test_a_batch_holds_at_most_its_tokens_but_always_one_request() -> None:
    machine = teacher("s", max_batch_tokens=25)
    for seq, num in enumerate((90, 10, 15, 10)):
        machine.request("s", tokens(seq, slot=seq, num=num), now_s=0.0)
    assert [seqs(machine.next_batch(now_s=0.0)) for _ in range(4)] == [
        [("s", 0)],
        [("s", 1), ("s", 2)],
        [("s", 3)],
        [],
    ]


def test_max_requests_bounds_a_batch() -> None:
    machine = teacher("s")
    for seq in range(3):
        machine.request("s", tokens(seq, slot=seq), now_s=0.0)
    assert seqs(machine.next_batch(now_s=0.0, max_requests=1)) == [("s", 0)]
    assert seqs(machine.next_batch(now_s=0.0, max_requests=2)) == [("s", 1), ("s", 2)]


def test_a_batch_takes_requests_of_several_students() -> None:
    machine = teacher("a", "b")
    for name in ("a", "b"):
        for seq in range(2):
            machine.request(name, tokens(seq, slot=seq), now_s=0.0)
    assert seqs(machine.next_batch(now_s=0.0)) == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]


def test_head_pieces_and_microbatches_are_computed_apart() -> None:
    machine = teacher("a", "b")
    machine.request("a", tokens(0), now_s=0.0)
    machine.request("b", head(-1), now_s=0.0)
    machine.request("a", tokens(1, slot=1), now_s=0.0)
    first, second = machine.next_batch(now_s=0.0), machine.next_batch(now_s=0.0)
    assert (first.kind, seqs(first)) == (WorkKind.TOKENS, [("a", 0), ("a", 1)])
    assert (second.kind, seqs(second)) == (WorkKind.HEAD, [("b", -1)])
    assert second.work[0].kind is WorkKind.HEAD


def serve(machine: TeacherMachine, sizes: dict[str, int], batches: int) -> Counter[str]:
    """Students that always have two requests of their size queued; returns the tokens that each was served."""
    served: Counter[str] = Counter()
    next_seq: Counter[str] = Counter()

    def ask(name: str) -> None:
        seq = next_seq[name]
        next_seq[name] += 1
        assert machine.request(name, tokens(seq, slot=seq % 4, num=sizes[name], rows=1), now_s=0.0) == []

    for name in sizes:
        ask(name)
        ask(name)
    for _ in range(batches):
        work = machine.next_batch(now_s=0.0).work
        for item in work:
            served[item.student] += sizes[item.student]
        for put in machine.computed(work, now_s=0.0):
            assert isinstance(put, Put)
            machine.sent(put.student, put.request.fill, now_s=0.0)
            ask(put.student)
    return served


def test_students_are_served_equal_tokens_whatever_the_size_of_their_requests() -> None:
    sizes = {"large": 90, "middle": 30, "small": 10}
    served = serve(teacher(*sizes, max_batch_tokens=90), sizes, 300)
    for name in sizes:
        # The small one can't use more than the two requests that it keeps queued a batch.
        assert served[name] >= min(served.values())
    assert served["large"] <= 1.3 * served["middle"]
    assert served["middle"] <= 1.3 * served["large"]


def test_a_large_request_is_never_starved_by_small_ones() -> None:
    sizes = {"small-1": 10, "small-2": 10, "large": 100}
    served = serve(teacher(*sizes), sizes, 30)
    assert served["large"] >= 5 * 100


def test_a_student_that_was_away_gets_no_credit_for_it() -> None:
    machine = teacher("busy", "away", max_batch_tokens=10)
    serve(machine, {"busy": 10}, 100)
    for seq in range(2):
        machine.request("away", tokens(seq, slot=seq), now_s=0.0)
    machine.request("busy", tokens(500, slot=2), now_s=0.0)
    order = [seqs(machine.next_batch(now_s=0.0))[0][0] for _ in range(4)]
    assert sorted(order) == ["away", "away", "busy", "busy"]
    assert order[:2] in (["busy", "away"], ["away", "busy"])


def test_an_expired_request_is_refused_instead_of_computed() -> None:
    machine = teacher("s")
    machine.request("s", tokens(0, time_left_s=5.0), now_s=0.0)
    machine.request("s", tokens(1, slot=1, time_left_s=5.0), now_s=0.001)
    batch = machine.next_batch(now_s=5.0)  # the first expires at exactly 5
    assert refusals(batch.actions) == [(FillId(0, 0, 0), RefusalCode.EXPIRED)]
    assert seqs(batch) == [("s", 1)]


def test_expired_requests_do_not_change_whose_turn_it_is() -> None:
    machine = teacher("a", "b", max_batch_tokens=10)
    machine.request("a", tokens(0, time_left_s=1.0), now_s=0.0)
    machine.request("a", tokens(1, slot=1), now_s=0.0)
    machine.request("b", tokens(0), now_s=0.0)
    assert seqs(machine.next_batch(now_s=2.0)) == [("a", 1)]


# ---- students come and go --------------------------------------------------------------------------------------


def test_what_a_student_that_left_asked_for_is_forgotten() -> None:
    machine = teacher("a", "b")
    for name in ("a", "b"):
        machine.request(name, tokens(0), now_s=0.0)
        machine.request(name, tokens(1, slot=1), now_s=0.0)
    work = machine.next_batch(now_s=0.0, max_requests=2).work
    machine.student_left("a", now_s=0.0)
    assert machine.student_left("a", now_s=0.0) == []
    assert [a.student for a in machine.computed(work, now_s=1.0) if isinstance(a, Put)] == ["b"]
    assert seqs(machine.next_batch(now_s=1.0)) == [("b", 1)]
    assert machine.sent("a", FillId(0, 0, 0), now_s=1.0) == []


def test_work_for_a_former_session_is_not_put_into_the_present_one() -> None:
    machine = teacher("s")
    machine.request("s", tokens(0), now_s=0.0)
    old = machine.next_batch(now_s=0.0).work
    machine.student_joined("s", num_slots=4, slot_bytes=800, row_bytes=8, now_s=0.0)
    machine.request("s", tokens(0), now_s=0.0)
    new = machine.next_batch(now_s=0.0).work
    assert machine.computed(old, now_s=0.0) == []
    assert len(machine.computed(new, now_s=0.0)) == 1


def test_a_silent_student_is_dropped_at_exactly_the_timeout() -> None:
    machine = teacher("a", "b", student_timeout_s=30.0)
    machine.heard("a", now_s=10.0)
    assert machine.next_deadline_s() == 30.0
    assert machine.on_timer(now_s=29.999) == []
    assert machine.on_timer(now_s=30.0) == [DropStudent("b", "not heard from for 30 s")]
    assert machine.next_deadline_s() == 40.0
    machine.heard("b", now_s=31.0)  # gone is gone
    assert machine.on_timer(now_s=40.0) == [DropStudent("a", "not heard from for 30 s")]
    assert machine.next_deadline_s() is None
    assert machine.stats(now_s=40.0).dropped_students == 2


def test_a_student_that_does_not_take_its_fill_is_dropped_though_it_is_not_silent() -> None:
    machine = teacher("s", student_timeout_s=30.0)
    machine.request("s", tokens(7), now_s=0.0)
    machine.computed(machine.next_batch(now_s=5.0).work, now_s=6.0)
    machine.heard("s", now_s=35.0)
    assert machine.on_timer(now_s=35.999) == []
    [drop] = machine.on_timer(now_s=36.0)
    assert isinstance(drop, DropStudent)
    assert "seq 7" in drop.reason
    assert machine.stats(now_s=36.0).sending == 0


# ---- drain -----------------------------------------------------------------------------------------------------


def test_a_draining_teacher_finishes_what_it_holds_and_takes_nothing_new() -> None:
    machine = teacher("s")
    machine.request("s", tokens(0), now_s=0.0)
    machine.request("s", tokens(1, slot=1), now_s=0.0)
    work = machine.next_batch(now_s=0.0, max_requests=1).work
    assert not machine.drained
    assert machine.drain(now_s=0.0) == []
    assert refusals(machine.request("s", tokens(2, slot=2), now_s=0.0)) == [(FillId(2, 0, 2), RefusalCode.DRAINING)]
    assert isinstance(machine.student_joined("t", num_slots=1, slot_bytes=8, row_bytes=8, now_s=0.0)[0], DropStudent)
    machine.computed(work, now_s=0.0)
    machine.computed(machine.next_batch(now_s=0.0).work, now_s=0.0)
    for seq in range(2):
        assert not machine.drained
        machine.sent("s", FillId(seq, 0, seq), now_s=0.0)
    assert machine.drained


# ---- refused calls change nothing ------------------------------------------------------------------------------


def test_illegal_calls_are_refused_whole() -> None:
    machine = teacher("s")
    machine.request("s", tokens(0), now_s=0.0)
    machine.request("s", tokens(1, slot=1), now_s=0.0)
    [work] = machine.next_batch(now_s=0.0, max_requests=1).work
    stranger = Work("s", 99, tokens(5), 0.0)
    illegal: list[Callable[[], object]] = [
        lambda: machine.computed([work, work], now_s=9.0),
        lambda: machine.computed([work, stranger], now_s=9.0),
        lambda: machine.failed([stranger], "x", now_s=9.0),
        lambda: machine.sent("s", FillId(0, 0, 0), now_s=9.0),  # still computing
        lambda: machine.sent("s", FillId(1, 0, 1), now_s=9.0),  # still queued
        lambda: machine.next_batch(now_s=9.0, max_requests=0),
        lambda: machine.student_joined("t", num_slots=0, slot_bytes=8, row_bytes=8, now_s=9.0),
        lambda: machine.student_joined("t", num_slots=1, slot_bytes=8, row_bytes=0, now_s=9.0),
        lambda: machine.on_timer(now_s=float("inf")),
    ]
    for call in illegal:
        before = pickle.dumps(machine)
        with pytest.raises(LocalProtocolError):
            call()
        assert pickle.dumps(machine) == before
    machine.computed([work], now_s=0.0)
    with pytest.raises(LocalProtocolError, match="not being computed"):
        machine.computed([work], now_s=0.0)


@pytest.mark.parametrize(
    "changes", [{"max_batch_tokens": 0}, {"max_rows": -1}, {"max_students": 0}, {"student_timeout_s": 0.0}]
)
def test_a_config_out_of_range_is_refused_naming_the_value(changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(changes))} must be.*got"):
        TeacherConfig(**{"max_batch_tokens": 1, "max_rows": 1, "max_tokens": 1, **changes})
