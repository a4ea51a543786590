"""The control plane with keys: who gets in, what the others get, and what somebody in the network can read."""

from __future__ import annotations

import logging
import select
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import zmq
from zmq.utils import z85

import ring.lookup
from ring.auth import Gatekeeper, Keyring
from ring.control import ZmqLink, ZmqLinks, ZmqPort, longest_request_bytes
from ring.core.config import MAX_SLOTS
from ring.core.errors import ConfigError, DisaggKDError, PeerLost
from ring.core.messages import Goodbye, Ping, Pong, TokenRequest
from ring.endpoints import mechanism_at
from teacher.serve import admitting
from tests.security.conftest import House
from tests.security.tap import tapped
from transport.zap import ENDPOINT, KNOCKS_A_CALL, ZapHandler

T = TypeVar("T")
HANG_GUARD_S = 60.0


class Wires:
    """Makes ports and links, each in a context of its own, and closes them."""

    def __init__(self) -> None:
        self._made: list[tuple[ZmqPort | ZmqLink, zmq.Context[zmq.Socket[bytes]]]] = []

    def port(self, keyring: Keyring | None) -> ZmqPort:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        port = ZmqPort(context, "tcp://127.0.0.1:*", keyring=keyring)
        self._made.append((port, context))
        return port

    def link(self, endpoint: str, keyring: Keyring | None, teacher: Keyring | None) -> ZmqLink:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        link = ZmqLink(context, endpoint, keyring=keyring, teacher_key=teacher.public if teacher else b"")
        self._made.append((link, context))
        return link

    def close(self) -> None:
        for one, context in reversed(self._made):
            one.close()
            context.term()


@pytest.fixture
def wires() -> Iterator[Wires]:
    made = Wires()
    yield made
    made.close()


def until(found: Callable[[], T | None], what: str) -> T:
    deadline_s = time.monotonic() + HANG_GUARD_S
    while (result := found()) is None:
        assert time.monotonic() < deadline_s, f"waited {HANG_GUARD_S:g} s for {what}"
        time.sleep(0.001)
    return result


def outcome(port: ZmqPort, link: ZmqLink) -> DisaggKDError | Pong:
    """What a link gets to its ping: an answer, or the error with which it ends. It must not get anything else."""
    link.send(Ping(token=1))

    def step() -> DisaggKDError | Pong | None:
        received = port.recv()
        if received is not None:
            assert received[1] == Ping(token=1)
            port.send(received[0], Pong(token=2))
        try:
            answer = link.recv()
        except DisaggKDError as error:
            return error
        assert answer in (None, Pong(token=2))
        return answer if isinstance(answer, Pong) else None

    return until(step, "an answer or an end")


def test_owners_of_trusted_keys_get_in(wires: Wires, house: House) -> None:
    port = wires.port(house.teacher)
    for _ in range(3):
        assert isinstance(outcome(port, wires.link(port.endpoint, house.student, house.teacher)), Pong)


def test_a_key_that_is_not_trusted_is_refused_and_named_once(
    wires: Wires, house: House, strangers: House, caplog: pytest.LogCaptureFixture
) -> None:
    port = wires.port(house.teacher)
    for _ in range(3):
        error = outcome(port, wires.link(port.endpoint, strangers.student, house.teacher))
        assert isinstance(error, ConfigError)
        assert f"{port.endpoint} does not trust this trainer's key {strangers.student.public.decode()}" in str(error)
        assert f"{strangers.student.directory / 'public.key'} copied into the peers" in str(error)
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1
    assert f"refused 127.0.0.1: its public key {strangers.student.public.decode()} is not in" in said[0]


def test_a_teacher_without_the_right_secret_gets_nothing_and_is_told_apart(
    wires: Wires, house: House, strangers: House
) -> None:
    """Somebody else listens at the teacher's address."""
    port = wires.port(strangers.teacher)
    error = outcome(port, wires.link(port.endpoint, house.student, house.teacher))
    assert isinstance(error, PeerLost)
    assert "it does not own a key in" in str(error)


@pytest.mark.parametrize("attempt", range(5))  # who notices first differs from time to time
@pytest.mark.parametrize("side", ["teacher", "student"])
def test_keys_on_one_side_only_are_said_in_the_same_words_every_time(
    wires: Wires, house: House, side: str, attempt: int
) -> None:
    port = wires.port(house.teacher if side == "teacher" else None)
    link = wires.link(port.endpoint, *((house.student, house.teacher) if side == "student" else (None, None)))
    error = outcome(port, link)
    assert isinstance(error, ConfigError)
    here, there = ("with", "without") if side == "student" else ("without", "with")
    assert str(error) == (
        f"{port.endpoint} was started {there} --auth, this trainer {here} it; allowed: both, or neither"
    )


