"""Every decoder of bytes from a peer but the control codec's (tests/ring_core): any bytes end that peer's channel at
worst, with one of our errors, and never reach memory that was not armed for them."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ring.core.errors import DeadlineExceeded, DisaggKDError, PeerLost, RemoteProtocolError, TransportError
from ring.core.messages import Description, FillId, Scalar
from tests.leaks import descriptors, expect_no_more
from tests.system.processes import REPOSITORY
from tests.transport.peers import HANG_GUARD_S, wait_readable, while_serving
from transport import registry, shm, ucx, ucx_link, ucx_trial, zmq_tcp
from transport.contract import Receiver
from transport.memory import POISON_BYTE, SlotArena
from transport.zmq_link import ANNOUNCE, CHUNK, GREETING, KIND_ANNOUNCE, KIND_CHUNK, MAGIC, Link, connect

#: More of it for `make soak`.
MANY = int(os.environ.get("FUZZ_EXAMPLES", "60"))
fuzz = settings(max_examples=MANY, deadline=None, suppress_health_check=list(HealthCheck))

NUM_SLOTS, SLOT_BYTES, ARMED_BYTES = 2, 65536, 100
FILL = FillId(1, 0, 0)

numbers = st.one_of(st.integers(0, 4), st.integers(0, 2**64 - 1), st.sampled_from([2**31, 2**32, 2**63, 2**64 - 1]))
signed = st.one_of(st.integers(-2, 4), st.integers(-(2**63), 2**63 - 1))
announcements = st.builds(
    lambda ticket, seq, attempt, slot, num_bytes, header: (
        ANNOUNCE.pack(KIND_ANNOUNCE, ticket, seq, attempt, slot, num_bytes) + header
    ),
    numbers, signed, numbers, numbers, st.one_of(st.just(ARMED_BYTES), numbers), st.binary(max_size=1100),
)  # fmt: skip
right = st.just(ANNOUNCE.pack(KIND_ANNOUNCE, 1, *FILL, ARMED_BYTES))
chunks = st.builds(lambda ticket, index: CHUNK.pack(KIND_CHUNK, ticket, index), numbers, numbers)
frames = st.one_of(right, announcements, chunks, st.binary(max_size=64), st.binary(max_size=3000))
messages = st.lists(st.lists(frames, min_size=1, max_size=3), min_size=1, max_size=6)


@pytest.fixture
def arena() -> Iterator[SlotArena]:
    made = SlotArena(NUM_SLOTS, SLOT_BYTES)
    yield made
    made.close()


@given(said=messages, encrypt=st.booleans())
@fuzz
def test_whatever_an_admitted_peer_sends_over_zmq_lands_nowhere_else(
    arena: SlotArena, said: list[list[bytes]], encrypt: bool
) -> None:
    for slot in range(NUM_SLOTS):
        arena.poison(slot)
    receiver = zmq_tcp.open_receiver(arena, bind_host="127.0.0.1", encrypt=encrypt)
    receiver.arm(FILL, num_bytes=ARMED_BYTES)
    link = Link()
    try:
        description = receiver.describe()
        greeting = GREETING.pack(MAGIC, NUM_SLOTS, SLOT_BYTES)
        endpoint = str(description["endpoint"])
        while_serving(receiver, lambda: connect(link, endpoint, description, greeting, timeout_s=HANG_GUARD_S))
        for message in said:
            link.socket.send_multipart(message)
        link.socket.send(b"?")  # of no kind: with it the channel ends, if it has not ended before
        until_lost(receiver)
        assert arena.view(0, torch.uint8, (SLOT_BYTES,))[ARMED_BYTES:].eq(POISON_BYTE).all()
        assert arena.view(1, torch.uint8, (SLOT_BYTES,)).eq(POISON_BYTE).all()
    finally:
        link.close()
        receiver.forget()


def until_lost(receiver: Receiver) -> None:
    deadline_s = time.monotonic() + HANG_GUARD_S
    with suppress(PeerLost):
        while time.monotonic() < deadline_s:
            for arrival in receiver.poll():
                assert (arrival.fill, arrival.num_bytes) == (FILL, ARMED_BYTES)
            wait_readable(receiver)
        pytest.fail("the channel did not end")


# ---- the handshake of shm


@given(said=st.lists(st.binary(min_size=1, max_size=100), max_size=4))
@fuzz
def test_whatever_a_stranger_says_at_the_socket_of_shm_gets_no_slot(said: list[bytes]) -> None:
    arena = SlotArena(1, 4096)
    receiver = shm.open_receiver(arena, bind_host="")
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        stranger.connect(str(receiver.describe()["path"]))
        with suppress(OSError):  # shown the door
            for words in said:
                stranger.send(words)
        stranger.shutdown(socket.SHUT_WR)
        assert receiver.poll() == []
        with suppress(ConnectionResetError):  # the door, while it still spoke
            data, fds, _, _ = socket.recv_fds(stranger, 1000, 10)
            assert (data, list(fds)) == (b"", [])
        assert Path(str(receiver.describe()["path"])).exists()  # for the teacher, who may still come
    finally:
        stranger.close()
        receiver.forget()
        arena.close()


greetings = st.one_of(
    st.binary(max_size=64),
    st.builds(lambda n, size: struct.pack("<4sQQ", b"dkd1", n, size), numbers, numbers),
    st.just(struct.pack("<4sQQ", b"dkd1", 1, 4096)),
)


@given(greeting=greetings, tail=st.binary(max_size=16), num_fds=st.integers(0, 3), size=st.integers(0, 8192))
@fuzz
def test_whatever_a_student_hands_over_is_no_slot_unless_it_is_one(
    tmp_path_factory: pytest.TempPathFactory, greeting: bytes, tail: bytes, num_fds: int, size: int
) -> None:
    """The teacher's side: memory that could shrink, or of another size, would kill it when it writes."""
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    path.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    memory = os.memfd_create("unsealed")
    os.ftruncate(memory, size)

    def lie() -> None:
        connection = server.accept()[0]
        connection.recv(100)
        with suppress(OSError):  # it has left
            if greeting:
                connection.send(greeting)
            socket.send_fds(connection, [tail or b"dkd1"], [memory] * num_fds)
        connection.close()

    description: Description = {"path": str(path), "token": bytes(32)}
    server.bind(str(path))
    server.listen()
    before = descriptors()
    try:
        with running(lie), pytest.raises((RemoteProtocolError, TransportError)):
            shm.open_sender(description, num_slots=1, slot_bytes=4096, timeout_s=HANG_GUARD_S)
        expect_no_more(descriptors, before)
    finally:
        server.close()
        os.close(memory)


