"""The shm backend: its private socket, who gets the slots, and what a peer can do to it."""

from __future__ import annotations

import os
import select
import signal
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import torch

from ring.core.errors import ConfigError, DeadlineExceeded, PeerLost, RemoteProtocolError, TransportError
from ring.core.messages import Description, FillId
from tests.endings import ends_with_its_test
from tests.leaks import expect_no_more, held
from tests.limits import descriptors_below, few_descriptors
from tests.transport.peers import HANG_GUARD_S, Peer, digest, payload_digest, wait_readable, while_serving
from transport import shm
from transport.contract import Fence, Receiver, Sender
from transport.fills import Part
from transport.memory import SlotArena

SLOT_BYTES = 4096
NUM_SLOTS = 2


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the sockets of this test go."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def arena() -> Iterator[SlotArena]:
    made = SlotArena(NUM_SLOTS, SLOT_BYTES)
    yield made
    made.close()


@pytest.fixture
def receiver(arena: SlotArena, runtime: Path) -> Iterator[Receiver]:
    made = shm.open_receiver(arena, bind_host="")
    yield made
    made.forget()


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer(in_thread=False)
    yield made
    made.end()


def open_sender(description: Description, **changes: int) -> Sender:
    sizes = {"num_slots": NUM_SLOTS, "slot_bytes": SLOT_BYTES} | changes
    return ends_with_its_test(shm.open_sender(description, **sizes, timeout_s=HANG_GUARD_S))


def test_the_socket_is_private_and_gone_once_the_teacher_is_there(receiver: Receiver, runtime: Path) -> None:
    path = Path(str(receiver.describe()["path"]))
    assert path.parent.parent == runtime
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    sender = while_serving(receiver, lambda: open_sender(receiver.describe()))
    assert list(runtime.iterdir()) == []
    with pytest.raises(TransportError, match="No such file"):
        open_sender(receiver.describe())
    sender.close()


def test_the_socket_is_gone_once_the_receiver_is_closed(receiver: Receiver, runtime: Path) -> None:
    receiver.close()
    assert list(runtime.iterdir()) == []


@pytest.mark.case(56)
def test_a_wrong_token_gets_no_slot_and_the_right_one_still_does(receiver: Receiver) -> None:
    forged = {**receiver.describe(), "token": bytes(32)}
    with pytest.raises(TransportError, match="turned us away"):
        while_serving(receiver, lambda: open_sender(forged))
    sender = while_serving(receiver, lambda: open_sender(receiver.describe()))
    receiver.arm(FillId(1, 1, 0), num_bytes=0)
    sender.put(FillId(1, 1, 0), header=b"", parts=[])
    assert len(receiver.wait(timeout_s=HANG_GUARD_S)) == 1
    sender.close()


def test_strangers_that_say_nothing_do_not_keep_the_teacher_out(receiver: Receiver) -> None:
    with ExitStack() as ends:
        strangers = []
        for _ in range(20):
            strangers.append(ends.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)))
            strangers[-1].connect(str(receiver.describe()["path"]))
            assert receiver.poll() == []
        while_serving(receiver, lambda: open_sender(receiver.describe()))
        for stranger in strangers:  # all of them are turned away by now
            assert select.select([stranger], [], [], HANG_GUARD_S)[0]


@pytest.mark.case(56)
def test_a_teacher_that_dies_while_it_attaches_harms_no_slot(arena: SlotArena, receiver: Receiver, peer: Peer) -> None:
    """Only the student owns the memory: whatever happens to those who map it, it stays, and can be offered again."""
    peer.start("die_after_the_token", receiver.describe())
    with pytest.raises(PeerLost):
        receiver.wait(timeout_s=HANG_GUARD_S)
    peer.has_been_killed()
    receiver.close()
    with ExitStack() as ends:
        other = Peer(in_thread=False)
        ends.callback(other.end)
        again = shm.open_receiver(arena, bind_host="")
        ends.callback(again.forget)
        other.connect_to(again, arena, "shm")
        again.arm(FillId(1, 1, 0), num_bytes=SLOT_BYTES)
        other.start("put", FillId(1, 1, 0), SLOT_BYTES)
        assert len(again.wait(timeout_s=HANG_GUARD_S)) == 1
        assert digest(arena.buffer(0)) == payload_digest(1, SLOT_BYTES)


