"""The rules of a lease: one release, nothing read after it, and no reuse of the slot before the device has passed."""

from __future__ import annotations

import pytest
import torch

from ring.core.errors import LocalProtocolError
from teacher.forward import TeacherModel
from tests.ring.rig import HANG_GUARD_S, Teacher, consume, open_ring, request_of, states_of, wait_until


class DeviceEvent:
    """Passes when the test says so; counts how often it was asked."""

    def __init__(self) -> None:
        self.passed = False
        self.num_queries = 0

    def query(self) -> bool:
        self.num_queries += 1
        return self.passed


def test_a_lease_is_released_once(model: TeacherModel) -> None:
    with Teacher(model) as asked, open_ring(model, asked) as ring:
        ring.submit(0, request_of(0))
        lease = ring.next_lease(timeout_s=HANG_GUARD_S)
        lease.release()
        with pytest.raises(LocalProtocolError, match="seq 0: the lease was released already; allowed: one release"):
            lease.release()
        assert ring.stats().machine.released == 1
        consume(ring, model, range(1, 4))


def test_a_released_lease_can_not_be_read(model: TeacherModel) -> None:
    with Teacher(model) as asked, open_ring(model, asked) as ring:
        ring.submit(0, request_of(0))
        lease = ring.next_lease(timeout_s=HANG_GUARD_S)
        lease.release()
        for read in (lease.tensor, lease.raw):
            with pytest.raises(LocalProtocolError, match="released already"):
                read()


def test_a_view_of_a_released_slot_reads_as_nan_where_poison_is_on(model: TeacherModel) -> None:
    with Teacher(model) as asked, open_ring(model, asked, poison_released=True) as ring:
        ring.submit(0, request_of(0))
        lease = ring.next_lease(timeout_s=HANG_GUARD_S)
        view = lease.tensor()
        assert torch.equal(view, states_of(model, request_of(0)))
        lease.release()
        assert view.isnan().all()


def test_a_slot_carries_nothing_new_before_its_event_has_passed(model: TeacherModel) -> None:
    event = DeviceEvent()
    with Teacher(model) as asked, open_ring(model, asked, depth=1, num_spares=0) as ring:
        ring.submit(0, request_of(0))
        lease = ring.next_lease(timeout_s=HANG_GUARD_S)
        view = lease.tensor()
        lease.release(after=event)
        ring.submit(1, request_of(1))
        wait_until(lambda: event.num_queries > 3, "the pump to look at the event")
        stats = ring.stats().machine
        assert (stats.num_leased, stats.num_in_flight, stats.pending) == (1, 0, 1)
        assert torch.equal(view, states_of(model, request_of(0))), "the device may still be reading this"
        event.passed = True
        following = ring.next_lease(timeout_s=HANG_GUARD_S)
        assert torch.equal(following.tensor(), states_of(model, request_of(1)))
        assert torch.equal(view, following.tensor()[: len(view)]), "depth 1: it is the same slot"


def test_several_leases_may_be_held_and_given_back_in_any_order(model: TeacherModel) -> None:
    with Teacher(model) as asked, open_ring(model, asked, depth=3) as ring:
        for seq in range(3):
            ring.submit(seq, request_of(seq))
        leases = [ring.next_lease(timeout_s=HANG_GUARD_S) for _ in range(3)]
        for lease in (leases[1], leases[2], leases[0]):
            assert torch.equal(lease.tensor(), states_of(model, request_of(lease.seq)))
            lease.release()
        assert ring.stats().machine.num_free == 5


def test_a_lease_that_outlives_its_ring_can_be_released_and_not_read(model: TeacherModel) -> None:
    with Teacher(model) as asked, open_ring(model, asked) as ring:
        ring.submit(0, request_of(0))
        lease = ring.next_lease(timeout_s=HANG_GUARD_S)
        ring.close()
        with pytest.raises(LocalProtocolError, match="closed"):
            lease.tensor()
        lease.release()
        with pytest.raises(LocalProtocolError, match="the ring is closed"):
            ring.next_lease(timeout_s=1.0)


def test_a_ring_can_be_closed_twice_and_while_fills_are_on_their_way(model: TeacherModel) -> None:
    with Teacher(model) as asked, open_ring(model, asked) as ring:
        asked.hold_passes()
        for seq in range(3):
            ring.submit(seq, request_of(seq))
        wait_until(lambda: asked.service.stats().queued == 3, "three requests")
        ring.close()
        ring.close()
        assert not ring._pump._thread.is_alive()
        asked.allow_passes()
        wait_until(lambda: asked.service.stats().students == 0, "the teacher to let the student go")
        assert asked.service.stats().queued == 0
        with open_ring(model, asked) as next_ring:
            consume(next_ring, model, range(3))


def test_the_ring_says_what_is_allowed_before_it_is_open(model: TeacherModel) -> None:
    with Teacher(model) as asked, open_ring(model, asked) as ring:
        with pytest.raises(LocalProtocolError, match=r"open\(\) is allowed once"):
            ring.open(max_rows=4, wire_dtype=model.dtype)
        consume(ring, model, range(2))
