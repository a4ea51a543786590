"""Who may join a ring, in which order, and what is said to whom may not. Strangers harm nobody."""

from __future__ import annotations

import pickle
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
import zmq

from ring.control import ZmqPort
from ring.core import codec
from ring.core.errors import ConfigError, RemoteProtocolError, TeacherLost
from ring.core.messages import (
    Cancel,
    Denied,
    FillId,
    Goodbye,
    Hello,
    Message,
    Offer,
    Ping,
    Pong,
    Ready,
    Request,
    Welcome,
)
from teacher.forward import TeacherModel
from tests.ring.rig import HANG_GUARD_S, Teacher, consume, make_hello, make_ring, open_ring, request_of, wait_until


class Stranger:
    """Anybody who can reach a teacher's port: sends any bytes, and reads what comes back."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, int(HANG_GUARD_S * 1e3))
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(endpoint)

    def send(self, message: Message | bytes) -> None:
        self._socket.send(message if isinstance(message, bytes) else codec.encode(message))

    def recv(self) -> Message:
        return codec.decode(self._socket.recv())

    def ask(self, message: Message | bytes) -> Message:
        self.send(message)
        return self.recv()

    def close(self) -> None:
        self._context.destroy()


@pytest.fixture
def asked(model: TeacherModel) -> Iterator[Teacher]:
    with Teacher(model) as teacher:
        yield teacher


@pytest.fixture
def stranger(asked: Teacher) -> Iterator[Stranger]:
    one = Stranger(asked.endpoint)
    yield one
    one.close()


def an_offer(model: TeacherModel, **changes: object) -> Offer:
    fields: dict[str, object] = {
        "backend": "shm",
        "description": {"path": "/nowhere/s", "token": bytes(32)},
        "num_slots": 2,
        "slot_bytes": 4096,
        "wire_dtype": model.dtype,
        "crc": False,
    }
    return Offer(**(fields | changes))  # type: ignore[arg-type]


def a_request(seq: int = 0, slot: int = 0) -> Request:
    return Request(fill=FillId(seq, 0, slot), payload=request_of(seq), time_left_s=60.0)


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, (self.path,))  # type: ignore[return-value]


@pytest.mark.case(64)
def test_a_pickle_is_refused_and_never_loaded(
    model: TeacherModel, asked: Teacher, stranger: Stranger, tmp_path: Path
) -> None:
    """Case 64."""
    frame = pickle.dumps(Trap(tmp_path / "touched"))
    with pytest.raises(RemoteProtocolError):
        codec.decode(frame)
    answer = stranger.ask(frame)
    assert isinstance(answer, Goodbye)
    assert "malformed frame" in answer.reason
    for value in (frame, {"v": 1, "t": "goodbye", "reason": frame}, {"v": 1, "t": "hello", "run": frame}):
        assert isinstance(stranger.ask(value if isinstance(value, bytes) else msgpack.packb(value)), Goodbye)
    assert not (tmp_path / "touched").exists()
    with open_ring(model, asked) as ring:
        consume(ring, model, range(3))


def test_another_protocol_version_is_refused_with_both_numbers(stranger: Stranger) -> None:
    answer = stranger.ask(msgpack.packb({"v": 7, "t": "ping", "token": 1}))
    assert isinstance(answer, Goodbye)
    assert "protocol version 7, this side 1" in answer.reason


def test_several_frames_and_huge_ones_do_not_reach_the_service(
    model: TeacherModel, asked: Teacher, stranger: Stranger
) -> None:
    stranger._socket.send_multipart([b"one", b"two"])
    answer = stranger.recv()
    assert isinstance(answer, Goodbye)
    assert "2 frames; allowed: 1" in answer.reason
    giant = Stranger(asked.endpoint)  # zmq itself cuts this connection
    giant.send(bytes(codec.MAX_FRAME_BYTES + 1))
    with open_ring(model, asked) as ring:
        consume(ring, model, range(3))
    giant.close()


@pytest.mark.parametrize("order", ["offer first", "hello twice", "ready", "welcome", "request before offer"])
def test_messages_out_of_order_end_the_handshake(
    model: TeacherModel, asked: Teacher, stranger: Stranger, order: str
) -> None:
    hello = make_hello(model)
    if order != "offer first":
        welcome = stranger.ask(hello)
        assert isinstance(welcome, Welcome)
    wrong: dict[str, Message] = {
        "offer first": an_offer(model),
        "hello twice": hello,
        "ready": Ready(),
        "welcome": Welcome(
            replica="me",
            epoch="e",
            fingerprint="f",
            model="m",
            head=model.head_info(),
            token_map_hash="t",
            wire_dtypes=(model.dtype,),
            max_rows=1,
            max_tokens=1,
            max_document_tokens=1,
            host_id="h",
            backends=("shm",),
        ),
        "request before offer": a_request(),
    }
    answer = stranger.ask(wrong[order])
    assert isinstance(answer, Goodbye)
    assert "illegal in this phase of the handshake" in answer.reason
    assert isinstance(stranger.ask(hello), Welcome), "and it may begin anew"
    with open_ring(model, asked) as ring:
        consume(ring, model, range(3))


@pytest.mark.parametrize("message", [a_request(), Cancel(fill=FillId(0, 0, 0))], ids=["request", "cancel"])
def test_whoever_was_forgotten_is_told_to_say_hello(stranger: Stranger, message: Message) -> None:
    answer = stranger.ask(message)
    assert answer == Goodbye(reason="unknown student; say hello first")
    assert stranger.ask(Ping(token=5)) == Pong(token=5)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"backend": "carrier-pigeon"}, "transport 'carrier-pigeon'; allowed: shm, "),
        ({"description": {"path": "/nowhere/s"}}, "shm is described by a path and a token"),
        ({"description": {"path": "/nowhere/s", "token": bytes(32)}}, "can't get the slots over /nowhere/s"),
        ({"backend": "zmq", "description": {"endpoint": "x", "token": b""}}, "zmq is described by a tcp endpoint"),
    ],
)
def test_an_offer_that_can_not_be_opened_is_answered_with_the_reason(
    model: TeacherModel, asked: Teacher, stranger: Stranger, changes: dict[str, object], what: str
) -> None:
    assert isinstance(stranger.ask(make_hello(model)), Welcome)
    answer = stranger.ask(an_offer(model, **changes))
    assert isinstance(answer, Goodbye)
    assert what in answer.reason
    with open_ring(model, asked) as ring:
        consume(ring, model, range(3))


def test_a_student_whose_endpoint_does_not_answer_holds_up_nobody(
    model: TeacherModel, asked: Teacher, stranger: Stranger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("teacher.students.OPEN_TIMEOUT_S", HANG_GUARD_S)

    def opening() -> bool:
        return any(thread.name == "teacher-open" for thread in threading.enumerate())

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen()
        assert isinstance(stranger.ask(make_hello(model)), Welcome)
        stranger.send(an_offer(model, description={"path": str(tmp_path / "s"), "token": bytes(32)}))
        wait_until(opening, "the teacher to knock at the silent endpoint")
        with open_ring(model, asked) as ring:
            consume(ring, model, range(6))
        assert opening(), "the other student was served while the teacher waited for this one"
    answer = stranger.recv()
    assert isinstance(answer, Goodbye)
    assert "shm" in answer.reason


def test_a_handshake_that_is_never_finished_gives_its_place_back(model: TeacherModel) -> None:
    with Teacher(model, max_students=1, student_timeout_s=0.3) as small:
        silent = Stranger(small.endpoint)
        assert isinstance(silent.ask(make_hello(model)), Welcome)
        with open_ring(model, small, ping_interval_s=0.05) as ring:
            consume(ring, model, range(3))
        assert silent.recv() == Goodbye(reason="it said hello, and then offered no slots")
        silent.close()


def test_a_student_too_many_waits_for_a_place(model: TeacherModel) -> None:
    with Teacher(model, max_students=1) as small:
        with open_ring(model, small) as ring:
            consume(ring, model, range(3))
            late = Stranger(small.endpoint)
            assert late.ask(make_hello(model)) == Goodbye(reason="1 students are here; allowed: 1")
            late.close()
            with make_ring(model, small) as second:
                wait_until(lambda: "1 students are here; allowed: 1" in second._pump.last_errors(), "the refusal")
                with pytest.raises(TeacherLost, match="1 students are here; allowed: 1"):
                    second.wait_welcome(timeout_s=0)
        with open_ring(model, small) as ring:
            consume(ring, model, range(3))


def test_a_stranger_that_floods_the_port_does_not_fill_the_log(
    model: TeacherModel, stranger: Stranger, caplog: pytest.LogCaptureFixture
) -> None:
    misfit = make_hello(model, token_map_hash="ab" * 32)
    for _ in range(500):
        assert isinstance(stranger.ask(b"no message"), Goodbye)
        assert isinstance(stranger.ask(misfit), Denied)
    assert 1 <= len(caplog.records) < 100


def test_a_student_whose_link_was_cut_comes_back_to_its_own_place(model: TeacherModel) -> None:
    """Its teacher was told nothing of the cut: to it the former session is as alive as any."""
    with Teacher(model, max_students=1, student_timeout_s=1000.0) as small:
        hello = make_hello(model)
        cut, back, other = (Stranger(small.endpoint) for _ in range(3))
        assert isinstance(cut.ask(hello), Welcome)
        assert other.ask(make_hello(model)) == Goodbye(reason="1 students are here; allowed: 1")
        assert isinstance(back.ask(hello), Welcome)
        assert cut.recv() == Goodbye(reason="it came back over another connection")
        assert other.ask(make_hello(model)) == Goodbye(reason="1 students are here; allowed: 1")
        for one in (cut, back, other):
            one.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"token_map_hash": "ab" * 32},
            "the tokenizers differ: the student's token map hashes to abababababababab, the teacher's to {hash}; ",
        ),
        ({"vocab_size": 999}, "the student's vocabulary has 999 tokens, the teacher's 320"),
    ],
    ids=["token map", "vocabulary"],
)
def test_models_that_do_not_fit_are_refused_at_once_with_both_values(
    model: TeacherModel, asked: Teacher, changes: dict[str, object], message: str
) -> None:
    started_s = time.monotonic()
    with make_ring(model, asked, hello=changes) as ring, pytest.raises(ConfigError) as refused:
        ring.wait_welcome(timeout_s=HANG_GUARD_S)
    assert message.format(hash=model.token_map_hash[:16]) in str(refused.value)
    assert f"teacher {asked.endpoint} refuses this student" in str(refused.value)
    assert refused.value.exit_code == 2
    assert time.monotonic() - started_s < HANG_GUARD_S / 2, "it is no matter of time"


@pytest.mark.parametrize(
    ("transport", "teacher_has", "message"),
    [
        ("shm", ("zmq",), "transport 'shm' was asked for, but the teacher can't use it: it has zmq"),
        ("local", ("shm", "zmq"), "transport 'local' was asked for, but the teacher can't use it: it has shm, zmq"),
        ("nonsense", ("shm",), "no transport is called 'nonsense'; allowed: auto, local, shm, "),
    ],
)
def test_a_transport_that_both_do_not_have_is_refused_at_once(
    model: TeacherModel, transport: str, teacher_has: tuple[str, ...], message: str
) -> None:
    with (
        Teacher(model, backends=teacher_has) as other,
        open_ring(model, other, transport=transport) as ring,
        pytest.raises(ConfigError) as refused,
    ):
        consume(ring, model, range(1))
    assert message in str(refused.value)


def test_a_replica_that_does_not_fit_ends_no_run_that_another_serves(
    model: TeacherModel, asked: Teacher, caplog: pytest.LogCaptureFixture
) -> None:
    with Teacher(model, backends=("zmq",)) as other, open_ring(model, asked, other, transport="shm") as ring:
        wait_until(lambda: "it has zmq" in caplog.text, "the misfit to be named")
        consume(ring, model, range(8))


class ImpostorPort:
    """Something that listens where a teacher was expected, and says what the test wants."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._port = ZmqPort(self._context, "tcp://127.0.0.1:*")
        self.endpoint = self._port.endpoint

    def answer(self, *replies: Message | bytes) -> Message | RemoteProtocolError:
        """Wait for the next message, and send these back; returns it."""
        received: list[tuple[str, Message | RemoteProtocolError]] = []

        def heard() -> bool:
            found = self._port.recv()
            if found is not None:
                received.append(found)
            return bool(received)

        wait_until(heard, "a student's message")
        name, message = received[0]
        for reply in replies:
            frame = reply if isinstance(reply, bytes) else codec.encode(reply)
            self._port._socket.send_multipart([bytes.fromhex(name), frame])
        return message

    def close(self) -> None:
        self._port.close()
        self._context.term()


@pytest.fixture
def impostor() -> Iterator[ImpostorPort]:
    port = ImpostorPort()
    yield port
    port.close()


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (pickle.dumps({"epoch": "x"}), "malformed frame"),
        (codec.encode(Ready()), "Ready is illegal in the phase 'hello sent'"),
        (codec.encode(Ping(token=1)) + b"x", "malformed frame"),
        (msgpack.packb({"v": 2, "t": "ready"}), "protocol version 2, this side 1"),
        (codec.encode(Goodbye(reason="not today")), "it said goodbye: not today"),
    ],
    ids=["pickle", "ready first", "trailing bytes", "version", "goodbye"],
)
def test_what_is_no_teacher_is_named_with_what_it_did(
    model: TeacherModel, impostor: ImpostorPort, reply: bytes, error: str
) -> None:
    with make_ring(model, impostor.endpoint) as ring:
        assert isinstance(impostor.answer(reply), Hello)
        wait_until(lambda: error in ring._pump.last_errors(), "the ring to notice")
        with pytest.raises(TeacherLost, match="no teacher answered within 0 s"):
            ring.wait_welcome(timeout_s=0)
