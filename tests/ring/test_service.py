"""The teacher as a service: students are served fairly, share passes, and none of them can harm the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import zmq

from ring.control import ZmqLink
from ring.core.errors import RemoteProtocolError, TeacherLost
from ring.core.messages import FillId, HeadRequest, Message, RefusalCode, Refused, Request, TokenRequest
from ring.core.stats import RetryCause
from ring.local_control import local_pair
from ring.session import Phase, Session
from teacher.forward import TeacherModel
from teacher.service import TeacherService
from teacher.students import ServiceConfig
from tests.ring.rig import (
    HANG_GUARD_S,
    Teacher,
    all_up,
    consume,
    make_hello,
    open_ring,
    request_of,
    set_limits,
    states_of,
    wait_until,
)
from transport.memory import SlotArena


class Unreadable(torch.Tensor):
    """On a device that has just failed."""

    def cpu(self, *_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("the device is lost")


class WatchedModel:
    """The real model; it writes down who shared a pass, and waits or raises where the test wants that."""

    def __init__(self, model: TeacherModel) -> None:
        self._model = model
        self.passes: list[list[bytes]] = []
        self.entered = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.errors: list[Exception] = []
        self.unreadable = 0  # answers that can't be copied to the host

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def iter_forward(
        self, requests: Sequence[TokenRequest], **options: Any
    ) -> Iterator[tuple[int, list[torch.Tensor]]]:
        self.passes.append([request.input_hash for request in requests])
        self.entered.set()
        assert self.may_go_on.wait(HANG_GUARD_S)
        if self.errors:
            raise self.errors.pop(0)
        for index, pieces in self._model.iter_forward(requests, **options):
            if self.unreadable:
                self.unreadable -= 1
                pieces = [piece.as_subclass(Unreadable) for piece in pieces]
            yield index, pieces


@pytest.fixture
def watched(model: TeacherModel) -> WatchedModel:
    return WatchedModel(model)


def asks(seq: int) -> bytes:
    return request_of(seq).input_hash


class SlowReader:
    """A student that takes part in the handshake, and then reads its fills only when the test wants it."""

    def __init__(self, teacher: Teacher, model: TeacherModel, *, num_slots: int, transport: str) -> None:
        self._context = zmq.Context()
        self.arena = SlotArena(num_slots=num_slots, slot_bytes=8192)
        self.session = Session(ZmqLink(self._context, teacher.endpoint), make_hello(model))
        self._until(Phase.WELCOMED)
        self.session.offer(self.arena, transport=transport, wire_dtype=model.dtype, crc=None, bind_host=None)
        self._until(Phase.READY)

    def ask(self, seq: int, *, slot: int) -> FillId:
        fill, payload = FillId(seq, 0, slot), request_of(seq)
        self.session.arm(fill, num_bytes=payload.num_rows * 128)
        self.session.request(Request(fill=fill, payload=payload, time_left_s=HANG_GUARD_S))
        return fill

    def recv(self) -> Message:
        received: list[Message] = []

        def heard() -> bool:
            message = self.session.recv()
            if message is not None:
                received.append(message)
            return bool(received)

        wait_until(heard, "an answer")
        return received[0]

    def close(self) -> None:
        receiver = self.session.close()
        if receiver is not None:
            receiver.forget()
        self.arena.close()
        self._context.term()

    def _until(self, phase: Phase) -> None:
        def arrived() -> bool:
            self.session.recv()
            self.session.arrivals()  # a student must take part in opening its channel
            return self.session.phase is phase

        wait_until(arrived, phase.value)


def test_requests_of_two_students_share_a_forward_pass(model: TeacherModel, watched: WatchedModel) -> None:
    with (
        Teacher(watched, deterministic=False) as asked,  # type: ignore[arg-type]
        open_ring(model, asked) as one,
        open_ring(model, asked) as two,
    ):
        asked.hold_passes()
        one.submit(0, request_of(0))
        one.submit(1, request_of(1))
        two.submit(2, request_of(2))
        wait_until(lambda: asked.service.stats().queued == 3, "three requests")
        asked.allow_passes(1)
        for ring, seq in ((one, 0), (one, 1), (two, 2)):
            lease = ring.next_lease(timeout_s=HANG_GUARD_S)
            torch.testing.assert_close(lease.tensor(), states_of(model, request_of(seq)))
            lease.release()
    assert [sorted(shared) for shared in watched.passes] == [sorted([asks(0), asks(1), asks(2)])]


def test_a_pass_takes_no_more_than_its_tokens(model: TeacherModel, watched: WatchedModel) -> None:
    sizes = {seq: request_of(seq).num_tokens for seq in range(6)}
    limit = max(sizes.values()) + 5
    with (
        Teacher(watched, deterministic=False, max_batch_tokens=limit) as asked,  # type: ignore[arg-type]
        open_ring(model, asked, depth=6) as ring,
    ):
        asked.hold_passes()
        for seq in range(6):
            ring.submit(seq, request_of(seq))
        wait_until(lambda: asked.service.stats().queued == 6, "six requests")
        asked.allow_passes()
        for _ in range(6):
            ring.next_lease(timeout_s=HANG_GUARD_S).release()
    by_hash = {asks(seq): size for seq, size in sizes.items()}
    for shared in watched.passes:
        assert sum(by_hash[one] for one in shared) <= limit
    assert sum(len(shared) for shared in watched.passes) == 6
    assert len(watched.passes) > 1


def test_a_student_that_asks_for_little_does_not_wait_for_one_that_asks_for_much(
    model: TeacherModel, watched: WatchedModel
) -> None:
    with Teacher(watched) as asked, open_ring(model, asked, depth=8) as much, open_ring(model, asked) as little:  # type: ignore[arg-type]
        asked.hold_passes()
        for seq in range(8):
            much.submit(seq, request_of(seq))
        wait_until(lambda: asked.service.stats().queued == 8, "eight requests")
        little.submit(100, request_of(100))
        wait_until(lambda: asked.service.stats().queued == 9, "one more")
        asked.allow_passes()
        little.next_lease(timeout_s=HANG_GUARD_S).release()
        for _ in range(8):
            much.next_lease(timeout_s=HANG_GUARD_S).release()
    order = [shared[0] for shared in watched.passes]
    assert order.index(asks(100)) <= 1, "it came second at the latest, though eight were there before"


def test_a_student_that_leaves_during_a_pass_costs_the_others_nothing(
    model: TeacherModel, watched: WatchedModel
) -> None:
    with Teacher(watched, deterministic=False) as asked, open_ring(model, asked) as stays:  # type: ignore[arg-type]
        with open_ring(model, asked) as leaves:
            asked.hold_passes()
            leaves.submit(0, request_of(0))
            leaves.submit(1, request_of(1))
            stays.submit(2, request_of(2))
            wait_until(lambda: asked.service.stats().queued == 3, "three requests")
            watched.may_go_on.clear()
            asked.allow_passes()
            assert watched.entered.wait(HANG_GUARD_S)
        wait_until(lambda: asked.service.stats().students == 1, "the teacher to hear that one left")
        watched.may_go_on.set()
        lease = stays.next_lease(timeout_s=HANG_GUARD_S)
        torch.testing.assert_close(lease.tensor(), states_of(model, request_of(2)))
        lease.release()
        with asked.service._lock:
            assert asked.service._answers == {}, "what nobody waits for is not kept"
        for seq in range(3, 9):
            stays.submit(seq, request_of(seq))
            stays.next_lease(timeout_s=HANG_GUARD_S).release()


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), IndexError("index"), MemoryError()])
@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_pass_that_raises_concerns_its_requests_alone(
    model: TeacherModel, watched: WatchedModel, error: Exception, transport: str
) -> None:
    with Teacher(watched) as asked, open_ring(model, asked, transport=transport) as ring:  # type: ignore[arg-type]
        consume(ring, model, range(3))
        watched.errors.append(error)
        consume(ring, model, range(3, 8))
        stats = ring.stats().machine
        assert stats.retries_by_cause[RetryCause.REFUSED] == 1
        assert stats.num_free == 5, "a refusal is the teacher's word: its slot is not kept back"


def test_states_that_can_not_leave_the_device_are_refused_and_asked_for_again(
    model: TeacherModel, watched: WatchedModel
) -> None:
    """The pass went well, so its request is not among those that failed with it; it must not be forgotten either."""
    with Teacher(watched) as asked, open_ring(model, asked) as ring:  # type: ignore[arg-type]
        consume(ring, model, range(2))
        watched.unreadable = 1
        consume(ring, model, range(2, 6))
        assert ring.stats().machine.retries_by_cause[RetryCause.REFUSED] == 1
        assert asked.service.stats().computing == 0


def test_a_model_that_always_raises_ends_the_run_with_what_it_raised(
    model: TeacherModel, watched: WatchedModel
) -> None:
    watched.errors += [RuntimeError("the weights are on fire")] * 1000
    with Teacher(watched) as asked, open_ring(model, asked) as ring:  # type: ignore[arg-type]
        all_up(ring)
        set_limits(ring, teacher_timeout_s=0.5)
        ring.submit(0, request_of(0))
        with pytest.raises(TeacherLost, match=r"refused seq 0 \(failed\): RuntimeError: the weights are on fire"):
            ring.next_lease(timeout_s=HANG_GUARD_S)


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_refusals_use_up_no_slots(model: TeacherModel, watched: WatchedModel, transport: str) -> None:
    """More refusals than the ring has slots, over a channel that the teacher may write without asking."""
    other = WatchedModel(model)
    for one in (watched, other):
        one.errors += [RuntimeError("not now")] * 3
    with (
        Teacher(watched) as first,  # type: ignore[arg-type]
        Teacher(other) as second,  # type: ignore[arg-type]
        open_ring(model, first, second, transport=transport, depth=2, num_spares=1) as ring,
    ):
        all_up(ring)
        consume(ring, model, range(12))
        stats = ring.stats().machine
    assert stats.retries_by_cause[RetryCause.REFUSED] == 6
    assert (stats.fills, stats.num_free, stats.num_quarantined) == (12, 3, 0)


def test_a_request_that_no_teacher_can_serve_ends_the_run_at_once(model: TeacherModel) -> None:
    beyond = torch.full((6,), 400, dtype=torch.int32).numpy().astype("<u4").tobytes()
    wrong = TokenRequest(token_ids=beyond, doc_lengths=(6,), row_ranges=((0, 5),), input_hash=bytes(16))
    with Teacher(model) as asked, open_ring(model, asked) as ring:
        ring.submit(0, wrong)
        with pytest.raises(RemoteProtocolError, match=r"can't serve seq 0: token id 400; allowed: 0\.\.319"):
            ring.next_lease(timeout_s=HANG_GUARD_S)


def test_more_requests_than_slots_are_refused_one_by_one(model: TeacherModel) -> None:
    with Teacher(model) as asked:
        asked.hold_passes()
        student = SlowReader(asked, model, num_slots=2, transport="zmq")
        student.ask(0, slot=0)
        student.ask(1, slot=1)
        too_much = Request(fill=FillId(2, 0, 1), payload=request_of(2), time_left_s=60.0)
        student.session.request(too_much)
        answer = student.recv()
        assert isinstance(answer, Refused)
        assert (answer.fill, answer.code) == (too_much.fill, RefusalCode.OVERLOADED)
        student.session.request(Request(fill=FillId(3, 0, 9), payload=request_of(3), time_left_s=60.0))
        answer = student.recv()
        assert isinstance(answer, Refused)
        assert (answer.code, answer.message) == (RefusalCode.INVALID, "slot 9; 2 slots were offered")
        assert asked.service.stats().queued == 2, "those that were accepted are none the worse for it"
        student.close()


def test_a_request_whose_time_is_over_is_not_computed(model: TeacherModel, watched: WatchedModel) -> None:
    with Teacher(watched) as asked:  # type: ignore[arg-type]
        asked.hold_passes()
        student = SlowReader(asked, model, num_slots=2, transport="zmq")
        late = Request(fill=FillId(0, 0, 0), payload=request_of(0), time_left_s=0.0)
        student.session.request(late)
        wait_until(lambda: asked.service.stats().queued == 1, "the request")
        asked.allow_passes()
        answer = student.recv()
        assert isinstance(answer, Refused)
        assert answer.code is RefusalCode.EXPIRED
        assert watched.passes == []
        student.close()


def test_a_cancelled_request_is_not_computed_and_answered_once(model: TeacherModel, watched: WatchedModel) -> None:
    with Teacher(watched) as asked:  # type: ignore[arg-type]
        asked.hold_passes()
        student = SlowReader(asked, model, num_slots=2, transport="zmq")
        fill = student.ask(0, slot=0)
        student.session.cancel(fill)
        student.session.cancel(fill)
        answer = student.recv()
        assert isinstance(answer, Refused)
        assert (answer.fill, answer.code) == (fill, RefusalCode.CANCELLED)
        asked.allow_passes()
        student.session.ping(7)
        wait_until(lambda: asked.service.stats().queued == 0, "nothing")
        assert watched.passes == []
        student.close()


def test_a_student_that_does_not_read_is_passed_over_and_holds_up_nobody(
    model: TeacherModel, watched: WatchedModel
) -> None:
    """Its unsent states are bounded, whatever it asked for; when it reads again it gets all of it."""
    row_bytes = model.head_spec.hidden_size * 4
    with Teacher(watched, max_batch_tokens=40) as asked:  # type: ignore[arg-type]
        student = SlowReader(asked, model, num_slots=16, transport="zmq")
        for seq in range(16):
            student.ask(seq, slot=seq)
        wait_until(lambda: asked.service.stats().sending > 0, "the first answers")
        with open_ring(model, asked) as ring:
            consume(ring, model, range(100, 130))
        stats = asked.service.stats()
        assert stats.queued > 0, "the rest is not even computed"
        # The bound of two passes, and at most the one that went over it.
        unsent_rows = sum(request_of(seq).num_rows for seq in range(stats.sending))
        assert unsent_rows * row_bytes <= (2 + 1) * 40 * row_bytes
        arrived: list[int] = []

        def read() -> bool:
            arrived.extend(arrival.fill.seq for arrival in student.session.arrivals())
            return len(arrived) == 16

        wait_until(read, "all sixteen")
        assert sorted(arrived) == list(range(16))
        student.close()


def test_a_student_that_never_reads_is_dropped_in_time(model: TeacherModel) -> None:
    with Teacher(model, student_timeout_s=1.0) as asked:
        student = SlowReader(asked, model, num_slots=2, transport="zmq")
        student.ask(0, slot=0)

        def dropped() -> bool:
            student.session.ping(1)  # it is not silent
            return asked.service.stats().dropped_students == 1

        wait_until(dropped, "the student to be dropped")
        student.close()


def test_news_between_looking_for_work_and_waiting_for_it_is_not_missed(model: TeacherModel) -> None:
    link, port = local_pair()
    service = TeacherService(model, port, ServiceConfig(replica="r", backends=("local",), epoch="e"))
    try:
        assert not service.compute_turn()
        link.send(make_hello(model))
        assert service.io_turn()
        waiting = threading.Thread(target=lambda: service.wait_for_work(timeout_s=10 * HANG_GUARD_S), daemon=True)
        waiting.start()
        waiting.join(HANG_GUARD_S)
        assert not waiting.is_alive()
    finally:
        service.close()
        link.close()


def test_a_wrong_piece_of_the_head_is_refused(model: TeacherModel) -> None:
    with Teacher(model) as asked:
        student = SlowReader(asked, model, num_slots=2, transport="zmq")
        head = HeadRequest(vocab_start=0, vocab_end=320, offset=10**9, num_bytes=64, input_hash=b"x")
        student.session.request(Request(fill=FillId(-1, 0, 0), payload=head, time_left_s=60.0))
        answer = student.recv()
        assert isinstance(answer, Refused)
        assert answer.code is RefusalCode.INVALID
        assert "head bytes [1000000000, 1000000064)" in answer.message
        student.close()


def test_a_colocated_teacher_works_while_the_trainer_waits(model: TeacherModel) -> None:
    """One thread for both: what waits for a fill computes it, and the teacher is never missed meanwhile."""
    with Teacher(model, backend="local") as asked:
        asked.freeze()

        def idle_work() -> bool:
            talked = asked.service.io_turn()
            return asked.service.compute_turn() or talked

        with open_ring(model, asked, idle_work=idle_work, poison_released=True) as ring:
            consume(ring, model, range(10))
            assert ring.stats().student_stall_s > 0
