"""R1, R2, R9: what was asked for comes in order, exactly once and right, in bounded memory, and is counted."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ring import session
from ring.core import codec
from ring.core.errors import ConfigError, DeadlineExceeded, LocalProtocolError
from ring.core.messages import FillHeader, WireDtype
from ring.core.stats import DropCause, RetryCause
from teacher import students
from teacher.forward import TeacherModel
from tests.leaks import expect_no_more, held
from tests.ring.rig import (
    BACKENDS,
    HANG_GUARD_S,
    Teacher,
    all_up,
    consume,
    make_ring,
    open_ring,
    request_of,
    states_of,
    wait_until,
)
from transport import registry
from transport.fault import FaultPlan, FaultyBackend, fault

EVERY_FAULT = FaultPlan(
    drop_frac=0.04,
    delay_frac=0.1,
    corrupt_frac=0.05,
    cut_frac=0.04,
    lose_frac=0.04,
    repeat_frac=0.1,
    postpone_frac=0.1,
)
KIND_FAULTS = FaultPlan(corrupt_frac=0.05, delay_frac=0.2, repeat_frac=0.2, postpone_frac=0.2)


def break_wire(monkeypatch: pytest.MonkeyPatch, backend: str, *, seed: int, plan: FaultPlan) -> FaultyBackend:
    """From now on channels of this process go through `transport.fault`."""
    broken = fault(registry.load(backend), seed=seed, plan=plan)
    monkeypatch.setattr(session, "load", lambda name: broken)
    monkeypatch.setattr(students, "load", lambda name: broken)
    return broken


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_request_is_delivered_once_in_order_and_to_the_bit(model: TeacherModel, backend: str, depth: int) -> None:
    with Teacher(model, backend=backend) as asked, open_ring(model, asked, transport=backend, depth=depth) as ring:
        consume(ring, model, range(24))
        stats = ring.stats()
    assert list(stats.backends.values()) == [backend]
    assert (stats.machine.submitted, stats.machine.fills, stats.machine.released) == (24, 24, 24)
    assert (stats.machine.retries, stats.machine.drops) == (0, 0)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_delivery_stays_in_order_exactly_once_and_right_whatever_the_wire_does(
    model: TeacherModel, backend: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"fault seed {seed}")
    # The one link within a process can't be opened again, so nothing may end its session.
    plan, replicas, request_timeout_s = (KIND_FAULTS, 1, 60.0) if backend == "local" else (EVERY_FAULT, 2, 0.3)
    broken = break_wire(monkeypatch, backend, seed=seed, plan=plan)
    teachers = [Teacher(model, backend=backend) for _ in range(replicas)]
    try:
        with open_ring(
            model, *teachers, transport=backend, request_timeout_s=request_timeout_s, ping_interval_s=0.1
        ) as ring:
            consume(ring, model, range(60), hold=2)
            stats = ring.stats().machine
    finally:
        for one in teachers:
            one.close()
    assert broken.injected, "this seed injected nothing"
    assert stats.fills == stats.released == 60
    assert stats.retries >= broken.injected["corrupt"] > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_repeated_arrival_is_counted_and_never_delivered_twice(
    model: TeacherModel, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_wire(monkeypatch, backend, seed=0, plan=FaultPlan(repeat_frac=1.0, max_delay_polls=1))
    with Teacher(model, backend=backend) as asked, open_ring(model, asked, transport=backend) as ring:
        consume(ring, model, range(10))
        wait_until(lambda: ring.stats().machine.drops_by_cause[DropCause.NOT_ASKED] == 10, "every repetition")
        assert ring.stats().machine.fills == 10


LIES = {
    DropCause.WRONG_EPOCH: {"teacher_epoch": "another life"},
    DropCause.WRONG_FINGERPRINT: {"fingerprint": "0" * 64},
    DropCause.WRONG_HASH: {"input_hash": bytes(16)},
    DropCause.WRONG_DTYPE: {"dtype": WireDtype.BF16},
    DropCause.WRONG_ROWS: {"num_rows": 1},
    DropCause.WRONG_BYTES: {"num_bytes": 12},
    DropCause.WRONG_CRC: {"crc": 1},
}


@pytest.mark.parametrize("cause", LIES, ids=lambda cause: cause.value)
def test_a_fill_that_is_not_what_was_asked_for_is_dropped_and_asked_again(
    model: TeacherModel, cause: DropCause, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    truth, lied = codec.encode_header, []

    def encode_header(header: FillHeader) -> bytes:
        if header.fill.seq == 2 and not lied:
            lied.append(header)
            header = dataclasses.replace(header, **LIES[cause])
        return truth(header)

    monkeypatch.setattr(codec, "encode_header", encode_header)
    with Teacher(model) as asked, open_ring(model, asked, crc=True) as ring:
        consume(ring, model, range(8))
        stats = ring.stats().machine
    assert lied
    assert stats.drops_by_cause[cause] == 1
    wanted = RetryCause.CORRUPT if cause is DropCause.WRONG_CRC else RetryCause.WRONG
    assert stats.retries_by_cause[wanted] == 1
    # A corrupt fill may be bad luck; any other wrong answer costs the replica its connection.
    assert stats.replicas[0].num_joins == (1 if cause is DropCause.WRONG_CRC else 2)
    assert sum(cause.value in record.getMessage() for record in caplog.records) >= 1


def test_damage_is_noticed_where_crc_is_on_and_only_there(model: TeacherModel, monkeypatch: pytest.MonkeyPatch) -> None:
    break_wire(monkeypatch, "shm", seed=5, plan=FaultPlan(corrupt_frac=1.0))
    with Teacher(model) as asked, open_ring(model, asked, transport="shm", crc=False) as ring:
        ring.submit(0, request_of(0))
        damaged = ring.next_lease(timeout_s=HANG_GUARD_S)
        assert not torch.equal(damaged.tensor(), states_of(model, request_of(0)))
    with Teacher(model) as asked, open_ring(model, asked, transport="shm", crc=True) as ring:
        ring.submit(0, request_of(0))
        wait_until(lambda: ring.stats().machine.drops_by_cause[DropCause.WRONG_CRC] >= 3, "three corrupt fills")
        assert ring.stats().machine.fills == 0


def test_slots_are_all_that_a_ring_allocates_and_it_says_how_much(model: TeacherModel) -> None:
    before = held()  # what earlier tests have let go of is gone
    with Teacher(model, backend="local") as asked, make_ring(model, asked, depth=3, num_spares=2) as ring:
        ring.wait_welcome(timeout_s=HANG_GUARD_S)
        allocated_bytes = ring.open(max_rows=100, wire_dtype=model.dtype)
        row_bytes = model.head_spec.hidden_size * 4
        assert ring.slot_bytes >= 100 * row_bytes
        assert ring.slot_bytes - 100 * row_bytes < 4096
        assert allocated_bytes == ring.stats().slots_bytes == 5 * ring.slot_bytes
        opened = {kind: count for kind, count in (held() - before).items() if "memfd:disaggkd" in kind}
    assert sum(opened.values()) >= 5
    expect_no_more(held, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_transport_holds_besides_the_slots_is_said_at_start(
    model: TeacherModel, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="ring")
    with Teacher(model, backend=backend) as asked, open_ring(model, asked, transport=backend) as ring:
        consume(ring, model, range(2))
    held_bytes = registry.load(backend).capabilities().bounce_bytes_per_peer
    assert f"transport {backend} (it was asked for; at most {held_bytes / 2**20:g} MiB in buffers" in caplog.text


def test_nothing_queues_beyond_what_the_ring_takes(model: TeacherModel) -> None:
    with Teacher(model) as asked, open_ring(model, asked, depth=2) as ring:
        all_up(ring)
        asked.freeze()
        submitted = 0
        while ring.can_submit:
            ring.submit(submitted, request_of(submitted))
            submitted += 1
        stats = ring.stats().machine
        assert (stats.num_in_flight, stats.pending) == (2, 2)
        with pytest.raises(LocalProtocolError, match="pending"):
            ring.submit(submitted, request_of(submitted))
        assert ring.stats().machine.submitted == submitted == 4
        asked.thaw()
        for seq in range(4):
            lease = ring.next_lease(timeout_s=HANG_GUARD_S)
            assert lease.seq == seq
            lease.release()


def test_a_microbatch_larger_than_a_slot_or_than_the_teacher_takes_is_refused(model: TeacherModel) -> None:
    large = request_of(5)
    with Teacher(model) as asked, open_ring(model, asked, max_rows=1) as ring:
        # A slot is at least a page: 32 rows of 128 bytes.
        huge = dataclasses.replace(large, token_ids=bytes(400), doc_lengths=(100,), row_ranges=((0, 99),))
        with pytest.raises(ConfigError, match=r"99 rows take 12672 bytes; a slot holds 4096"):
            ring.submit(0, huge)
    with Teacher(model, max_batch_tokens=4) as asked, open_ring(model, asked) as ring:
        with pytest.raises(ConfigError, match=rf"{large.num_tokens} tokens; the teacher takes 4.*--max-batch-tokens"):
            ring.submit(0, large)
        assert ring.stats().machine.submitted == 0


def test_stats_are_a_frozen_snapshot_that_adds_up(model: TeacherModel) -> None:
    with Teacher(model) as asked, open_ring(model, asked, depth=3, num_spares=2) as ring:
        all_up(ring)
        asked.hold_passes()
        for seq in range(3):
            ring.submit(seq, request_of(seq))
        empty = ring.stats()
        assert (empty.machine.num_in_flight, empty.machine.occupancy_frac) == (3, 0.0)
        assert empty.student_stall_s == 0.0
        with pytest.raises(DeadlineExceeded):
            ring.next_lease(timeout_s=0.05)
        assert ring.stats().student_stall_s >= 0.05
        asked.allow_passes()
        wait_until(lambda: ring.stats().machine.num_filled == 3, "three fills")
        lease = ring.next_lease(timeout_s=HANG_GUARD_S)
        full = ring.stats().machine
        assert (full.num_filled, full.num_leased, full.num_free, full.occupancy_frac) == (2, 1, 2, 1.0)
        sent_bytes = sum(states_of(model, request_of(seq)).nbytes for seq in range(3))
        assert full.bytes_received == full.replicas[0].bytes_received == sent_bytes
        assert full.teacher_forward_s > 0
        lease.release()
    assert empty.machine.num_in_flight == 3, "a snapshot does not change"
    with pytest.raises(dataclasses.FrozenInstanceError):
        full.fills = 0  # type: ignore[misc]
    for stats in (empty.machine, full):
        slots = (stats.num_free, stats.num_in_flight, stats.num_filled, stats.num_leased, stats.num_quarantined)
        assert sum(slots) == 5