def test_asking_why_a_link_ended_holds_up_nobody(wires: Wires, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pump's thread reads this link, and all others."""
    asked, may_answer = threading.Event(), threading.Event()

    def slowly(endpoint: str) -> str:
        asked.set()
        assert may_answer.wait(HANG_GUARD_S)
        return mechanism_at(endpoint)

    monkeypatch.setattr(ring.lookup, "mechanism_at", slowly)
    port = wires.port(None)
    link = wires.link(port.endpoint, house.student, house.teacher)

    def begun() -> bool | None:
        assert port.recv() is None
        assert link.recv() is None
        return asked.is_set() or None

    until(begun, "the question")
    assert link.recv() is None
    may_answer.set()
    assert isinstance(outcome(port, link), ConfigError)


def test_what_is_said_to_a_link_that_ended_costs_nothing_but_the_link(wires: Wires, house: House) -> None:
    """What is wrong is said by `recv`, and not that many messages wait."""
    port = wires.port(house.teacher)
    link = wires.link(port.endpoint, None, None)
    assert link._monitor.poll(HANG_GUARD_S * 1e3), "the teacher, with keys, ends the connection"
    assert isinstance(outcome(port, link), ConfigError)


def test_many_that_knock_at_a_time_are_answered_in_turns(house: House) -> None:
    """Between the turns the teacher serves those who are in already."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gate = Gatekeeper(context, house.teacher)
    knocking = context.socket(zmq.DEALER)
    knocking.connect(ENDPOINT)
    for n in range(40):
        key = z85.decode(house.student.public)
        knocking.send_multipart([b"", b"1.0", b"%d" % n, b"disaggkd", b"127.0.0.1", b"", b"CURVE", key])
    turns = []
    while sum(turns) < 40:
        assert select.select(gate.wait_fds(), [], [], HANG_GUARD_S)[0], "nobody would look for the others"
        gate.answer()
        turns.append(0)
        while knocking.poll(0):
            assert knocking.recv_multipart()[3] == b"200"
            turns[-1] += 1
    assert max(turns) == KNOCKS_A_CALL
    gate.close()
    knocking.close(linger=0)
    context.term()


def test_that_somebody_did_not_get_in_is_logged_once_of_each_kind(
    wires: Wires, house: House, strangers: House, caplog: pytest.LogCaptureFixture
) -> None:
    port = wires.port(house.teacher)
    for _ in range(3):
        assert isinstance(outcome(port, wires.link(port.endpoint, house.student, strangers.teacher)), PeerLost)

    def said() -> list[str] | None:
        port.recv()
        found = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        return found if len(found) == 2 else None

    assert sorted(until(said, "two lines in the log")) == [
        f"{port.endpoint}: somebody connected and did not get in: it broke off",  # the links that asked why
        f"{port.endpoint}: somebody connected and did not get in: it took another key for this teacher's",
    ]


def test_a_key_can_be_added_and_withdrawn_while_the_teacher_serves(
    wires: Wires, house: House, strangers: House
) -> None:
    port = wires.port(house.teacher)
    newcomer = house.teacher.directory / "peers" / "newcomer.pub"
    assert isinstance(outcome(port, wires.link(port.endpoint, strangers.student, house.teacher)), ConfigError)
    shutil.copy(strangers.student.directory / "public.key", newcomer)
    staying = wires.link(port.endpoint, strangers.student, house.teacher)
    assert isinstance(outcome(port, staying), Pong)
    newcomer.unlink()
    assert isinstance(outcome(port, wires.link(port.endpoint, strangers.student, house.teacher)), ConfigError)
    assert isinstance(outcome(port, staying), Pong)  # as docs/security.md says


def test_keys_that_became_unreadable_let_nobody_in(
    wires: Wires, house: House, caplog: pytest.LogCaptureFixture
) -> None:
    port = wires.port(house.teacher)
    (house.teacher.directory / "peers" / "broken.pub").write_text("not a key")
    assert isinstance(outcome(port, wires.link(port.endpoint, house.student, house.teacher)), ConfigError)
    assert "broken.pub holds no key" in caplog.text


def test_a_trainer_tries_every_teacher_key_that_it_trusts(
    wires: Wires, house: House, strangers: House, caplog: pytest.LogCaptureFixture
) -> None:
    """While a teacher changes its key, its trainers trust the old one and the new one."""
    shutil.copy(strangers.teacher.directory / "public.key", house.student.directory / "peers" / "a-new-one.pub")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    port = wires.port(house.teacher)
    links = ZmqLinks(context, port.endpoint, keyring=house.student)
    outcomes = []
    for _ in range(4):
        link = links()
        outcomes.append(type(outcome(port, link)))
        link.close()
    context.term()
    assert outcomes == [PeerLost, Pong, Pong, Pong]
    assert "no key exchange succeeded" not in caplog.text


def test_that_no_key_fits_is_logged(
    wires: Wires, house: House, strangers: House, caplog: pytest.LogCaptureFixture
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    port = wires.port(strangers.teacher)
    links = ZmqLinks(context, port.endpoint, keyring=house.student)
    for _ in range(5):
        link = links()
        assert isinstance(outcome(port, link), PeerLost)
        link.close()
    context.term()
    assert caplog.text.count("no key exchange succeeded, with any key in") == 1


def test_who_comes_while_the_model_is_loaded_is_let_in_and_waits(
    wires: Wires, house: House, strangers: House, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody reads the port yet. Cut off after a while, an early trainer would take it for a refusal."""
    caplog.set_level(logging.INFO)
    port = wires.port(house.teacher)
    link = wires.link(port.endpoint, house.student, house.teacher)
    refused = wires.link(port.endpoint, strangers.student, house.teacher)
    with admitting(port):
        until(lambda: "connects with the key student.pub" in caplog.text or None, "that it is let in")

        def end() -> DisaggKDError | None:
            try:
                assert refused.recv() is None
            except DisaggKDError as error:
                return error
            return None

        assert isinstance(until(end, "that the stranger is refused"), ConfigError)
        assert link.recv() is None
    assert isinstance(outcome(port, link), Pong)


def test_without_somebody_who_decides_nobody_gets_in(house: House) -> None:
    """Authentication fails closed."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = context.socket(zmq.ROUTER)
    server.setsockopt(zmq.CURVE_SERVER, 1)
    server.setsockopt(zmq.CURVE_SECRETKEY, house.teacher.secret)
    ZapHandler.guard(server)
    server.bind("tcp://127.0.0.1:*")
    link = ZmqLink(
        context,
        server.getsockopt_string(zmq.LAST_ENDPOINT),
        keyring=house.student,
        teacher_key=house.teacher.public,
    )
    link.send(Ping(token=1))

    def end() -> DisaggKDError | None:
        assert not server.poll(0)
        try:
            assert link.recv() is None
        except DisaggKDError as error:
            return error
        return None

    assert isinstance(until(end, "the end of the link"), PeerLost)
    link.close()
    server.close(linger=0)
    context.term()


SECRET_WORDS = "the winter palace is empty"


@pytest.mark.parametrize("with_keys", [True, False])
def test_somebody_in_the_network_reads_nothing(wires: Wires, house: House, with_keys: bool) -> None:
    """Without keys it reads everything: the tap is not deaf."""
    keys = (house.student, house.teacher) if with_keys else (None, None)
    port = wires.port(keys[1])
    with tapped(port.endpoint) as tap:
        link = wires.link(tap.endpoint, *keys)
        link.send(Goodbye(reason=SECRET_WORDS))
        received = until(port.recv, "the message")
        port.send(received[0], Goodbye(reason=SECRET_WORDS[::-1]))
        assert until(link.recv, "the answer") == Goodbye(reason=SECRET_WORDS[::-1])
        for words in (SECRET_WORDS, SECRET_WORDS[::-1]):
            assert (words.encode() in tap.heard) is not with_keys


def test_the_largest_request_that_a_teacher_takes_fits_its_frames() -> None:
    from ring.core import codec
    from ring.core.messages import FillId, Request

    num_tokens = 4096
    worst = TokenRequest(
        token_ids=b"\xff" * (4 * num_tokens),
        doc_lengths=(1,) * num_tokens,
        row_ranges=tuple((n, n + 1) for n in range(num_tokens)),
        input_hash=bytes(64),
    )
    frame = codec.encode(Request(fill=FillId(2**53, 2**31 - 1, MAX_SLOTS - 1), payload=worst, time_left_s=1e9))
    assert len(frame) - 2**20 < 16 * num_tokens
    assert longest_request_bytes(num_tokens) >= len(frame)
    assert longest_request_bytes(2**40) == codec.MAX_FRAME_BYTES


def test_what_came_before_the_end_of_a_connection_is_heard_though_the_end_is_seen_first(wires: Wires) -> None:
    """Message and end come together, between a look for messages and a look for the end."""
    port = wires.port(None)
    link = wires.link(port.endpoint, None, None)
    link.send(Ping(token=1))
    name, _ = until(port.recv, "the link's ping")
    assert link.recv() is None
    is_over = link._is_over

    def is_over_now() -> bool:
        assert port.send(name, Pong(token=2))
        port.close()
        until(lambda: is_over() or None, "the end of the connection")
        return is_over()

    link._is_over = is_over_now  # type: ignore[method-assign]
    assert link.recv() == Pong(token=2)
    link._is_over = is_over  # type: ignore[method-assign]
    with pytest.raises(PeerLost, match="closed by the other side"):
        link.recv()