@contextmanager
def running(function: Callable[[], None]) -> Iterator[None]:
    """A function on a thread of its own, joined at the end of the block."""
    thread = threading.Thread(target=function)
    thread.start()
    yield
    thread.join()


# ---- the messages of ucx

ucx_numbers = st.integers(0, 2**64 - 1) | st.integers(0, 4)
small = st.integers(0, 2**16 - 1) | st.integers(0, 4)
ucx_announcements = st.builds(
    lambda ticket, seq, attempt, slot, num_bytes, header_bytes, num_parts, tail: (
        ucx_link.ANNOUNCE.pack(
            ucx_link.KIND_ANNOUNCE, ticket, seq, attempt, slot, num_bytes, header_bytes, num_parts
        )
        + tail
    ),
    ucx_numbers, signed, ucx_numbers, ucx_numbers, st.just(ARMED_BYTES) | ucx_numbers, small, small,
    st.binary(max_size=300) | st.binary(min_size=ARMED_BYTES, max_size=ARMED_BYTES),
)  # fmt: skip
ucx_tickets = st.builds(ucx_link.TICKET.pack, st.sampled_from([ucx_link.KIND_SENT, ucx_link.KIND_ACK]), ucx_numbers)
ucx_right = st.just(ucx_link.ANNOUNCE.pack(ucx_link.KIND_ANNOUNCE, 1, *FILL, ARMED_BYTES, 0, 0) + bytes(ARMED_BYTES))
ucx_messages = st.lists(
    ucx_right | ucx_announcements | ucx_tickets | st.binary(min_size=1, max_size=200), min_size=1, max_size=6
)
needs_ucx = pytest.mark.skipif("ucx" not in registry.available(), reason="there is no UCX here")


@needs_ucx
@given(said=ucx_messages)
@fuzz
def test_whatever_an_admitted_peer_sends_over_ucx_lands_nowhere_else(arena: SlotArena, said: list[bytes]) -> None:
    for slot in range(NUM_SLOTS):
        arena.poison(slot)
    receiver = ucx.open_receiver(arena, bind_host="127.0.0.1")
    receiver.arm(FILL, num_bytes=ARMED_BYTES)
    description = receiver.describe()
    token, address = description["token"], description["address"]
    assert isinstance(token, bytes)
    assert isinstance(address, bytes)
    link = ucx_link.Link(token, listens=ucx_link.TO_TEACHER, speaks=ucx_link.TO_STUDENT, local_host="127.0.0.1")
    try:
        link.connect(address, host="elsewhere", pid=os.getpid())
        greeting = ucx_link.GREETING.pack(ucx_link.KIND_GREETING, ucx_link.MAGIC, NUM_SLOTS, SLOT_BYTES)
        link.say(greeting + ucx_link.WHO.pack(b"elsewhere", os.getpid()) + link.address())
        for message in said:
            link.say(message)
        link.say(b"?")  # of no kind: with it the channel ends, if it has not ended before
        deadline_s = time.monotonic() + HANG_GUARD_S
        with suppress(PeerLost):
            while time.monotonic() < deadline_s:
                link.poll()
                for arrival in receiver.poll():
                    assert (arrival.fill, arrival.num_bytes) == (FILL, ARMED_BYTES)
            pytest.fail("the channel did not end")
        assert arena.view(0, torch.uint8, (SLOT_BYTES,))[ARMED_BYTES:].eq(POISON_BYTE).all()
        assert arena.view(1, torch.uint8, (SLOT_BYTES,)).eq(POISON_BYTE).all()
    finally:
        link.close()
        receiver.forget()


