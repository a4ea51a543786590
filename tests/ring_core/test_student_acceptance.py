"""Only what was asked for is accepted; anything else is counted, logged once, dropped (R3)."""

from __future__ import annotations

import dataclasses

import pytest

from ring.core.actions import (
    DropReplica,
    Fatal,
    Note,
)
from ring.core.errors import LocalProtocolError
from ring.core.messages import FillId, RefusalCode, WireDtype
from ring.core.stats import DropCause, RetryCause
from tests.ring_core.driver import Driver, microbatch

WRONG_ANSWERS = {
    DropCause.WRONG_ROWS: {"num_rows": 5},
    DropCause.WRONG_DTYPE: {"dtype": WireDtype.FP16},  # case 40: bf16 must not come as fp16
    DropCause.WRONG_HASH: {"input_hash": b"other"},
    DropCause.WRONG_FINGERPRINT: {"fingerprint": "other"},
    DropCause.WRONG_FILL: {"fill": FillId(1, 0, 1)},
    DropCause.WRONG_BYTES: {"num_bytes": 63},
}


@pytest.mark.parametrize(("cause", "changes"), WRONG_ANSWERS.items(), ids=lambda value: getattr(value, "name", ""))
@pytest.mark.case(40)
def test_a_wrong_answer_is_dropped_asked_again_elsewhere_and_costs_the_connection(
    cause: DropCause, changes: dict[str, object]
) -> None:
    ring = Driver(depth=2)
    ring.up("a")
    ring.submit(0, 1)
    ring.up("b")
    actions = ring.answer(FillId(0, 0, 0), ring.header(FillId(0, 0, 0), **changes))
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
    ring.answer(FillId(0, 0, 0), ring.header(FillId(0, 0, 0), **changes))
    assert ring.lease() is None
    assert ring.machine.stats(now_s=0.0).drops_by_cause[DropCause.WRONG_EPOCH] == 1


def test_fewer_bytes_delivered_than_the_header_says_is_a_wrong_answer() -> None:
    ring = Driver()
    ring.up("a")
    ring.submit(0)
    ring.fill(FillId(0, 0, 0), delivered_bytes=0)
    assert ring.machine.stats(now_s=0.0).drops_by_cause[DropCause.WRONG_BYTES] == 1


def test_a_header_that_can_not_be_read_is_a_wrong_answer_and_concerns_no_other_fill() -> None:
    ring = Driver(depth=2)
    ring.up("a")
    ring.up("b")
    ring.submit(0)
    asked = FillId(0, 0, 0)
    by = ring.asked[asked][0]
    other = {"a": "b", "b": "a"}[by]
    ring.do(ring.machine.garbled(other, asked, "no header", now_s=0.0))  # not for that one to answer
    stats = ring.machine.stats(now_s=0.0)
    assert stats.drops_by_cause[DropCause.NOT_ASKED] == stats.drops == 1
    actions = ring.do(ring.machine.garbled(by, asked, "no header", now_s=0.0))
    assert ring.sends(actions) == [(other, FillId(0, 1, 1))]
    assert [action.replica for action in actions if isinstance(action, DropReplica)] == [by]
    stats = ring.machine.stats(now_s=0.0)
    assert stats.drops_by_cause[DropCause.WRONG_HEADER] == stats.retries_by_cause[RetryCause.WRONG] == 1
    ring.do(ring.machine.garbled(by, asked, "no header", now_s=0.0))  # again, after it was given up
    assert ring.machine.stats(now_s=0.0).drops == 3
    ring.fill_all()
    assert ring.consume() == [0]


def test_a_replica_that_is_leaving_is_asked_nothing_more_and_its_fills_still_count() -> None:
    ring = Driver(depth=2)
    ring.up("a")
    ring.submit(0, 1)
    ring.machine.leaving("a", now_s=0.0)
    ring.machine.leaving("nobody", now_s=0.0)
    ring.fill(FillId(0, 0, 0))
    assert ring.consume() == [0]
    assert ring.sends(ring.submit(2)) == []
    assert ring.sends(ring.up("b")) == [("b", FillId(2, 0, 0))]
    assert ring.sends(ring.down("a")) == [("b", FillId(1, 1, 2))]


def test_a_wrong_answer_is_logged_once_a_replica_and_cause_but_counted_always() -> None:
    ring = Driver()
    for _ in range(3):
        ring.up("a")
        if not ring.submitted:
            ring.submit(0)
        ring.answer(max(ring.asked), ring.header(max(ring.asked), num_rows=9))
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


def test_what_one_replica_can_not_serve_is_asked_of_the_others() -> None:
    """R5: a replica that was restarted with lower limits ends no run that another can serve."""
    ring = Driver()
    ring.up("a")
    ring.submit(0)
    ring.up("b")
    actions = ring.refuse(FillId(0, 0, 0), RefusalCode.INVALID, "9000 rows; allowed: 4096")
    assert [name for name, _ in ring.sends(actions)] == ["b"]
    ring.fill_all()
    assert ring.consume() == [0]


def test_what_no_replica_can_serve_ends_the_run() -> None:
    ring = Driver()
    ring.up("a")
    ring.submit(0)
    ring.up("b")
    refused = [fill for _, fill in ring.sends(ring.refuse(FillId(0, 0, 0), RefusalCode.INVALID, "9000 rows"))]
    actions = ring.refuse(refused[0], RefusalCode.INVALID, "9000 rows; allowed: 4096")
    assert actions[-1] == Fatal("replica b can't serve seq 0: 9000 rows; allowed: 4096")


def test_what_is_left_alone_with_a_replica_that_can_not_serve_it_ends_the_run() -> None:
    """The other one leaves while it is asked: the run must not wait for ever for what is refused for ever."""
    ring = Driver()
    ring.up("a")
    ring.submit(0)
    ring.up("b")
    ring.refuse(FillId(0, 0, 0), RefusalCode.INVALID, "9000 rows")
    ring.down("b")
    ring.wait(1.0)
    (again,) = ring.asked
    assert ring.asked[again][0] == "a"
    assert isinstance(ring.refuse(again, RefusalCode.INVALID, "9000 rows")[-1], Fatal)


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
