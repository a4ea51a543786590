"""What a student can cost its teacher while its channel is opened: its own place, and never the process."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from ring.core.messages import Description, Goodbye, Welcome
from teacher import students as students_module
from teacher.complaints import Complaints
from teacher.forward import TeacherModel
from teacher.students import OPEN_TIMEOUT_S, ServiceConfig, Students
from tests.limits import few_descriptors
from tests.ring.rig import HANG_GUARD_S, Teacher, consume, make_hello, make_ring, open_ring, wait_until
from tests.ring.test_handshake import Stranger, an_offer
from transport import shm


@contextmanager
def silent_endpoint(tmp_path: Path) -> Iterator[Description]:
    """An endpoint that takes connections and never greets."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen(64)
        yield {"path": str(tmp_path / "s"), "token": bytes(32)}


def openings() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "teacher-open"]


def test_an_offer_of_what_is_no_backend_costs_that_student_alone(model: TeacherModel) -> None:
    with Teacher(model, backends=("zmq", "ucx+rdma")) as asked:
        stranger = Stranger(asked.endpoint)
        assert isinstance(stranger.ask(make_hello(model, host_id="elsewhere")), Welcome)
        answer = stranger.ask(an_offer(model, backend="ucx+rdma"))
        assert answer == Goodbye(reason="transport 'ucx+rdma'; allowed: zmq")
        stranger.close()
        with open_ring(model, asked, transport="zmq") as ring:
            consume(ring, model, range(3))


