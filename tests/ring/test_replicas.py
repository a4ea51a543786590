"""R5, R6: replicas come, go, stop and forget; the run goes on with whoever serves, or ends and says why."""

from __future__ import annotations

import dataclasses
import re
import threading
from functools import partial

import pytest
import torch
import zmq

from ring.connection import LinkOpener
from ring.control import ControlLink
from ring.core.config import RingConfig
from ring.core.errors import ConfigError, DisaggKDError, TeacherLost, TransportError
from ring.core.messages import Message, Pong
from ring.core.stats import DropCause, RetryCause
from ring.local_control import LocalLink, Mailbox
from ring.prefetch import Ring
from teacher.forward import TeacherModel
from tests.ring.rig import (
    HANG_GUARD_S,
    Teacher,
    all_up,
    consume,
    free_endpoint,
    make_hello,
    make_overdue,
    make_ring,
    open_ring,
    request_of,
    set_limits,
    states_of,
    wait_until,
)

#: For tests in which nobody serves: short, since the end is what they wait for.
SHORT_S = 0.4


def test_a_ring_without_a_replica_is_refused(model: TeacherModel) -> None:
    refused = pytest.raises(ConfigError, match="no replica; allowed: one or more --teacher endpoints")
    with refused, make_ring(model):
        pass


def test_an_unreachable_teacher_is_named_when_the_time_is_over(model: TeacherModel) -> None:
    nobody = free_endpoint()
    with make_ring(model, nobody) as ring, pytest.raises(TeacherLost) as lost:
        ring.wait_welcome(timeout_s=SHORT_S)
    assert str(lost.value) == f"no teacher answered within {SHORT_S} s: {nobody}: no answer yet"
    assert lost.value.exit_code == 3


def test_a_run_whose_only_teacher_goes_is_lost_and_says_what_the_teacher_said(model: TeacherModel) -> None:
    nobody = free_endpoint()
    with Teacher(model) as first, open_ring(model, first, nobody) as ring:
        consume(ring, model, range(4))
        first.close()
        wait_until(lambda: "it said goodbye" in ring.stats().machine.replicas[0].last_error, "its goodbye")
        set_limits(ring, teacher_timeout_s=SHORT_S)
        ring.submit(4, request_of(4))
        with pytest.raises(TeacherLost) as lost:
            ring.next_lease(timeout_s=HANG_GUARD_S)
        message = str(lost.value)
        assert re.search(rf"no replica has served this run for {SHORT_S} s \(1 wait from seq 4 on\)", message)
        reason = "it said goodbye: replica rig is closing"
        assert re.search(rf"{re.escape(first.endpoint)} is down, last error: {reason}", message)
        assert re.search(rf"{re.escape(nobody)} is down, last error: no answer yet", message)
        with pytest.raises(TeacherLost):  # and it stays lost
            ring.submit(5, request_of(5))


