"""What is told and checked where data leaves what `--auth` protects, and where a peer's word would be believed."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ring import session as session_module
from ring.command import one_line, set_up_logging
from ring.core.errors import RemoteProtocolError, TransportError
from ring.core.messages import Hello, Message, Offer, Welcome
from ring.session import Session
from teacher.complaints import Complaints
from teacher.forward import TeacherModel
from teacher.load import prepare
from teacher.students import ServiceConfig, Students
from tests.rights import needs_root
from tests.ring.rig import make_hello
from tests.tiny_models import tiny_model, tiny_tokenizer
from transport import registry, shm
from transport.memory import SlotArena


@pytest.fixture(scope="module")
def model() -> TeacherModel:
    return prepare(tiny_model("qwen3", seed=3), tiny_tokenizer().get_vocab(), name="tiny")


@pytest.fixture
def arena() -> Iterator[SlotArena]:
    made = SlotArena(1, 4096)
    yield made
    made.close()


class WelcomingLink:
    """A replica elsewhere that has all transports, as far as the handshake goes."""

    name = "tcp://192.0.2.1:5555"

    def __init__(self, welcome: Welcome) -> None:
        self._answers: list[Message] = [welcome]
        self.said: list[Message] = []

    def local_host(self) -> str:
        return own_address()

    def send(self, message: Message) -> None:
        self.said.append(message)

    def recv(self) -> Message | None:
        return self._answers.pop() if self._answers else None

    def wait_fds(self) -> tuple[int, ...]:
        return ()

    def close(self) -> None:
        pass


def own_address() -> str:
    """An address of this machine that is not loopback; where there is none, there is no network to be exposed to."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return str(probe.getsockname()[0])


def students_of(model: TeacherModel, *, backends: tuple[str, ...]) -> Students:
    config = ServiceConfig(replica="r", backends=backends, epoch="e")
    return Students(model, config, wake=lambda: None, complaints=Complaints(logging.getLogger("teacher")))


def welcome_of(model: TeacherModel, hello: Hello, *, host_id: str) -> Welcome:
    students = students_of(model, backends=registry.available())
    answer = students.greet("s", hello, draining=False, now_s=0.0)
    assert isinstance(answer, Welcome)
    return answer if host_id == answer.host_id else type(answer)(**{**answer.__dict__, "host_id": host_id})


@pytest.mark.parametrize(("transport", "is_told"), [("ucx", True), ("zmq", False)])
def test_with_keys_a_transport_that_encrypts_nothing_is_told_once(
    model: TeacherModel, arena: SlotArena, caplog: pytest.LogCaptureFixture, transport: str, is_told: bool
) -> None:
    session_module._warn_of_exposure.cache_clear()
    for _ in range(2):
        hello = make_hello(model)
        session = Session(WelcomingLink(welcome_of(model, hello, host_id="elsewhere")), hello)
        session.recv()
        session.offer(arena, transport=transport, wire_dtype=model.dtype, crc=None, bind_host=None, encrypt=True)
        receiver = session.close()
        assert receiver is not None
        receiver.forget()
    assert caplog.text.count(f"transport {transport} encrypts nothing") == (1 if is_told else 0)


def test_a_path_from_another_host_is_not_followed(model: TeacherModel) -> None:
    """The path in an offer of shm would mean another socket here."""
    students = students_of(model, backends=("shm", "zmq"))
    students.greet("far", make_hello(model, host_id="elsewhere"), draining=False, now_s=0.0)
    student = students.get("far")
    assert student is not None
    offer = Offer(
        backend="shm", description={"path": "/run/x", "token": bytes(32)}, num_slots=1, slot_bytes=4096,
        wire_dtype=model.dtype, crc=False,
    )  # fmt: skip
    with pytest.raises(RemoteProtocolError, match="transport 'shm' between two hosts; allowed: within one"):
        students.open(student, offer, now_s=0.0)
    assert student.offer is None


@needs_root
def test_a_socket_of_another_user_gets_no_token_of_the_teacher() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own directories are closed to other users
        Path(name).chmod(0o777)
        check_that_they_are_told_nothing(Path(name) / "theirs")


def check_that_they_are_told_nothing(path: Path) -> None:
    child = os.fork()
    if child == 0:  # another user, whose socket the teacher is sent to
        try:
            server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            os.seteuid(12345)
            server.bind(str(path))
            server.listen()
            told = server.accept()[0].recv(100)
            os._exit(len(told))
        finally:
            os._exit(111)
    while not path.exists():
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
    with pytest.raises(RemoteProtocolError, match=r"belongs to user 12345; allowed: 0"):
        open_when_listening(path)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def open_when_listening(path: Path) -> None:
    while True:
        try:
            shm.open_sender({"path": str(path), "token": bytes(32)}, num_slots=1, slot_bytes=4096, timeout_s=60.0)
        except TransportError:  # bound, and not listening yet
            continue


def test_a_peers_words_can_not_steer_the_terminal_or_begin_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    words = "name\x1b[2J\x07\r\nERROR forged: \u202e\x9b1m\x00"
    before = logging.getLogger().handlers[:]
    try:
        set_up_logging(debug=False)
        logging.getLogger("teacher").warning("student %s left", words)
    finally:
        logging.getLogger().handlers[:] = before
    (line,) = capfd.readouterr().err.splitlines()
    assert line.isprintable()
    assert r"student name\x1b[2J\x07\r\nERROR forged: \u202e\x9b1m\x00 left" in line
    assert one_line(words).isprintable()
    assert one_line("Grüße, 漢字: as they are") == "Grüße, 漢字: as they are"