def test_a_path_that_is_too_long_for_a_unix_address_works(
    arena: SlotArena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path.joinpath(*["a-directory-with-a-long-name"] * 6)
    deep.mkdir(parents=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    receiver = shm.open_receiver(arena, bind_host="")
    assert len(str(receiver.describe()["path"])) > 108
    while_serving(receiver, lambda: open_sender(receiver.describe())).close()
    receiver.forget()


def test_nowhere_to_listen_is_a_config_error(arena: SlotArena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="TMPDIR"):
        shm.open_receiver(arena, bind_host="")


def test_what_a_killed_student_left_is_removed_and_what_lives_is_not(
    arena: SlotArena, runtime: Path, peer: Peer
) -> None:
    living = shm.open_receiver(arena, bind_host="")
    peer.call("set_runtime_directory", str(runtime))
    left = Path(peer.call("open_receiver", "shm", 1, 4096)["path"]).parent
    peer.kill()
    assert left.exists()
    for directory in runtime.iterdir():
        os.utime(directory, (0, 0))
    newcomer = shm.open_receiver(arena, bind_host="")
    directories = {Path(str(receiver.describe()["path"])).parent for receiver in (living, newcomer)}
    assert set(runtime.iterdir()) == directories
    living.forget()
    newcomer.forget()


def test_a_student_without_descriptors_left_leaves_no_directory(arena: SlotArena, runtime: Path) -> None:
    receiver = shm.open_receiver(arena, bind_host="")
    with descriptors_below(0):  # what the receiver closes is taken by other threads at once
        receiver.forget()
    assert list(runtime.iterdir()) == []


def test_what_merely_looks_like_ours_is_never_removed(arena: SlotArena, runtime: Path) -> None:
    keys, alike, empty = (runtime / name for name in ("disaggkd-keys", ".disaggkd-shm-notes", ".disaggkd-shm-empty"))
    for directory in (keys, alike, empty):
        directory.mkdir()
    (keys / "secret.key").write_text("secret")
    (alike / "s").write_text("no socket")
    for directory in (keys, alike, empty):
        os.utime(directory, (0, 0))
    newcomer = shm.open_receiver(arena, bind_host="")
    newcomer.forget()
    assert sorted(runtime.iterdir()) == sorted((keys, alike))
    assert (keys / "secret.key").read_text() == "secret"
    assert (alike / "s").read_text() == "no socket"


def test_a_student_with_other_slots_than_offered_is_refused(receiver: Receiver) -> None:
    with pytest.raises(RemoteProtocolError, match="3 slots"):
        while_serving(receiver, lambda: open_sender(receiver.describe(), num_slots=3))
    with pytest.raises(RemoteProtocolError, match="keys"):
        open_sender({"path": "/tmp/x"})


@contextmanager
def false_student(runtime: Path, fd: int) -> Iterator[Description]:
    """A student that hands over `fd` as its slots."""
    path = str(runtime / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()

        def serve() -> None:
            with suppress(OSError), listener.accept()[0] as connection:  # nobody may come, or may go in the middle
                connection.recv(64)
                connection.send(b"dkd1" + NUM_SLOTS.to_bytes(8, "little") + SLOT_BYTES.to_bytes(8, "little"))
                socket.send_fds(connection, [b"dkd1"], [fd] * NUM_SLOTS)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield {"path": path, "token": bytes(32)}
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(HANG_GUARD_S)


def test_slots_that_could_shrink_under_the_teacher_are_refused(runtime: Path) -> None:
    before = held(runtime)
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, SLOT_BYTES)
    file = os.open(runtime / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, SLOT_BYTES)
    for fd in (unsealed, file):
        with false_student(runtime, fd) as description, pytest.raises(RemoteProtocolError, match="seals"):
            open_sender(description)
        os.close(fd)
        (runtime / "s").unlink()
    (runtime / "file").unlink()
    expect_no_more(lambda: held(runtime), before)


@pytest.mark.parametrize("num_more", [20, 21, 200, 201])
def test_a_teacher_without_descriptors_left_says_so_and_keeps_nothing(
    arena: SlotArena, runtime: Path, num_more: int
) -> None:
    before = held(runtime)
    wide = SlotArena(200, 4096)
    receiver = shm.open_receiver(wide, bind_host="")
    description = receiver.describe()
    receiver_thread_done = threading.Event()
    lost: list[Exception] = []

    def serve() -> None:
        try:
            while not receiver_thread_done.is_set():
                receiver.poll()
                wait_readable(receiver, timeout_s=0.01)
        except PeerLost as error:
            lost.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with few_descriptors(num_more), pytest.raises(TransportError, match="ulimit -n"):
            shm.open_sender(description, num_slots=200, slot_bytes=4096, timeout_s=HANG_GUARD_S)
    finally:
        receiver_thread_done.set()
        thread.join(HANG_GUARD_S)
        receiver.forget()
        wide.close()
    expect_no_more(lambda: held(runtime), before)


def test_completions_that_the_socket_has_no_room_for_wait_in_the_sender(receiver: Receiver) -> None:
    sender = while_serving(receiver, lambda: open_sender(receiver.describe()))
    num_puts = 5000
    for seq in range(num_puts):
        sender.put(FillId(seq, 1, 0), header=bytes(1000), parts=[])
    tickets = sender.poll()
    assert 0 < len(tickets) < num_puts
    assert sender.poll() == []
    assert not wait_readable(sender, timeout_s=0)
    while receiver.dropped < num_puts:
        assert receiver.poll() == []
        if sender.unfinished:
            assert wait_readable(sender, timeout_s=HANG_GUARD_S)
            tickets += sender.poll()
    assert [ticket.number for ticket in tickets] == list(range(1, num_puts + 1))
    sender.close()


def test_a_teacher_that_floods_its_student_is_heard_in_turns(receiver: Receiver) -> None:
    sender = while_serving(receiver, lambda: open_sender(receiver.describe()))
    for seq in range(5000):
        sender.put(FillId(seq, 1, 0), header=b"", parts=[])
    num_sent = len(sender.poll())
    assert num_sent > shm.MESSAGES_A_TURN
    receiver.arm(FillId(1, 2, 0), num_bytes=0)
    assert receiver.poll() == []
    assert receiver.dropped == shm.MESSAGES_A_TURN
    assert wait_readable(receiver, timeout_s=0), "the rest is not forgotten"
    while receiver.dropped < num_sent:
        assert receiver.poll() == []
    sender.close()


def test_a_student_without_descriptors_left_says_so_when_its_teacher_knocks(receiver: Receiver) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as teacher:
        teacher.connect(str(receiver.describe()["path"]))
        with few_descriptors(0), pytest.raises(TransportError, match="ulimit -n"):
            receiver.poll()


def test_a_dead_teacher_is_noticed_although_its_child_keeps_the_socket_open(
    arena: SlotArena, receiver: Receiver, peer: Peer
) -> None:
    peer.connect_to(receiver, arena, "shm")
    child = peer.call("fork_a_sleeper")
    try:
        receiver.arm(FillId(1, 1, 0), num_bytes=10)
        assert receiver.disarm(FillId(1, 1, 0)) is Fence.PENDING
        peer.kill()
        with pytest.raises(PeerLost, match="process ended"):
            receiver.wait(timeout_s=HANG_GUARD_S)
        assert receiver.poll_fenced() == [FillId(1, 1, 0)]
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_teacher_that_closes_in_the_middle_of_its_own_put_writes_nothing_after_its_end(
    arena: SlotArena, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler may close the sender between two parts; the student must not take that for a fence too early."""
    sender = while_serving(receiver, lambda: open_sender(receiver.describe()))
    fill = FillId(1, 1, 0)
    receiver.arm(fill, num_bytes=2)
    handled = []

    def close(number: int, frame: object) -> None:
        sender.close()
        handled.append(number)

    copy_into = shm.copy_into

    def copy_and_be_interrupted(slot: torch.Tensor, sources: list[Part]) -> None:
        copy_into(slot, sources[:1])
        signal.raise_signal(signal.SIGUSR1)
        assert receiver.poll() == []  # no end yet: the second part is still to be written
        copy_into(slot[1:], sources[1:])

    monkeypatch.setattr(shm, "copy_into", copy_and_be_interrupted)
    before = signal.signal(signal.SIGUSR1, close)
    try:
        with pytest.raises(TransportError):
            sender.put(fill, header=b"", parts=[torch.ones(1, dtype=torch.uint8)] * 2)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert handled == [signal.SIGUSR1]
    with pytest.raises(PeerLost):
        receiver.wait(timeout_s=HANG_GUARD_S)


def test_nobody_there_is_a_deadline_and_no_socket_is_a_transport_error(receiver: Receiver, runtime: Path) -> None:
    with pytest.raises(DeadlineExceeded):
        shm.open_sender(receiver.describe(), num_slots=2, slot_bytes=SLOT_BYTES, timeout_s=0.02)
    with pytest.raises(TransportError):
        open_sender({"path": str(runtime / "nothing" / "s"), "token": bytes(32)})