def test_what_is_submitted_while_the_loss_is_being_told_is_lost_too(
    model: TeacherModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Teacher(model) as first, open_ring(model, first) as ring:
        consume(ring, model, range(2))
        tell, may_tell = ring._pump._fail, threading.Event()

        def tell_late(error: DisaggKDError) -> None:
            assert may_tell.wait(HANG_GUARD_S)
            tell(error)

        monkeypatch.setattr(ring._pump, "_fail", tell_late)
        set_limits(ring, teacher_timeout_s=SHORT_S)
        first.close()
        ring.submit(2, request_of(2))
        machine = ring._pump.machine
        assert machine is not None
        wait_until(lambda: machine.has_ended, "the loss")
        threading.Timer(0.05, may_tell.set).start()
        with pytest.raises(TeacherLost):
            ring.submit(3, request_of(3))


def test_a_run_goes_on_when_its_teacher_comes_back_at_the_same_port(model: TeacherModel) -> None:
    first = Teacher(model, listen=free_endpoint())
    with open_ring(model, first) as ring:
        consume(ring, model, range(5))
        for seq in range(5, 8):
            ring.submit(seq, request_of(seq))
        first.close()
        with Teacher(model, listen=first.endpoint):
            for seq in range(5, 8):
                lease = ring.next_lease(timeout_s=HANG_GUARD_S)
                assert lease.seq == seq
                lease.release()
            consume(ring, model, range(8, 12))
            (replica,) = ring.stats().machine.replicas
            assert (replica.num_joins, replica.state) == (2, "up")


def test_a_teacher_that_denies_later_is_asked_again_and_waited_for(model: TeacherModel) -> None:
    """A run that has begun does not end because another model was put at its teacher's port; its time does."""
    endpoint = free_endpoint()
    with Teacher(model, listen=endpoint) as first, open_ring(model, first) as ring:
        consume(ring, model, range(3))
        first.close()
        odd = dataclasses.replace(model, token_map_hash="cd" * 32)
        with Teacher(odd, listen=endpoint):
            wait_until(lambda: "refuses this student" in ring._pump.last_errors(), "the refusal")
            set_limits(ring, teacher_timeout_s=1.0)
            ring.submit(3, request_of(3))
            with pytest.raises(TeacherLost, match="refuses this student: the tokenizers differ"):
                ring.next_lease(timeout_s=HANG_GUARD_S)


def test_replicas_join_and_leave_during_a_run(model: TeacherModel) -> None:
    later = free_endpoint()
    with Teacher(model) as first, open_ring(model, first, later) as ring:
        consume(ring, model, range(6))
        with Teacher(model, listen=later):
            all_up(ring)
            first.drain()
            consume(ring, model, range(6, 12))
        stats = {replica.name: replica for replica in ring.stats().machine.replicas}
        assert (stats[first.endpoint].fills, stats[later].fills) == (6, 6)


def test_a_teacher_that_stops_loses_its_requests_to_the_other(model: TeacherModel) -> None:
    with (
        Teacher(model) as stopped,
        Teacher(model) as other,
        open_ring(model, stopped, other, request_timeout_s=0.3, ping_interval_s=0.1) as ring,
    ):
        all_up(ring)
        stopped.freeze()
        # Nothing is known of either replica's speed: the first two requests go to one each.
        consume(ring, model, range(20))
        assert ring.stats().machine.retries_by_cause[RetryCause.DEADLINE] >= 1
        stopped.thaw()
        consume(ring, model, range(20, 24))


def test_a_teacher_that_stops_alone_ends_the_run_in_time(model: TeacherModel) -> None:
    with Teacher(model) as stopped, open_ring(model, stopped) as ring:
        consume(ring, model, range(2))
        set_limits(ring, request_timeout_s=0.2, teacher_timeout_s=SHORT_S)
        stopped.freeze()
        ring.submit(2, request_of(2))
        with pytest.raises(TeacherLost, match=r"seq 2 was not filled within 0\.2 s"):
            ring.next_lease(timeout_s=HANG_GUARD_S)


@pytest.mark.parametrize("transport", ["shm", "zmq"])
@pytest.mark.case(51)
def test_a_late_answer_is_discarded_and_the_next_request_succeeds(model: TeacherModel, transport: str) -> None:
    """Case 51."""
    later = free_endpoint()
    with (
        Teacher(model) as slow,
        open_ring(model, slow, later, transport=transport, peer_timeout_s=HANG_GUARD_S) as ring,
    ):
        consume(ring, model, range(4))
        slow.hold_passes()
        for seq in range(4, 7):
            ring.submit(seq, request_of(seq))
        wait_until(lambda: slow.service.stats().queued == 3, "three requests to be queued")
        slow.freeze()
        with Teacher(model, listen=later):
            all_up(ring)
            make_overdue(ring)
            for seq in range(4, 7):
                lease = ring.next_lease(timeout_s=HANG_GUARD_S)
                assert lease.seq == seq
                assert torch.equal(lease.tensor(), states_of(model, request_of(seq)))
                lease.release()
            given_up = ring.stats().machine
            assert given_up.retries == 3
            if transport == "shm":  # the teacher writes without asking, so the slots must wait for its last word
                assert given_up.num_quarantined == 3
            # Its answers are computed before it reads that they are not wanted any more: they do arrive.
            while slow.service.compute_turn():
                pass
            slow.allow_passes()
            slow.thaw()
            consume(ring, model, range(7, 20))
            wait_until(lambda: ring.stats().machine.num_free == 5, "the slots of the late answers")
            wait_until(lambda: ring.stats().machine.drops_by_cause[DropCause.LATE] == 3, "the late answers, counted")
        stats = ring.stats().machine
        assert stats.fills == stats.released == 20


def test_a_draining_teacher_finishes_what_it_holds_and_takes_nothing_new(model: TeacherModel) -> None:
    with Teacher(model) as leaving, open_ring(model, leaving, depth=3) as ring:
        leaving.hold_passes()
        for seq in range(3):
            ring.submit(seq, request_of(seq))
        wait_until(lambda: leaving.service.stats().queued == 3, "three requests to be queued")
        leaving.service.drain()
        leaving.allow_passes()
        for seq in range(3):
            lease = ring.next_lease(timeout_s=HANG_GUARD_S)
            assert lease.seq == seq
            lease.release()
        set_limits(ring, teacher_timeout_s=SHORT_S)
        ring.submit(3, request_of(3))
        with pytest.raises(TeacherLost, match=r"refused seq 3 \(draining\): this replica is going away"):
            ring.next_lease(timeout_s=HANG_GUARD_S)
        wait_until(lambda: leaving.service.drained, "the drain")


def test_a_teacher_that_forgets_a_silent_student_is_asked_again(
    model: TeacherModel, caplog: pytest.LogCaptureFixture
) -> None:
    # The ring's pings come too rarely for this teacher's patience.
    with Teacher(model, student_timeout_s=0.2) as forgetful, open_ring(model, forgetful, ping_interval_s=5.0) as ring:
        consume(ring, model, range(3))
        wait_until(lambda: ring.stats().machine.replicas[0].num_joins >= 2, "the student to be forgotten and come back")
        assert f"replica lost: {forgetful.endpoint}: it said goodbye: not heard from for 0.2 s" in caplog.text
        consume(ring, model, range(3, 8))


def test_a_replica_with_lower_limits_than_the_run_needs_is_left_out(
    model: TeacherModel, caplog: pytest.LogCaptureFixture
) -> None:
    """R5: it must not end a run that another serves."""
    later = free_endpoint()
    with Teacher(model) as first, open_ring(model, first, later) as ring:
        consume(ring, model, range(6))
        with Teacher(model, listen=later, max_batch_tokens=2):
            wait_until(lambda: "it takes 2 rows in a request, the run has up to 64" in caplog.text, "the small one")
            consume(ring, model, range(6, 18))
        assert {replica.name: replica.fills for replica in ring.stats().machine.replicas}[later] == 0


class Chatterbox(LocalLink):
    """A replica that never stops to talk, and says nothing."""

    def recv(self) -> Message | None:
        return super().recv() or Pong(token=0)


def test_a_replica_that_never_stops_to_talk_holds_up_no_other(model: TeacherModel) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with Teacher(model) as asked:
        links: list[tuple[str, LinkOpener]] = [
            ("chatterbox", lambda: Chatterbox(Mailbox(), Mailbox())),
            (asked.endpoint, partial(asked.link, context)),
        ]
        with Ring(config=RingConfig(depth=3), hello=make_hello(model), links=links) as ring:
            ring.wait_welcome(timeout_s=HANG_GUARD_S)
            ring.open(max_rows=64, wire_dtype=model.dtype)
            consume(ring, model, range(6))
    context.term()


def test_all_replicas_of_a_run_serve_the_same_model(
    model: TeacherModel, other_model: TeacherModel, caplog: pytest.LogCaptureFixture
) -> None:
    with Teacher(model) as right, Teacher(other_model) as wrong, make_ring(model, right, wrong) as ring:
        first = ring.wait_welcome(timeout_s=HANG_GUARD_S)
        asked, odd = (model, wrong) if first.fingerprint == model.fingerprint else (other_model, right)
        ring.open(max_rows=64, wire_dtype=model.dtype)
        consume(ring, asked, range(12))
        wait_until(lambda: "all replicas must serve the same" in caplog.text, "the odd one to be named")
        stats = {replica.name: replica for replica in ring.stats().machine.replicas}
        assert stats[odd.endpoint].fills == 0
    for fingerprint in (model.fingerprint, other_model.fingerprint):
        assert fingerprint in caplog.text
    assert caplog.text.count("all replicas must serve the same") == 1, "said once, not with every attempt"


def test_a_run_that_begins_looks_whether_all_replicas_serve_the_same(
    model: TeacherModel, other_model: TeacherModel
) -> None:
    with Teacher(model) as right, Teacher(model) as same, make_ring(model, right, same, free_endpoint()) as ring:
        ring.wait_welcome(timeout_s=HANG_GUARD_S)
        ring.check_models(absent_s=0.5, silent_s=HANG_GUARD_S)  # one is not there, and is not waited for
    with Teacher(model) as right, Teacher(other_model) as wrong, make_ring(model, right, wrong) as ring:
        ring.wait_welcome(timeout_s=HANG_GUARD_S)
        with pytest.raises(ConfigError, match="the replicas serve different models") as refused:
            ring.check_models(absent_s=HANG_GUARD_S, silent_s=HANG_GUARD_S)
    for named in (right.endpoint, wrong.endpoint, model.fingerprint, other_model.fingerprint):
        assert named in str(refused.value)


def test_a_replica_that_is_there_and_busy_is_waited_for_longer_than_one_that_is_not(
    model: TeacherModel, other_model: TeacherModel
) -> None:
    with Teacher(model) as right, Teacher(other_model) as wrong:
        wrong.freeze()
        with make_ring(model, right, wrong, free_endpoint()) as ring:
            ring.wait_welcome(timeout_s=HANG_GUARD_S)
            wait_until(lambda: ring._pump.replicas[wrong.endpoint].is_silent, "the connection to the busy one")
            ring.check_models(absent_s=0.0, silent_s=0.5)  # one that never answers does not keep a run from its begin
            thawing = threading.Timer(1.0, wrong.thaw)
            thawing.start()
            with pytest.raises(ConfigError, match="the replicas serve different models"):
                ring.check_models(absent_s=0.1, silent_s=HANG_GUARD_S)
            thawing.join()


def test_a_replica_that_answers_at_the_second_attempt_is_looked_at_too(
    model: TeacherModel, other_model: TeacherModel
) -> None:
    """Where each teacher has a key of its own, all but one are tried with another's first."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with Teacher(model) as right, Teacher(other_model) as wrong:
        failures = iter([TransportError("it does not own this key")])

        def open_at_second_attempt() -> ControlLink:
            for failure in failures:
                raise failure
            return wrong.link(context)

        links: list[tuple[str, LinkOpener]] = [
            (wrong.endpoint, open_at_second_attempt),
            (right.endpoint, partial(right.link, context)),
        ]
        with Ring(config=RingConfig(depth=3), hello=make_hello(model), links=links) as ring:
            ring.wait_welcome(timeout_s=HANG_GUARD_S)
            with pytest.raises(ConfigError, match="the replicas serve different models"):
                ring.check_models(absent_s=HANG_GUARD_S, silent_s=HANG_GUARD_S)
    context.term()