@needs_ucx
@given(data=st.data())
@settings(fuzz, max_examples=MANY // 6)  # each starts a process
def test_a_bent_address_of_ucx_ends_no_teacher(arena: SlotArena, data: st.DataObject) -> None:
    """Some that were found this way are the end of whoever connects to them."""
    receiver = ucx.open_receiver(arena, bind_host="127.0.0.1")
    try:
        description = receiver.describe()
        address = description["address"]
        assert isinstance(address, bytes)
        begin, length = data.draw(st.integers(0, len(address) - 1)), data.draw(st.integers(0, 8))
        bent = address[:begin] + data.draw(st.binary(max_size=8)) + address[begin + length :]
        link = ucx_link.Link(bytes(32), listens=ucx_link.TO_TEACHER, speaks=ucx_link.TO_STUDENT, local_host="127.0.0.1")
        with suppress(RemoteProtocolError):
            ucx_trial.check_address(bent, local_host="127.0.0.1", timeout_s=HANG_GUARD_S)
            link.connect(bent, host="elsewhere", pid=1)
        link.close()
    finally:
        receiver.forget()


@needs_ucx
def test_an_address_that_ucx_dies_of_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if any('transport.ucx_trial' in one for one in sys.orig_argv):\n"
        f"    sys.path.append({str(REPOSITORY)!r})\n"
        "    from transport import ucx_core\n"
        "    ucx_core.Connection.__init__ = lambda *given: os.abort()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RemoteProtocolError, match=r"an address of 99 bytes that UCX dies of \(SIGABRT\)"):
        ucx_trial.check_address(bytes(99), local_host="127.0.0.1", timeout_s=HANG_GUARD_S)


@needs_ucx
def test_files_where_we_are_do_not_get_into_the_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("enum", "re", "ring", "transport"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not yours')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    with pytest.raises(RemoteProtocolError, match="an address of 15 bytes"):
        ucx_trial.check_address(bytes(15), local_host="127.0.0.1", timeout_s=HANG_GUARD_S)


@needs_ucx
def test_a_trial_ends_with_the_time_for_the_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeadlineExceeded, match=r"not tried within 0\.001 s"):
        ucx_trial.check_address(bytes(99), local_host="127.0.0.1", timeout_s=0.001)
    monkeypatch.setenv(ucx_trial.TRUST_VARIABLE, "1")
    ucx_trial.check_address(bytes(99), local_host="127.0.0.1", timeout_s=0.001)  # it is not tried


# ---- descriptions in the OFFER

scalars: st.SearchStrategy[Scalar] = st.one_of(
    st.text(max_size=200), st.integers(-(2**63), 2**64 - 1), st.binary(max_size=200), st.booleans()
)
KEYS = ("endpoint", "token", "server_key", "secret", "path", "address", "host", "host_id", "pid")
LIKELY: tuple[Scalar, ...] = (
    *("tcp://127.0.0.1:1", "tcp://[::1]:99999", "tcp://\0:1", "tcp://", "ipc:///x", "/dev/null", "/", "\0", "x" * 5000),
    *("127.0.0.1", "0.0.0.0", b"", bytes(32), b"\xff" * 40, b"0" * 40, -1, 0, 1, 2**64 - 1),
)


@pytest.mark.parametrize("backend", registry.available(same_process=True))
@given(description=st.dictionaries(st.sampled_from(KEYS), st.one_of(st.sampled_from(LIKELY), scalars), max_size=9))
@fuzz
def test_any_description_is_refused_by_an_error_of_ours(backend: str, description: Description) -> None:
    before = descriptors()
    with pytest.raises(DisaggKDError):
        registry.load(backend).open_sender(description, num_slots=1, slot_bytes=4096, timeout_s=0.2)
    expect_no_more(descriptors, before)