def test_an_opening_for_which_no_thread_is_left_costs_that_student_alone(
    model: TeacherModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoThread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    with Teacher(model) as asked:
        stranger = Stranger(asked.endpoint)
        assert isinstance(stranger.ask(make_hello(model)), Welcome)
        with monkeypatch.context() as patch:
            patch.setattr(threading, "Thread", NoThread)
            answer = stranger.ask(an_offer(model))
        assert isinstance(answer, Goodbye)
        assert "can't start new thread" in answer.reason
        stranger.close()
        with open_ring(model, asked) as ring:
            consume(ring, model, range(3))


def test_an_opening_that_ends_without_a_word_costs_that_student_alone(
    model: TeacherModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread had no memory to say that it failed: the place is another's all the same."""
    with Teacher(model, max_students=1) as asked:
        stranger = Stranger(asked.endpoint)
        assert isinstance(stranger.ask(make_hello(model)), Welcome)
        with monkeypatch.context() as patch:
            patch.setattr(Students, "_open", lambda *_: None)
            answer = stranger.ask(an_offer(model))
        assert answer == Goodbye(reason="its channel: ended without a word")
        stranger.close()
        with open_ring(model, asked) as ring:
            consume(ring, model, range(3))


def test_a_channel_that_never_closes_does_not_keep_the_teacher(
    model: TeacherModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    let_go = threading.Event()
    close = shm.ShmSender.close

    def close_late(sender: shm.ShmSender) -> None:
        let_go.wait(HANG_GUARD_S)
        close(sender)

    try:
        with Teacher(model, backend="shm") as asked:
            with open_ring(model, asked, transport="shm") as leaving:
                consume(leaving, model, range(2))
                monkeypatch.setattr(shm.ShmSender, "close", close_late)
                monkeypatch.setattr(students_module, "OPEN_TIMEOUT_S", 0.001)
            wait_until(lambda: asked.service.stats().students == 0, "its departure")
            asked.close()
            assert not let_go.is_set()
            assert "is still being closed; left behind" in caplog.text
    finally:
        let_go.set()


def test_a_student_that_leaves_keeps_its_place_until_its_opening_has_ended(
    model: TeacherModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else whoever says hello, offers, and leaves, over and over, has the teacher hold any number of sockets."""
    monkeypatch.setattr(students_module, "OPEN_TIMEOUT_S", HANG_GUARD_S)
    with Teacher(model, max_students=2) as small:
        stranger = Stranger(small.endpoint)
        with silent_endpoint(tmp_path) as description:
            for _ in range(2):
                assert isinstance(stranger.ask(make_hello(model)), Welcome)
                stranger.send(an_offer(model, description=description))
                stranger.send(Goodbye(reason="on second thoughts"))
            assert stranger.ask(make_hello(model)) == Goodbye(reason="2 students are here; allowed: 2")
            assert len(openings()) == 2
        wait_until(lambda: isinstance(stranger.ask(make_hello(model)), Welcome), "a place")
        stranger.close()


def test_no_channel_is_opened_with_the_last_descriptors(model: TeacherModel) -> None:
    """At the limit libzmq ends the process, and with it everybody's teacher."""
    with Teacher(model) as asked:
        stranger = Stranger(asked.endpoint)
        assert isinstance(stranger.ask(make_hello(model)), Welcome)
        with few_descriptors(40):
            answer = stranger.ask(an_offer(model, backend="zmq"))
        assert isinstance(answer, Goodbye)
        assert "for one more channel, needs 64 descriptors, and " in answer.reason
        assert answer.reason.endswith("are left: raise `ulimit -n`")
        stranger.close()
        with open_ring(model, asked) as ring:
            consume(ring, model, range(3))


def test_students_whose_channels_are_slow_to_close_hold_up_nobody(
    model: TeacherModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go = threading.Event()
    close = shm.ShmSender.close

    def close_slowly(sender: shm.ShmSender) -> None:
        assert let_go.wait(HANG_GUARD_S)
        close(sender)

    with Teacher(model, backend="shm") as asked:
        with open_ring(model, asked, transport="shm") as leaving:
            consume(leaving, model, range(2))
            monkeypatch.setattr(shm.ShmSender, "close", close_slowly)
        wait_until(lambda: asked.service.stats().students == 0, "its departure")
        with open_ring(model, asked, transport="shm") as ring:
            consume(ring, model, range(3))
            let_go.set()


def test_a_trainer_without_descriptors_waits_for_some_and_says_so(model: TeacherModel) -> None:
    with Teacher(model) as asked, ExitStack() as stack:
        with few_descriptors(24):
            ring = stack.enter_context(make_ring(model, asked))
            wait_until(lambda: "are left: raise `ulimit -n`" in ring._pump.last_errors(), "the complaint")
        ring.wait_welcome(timeout_s=HANG_GUARD_S)
        ring.open(max_rows=64, wire_dtype=model.dtype)
        consume(ring, model, range(3))


@contextmanager
def one_opening(model: TeacherModel, tmp_path: Path) -> Iterator[Students]:
    """A student whose channel is being opened, and will be until the end."""
    config = ServiceConfig(replica="r", backends=("shm",), epoch="e", student_timeout_s=1.0)
    made = Students(model, config, wake=lambda: None, complaints=Complaints(logging.getLogger("tests")))
    with silent_endpoint(tmp_path) as description:
        made.greet("s", make_hello(model), draining=False, now_s=0.0)
        student = made.get("s")
        assert student is not None
        made.open(student, an_offer(model, description=description), now_s=0.5)
        [thread] = openings()
        yield made
    thread.join(HANG_GUARD_S)
    made.close()
    assert openings() == []


def test_a_channel_that_does_not_open_is_overdue_in_time(model: TeacherModel, tmp_path: Path) -> None:
    with one_opening(model, tmp_path) as students:
        end_s = 0.5 + 2 * OPEN_TIMEOUT_S
        assert students.next_deadline_s() == end_s
        assert students.overdue(end_s - 0.001) == []
        assert [student.name for student in students.overdue(end_s)] == ["s"]


def test_an_opening_that_never_ends_does_not_keep_the_teacher(
    model: TeacherModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(students_module, "OPEN_TIMEOUT_S", HANG_GUARD_S)
    with one_opening(model, tmp_path) as students:
        monkeypatch.setattr(students_module, "OPEN_TIMEOUT_S", 0.001)
        students.close()
        assert len(openings()) == 1
        assert "student s: its channel is still being opened" in caplog.text


def test_a_student_that_comes_and_goes_does_not_fill_the_log(
    model: TeacherModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="teacher.service")
    with Teacher(model, max_students=2) as small:
        stranger = Stranger(small.endpoint)
        for _ in range(200):
            assert isinstance(stranger.ask(make_hello(model)), Welcome)
            stranger.send(Goodbye(reason="x" * 4096))
        assert isinstance(stranger.ask(make_hello(model)), Welcome)
        stranger.close()
    lines = [record.getMessage() for record in caplog.records if "left: xxx" in record.getMessage()]
    assert 1 <= len(lines) < 100
    assert max(map(len, lines)) < 600
