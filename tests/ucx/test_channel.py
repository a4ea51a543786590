"""What is particular to UCX: nothing is loaded or set before it is needed; tags, strangers, ends in bounded time."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from ring.core.errors import ConfigError, DeadlineExceeded, PeerLost, RemoteProtocolError
from ring.core.messages import FillId
from tests.endings import ends_with_its_test
from tests.leaks import expect_no_more
from tests.transport.peers import HANG_GUARD_S, Peer, payload, payload_digest, resources, while_serving
from tests.ucx.conftest import REPOSITORY
from transport import registry, ucx, ucx_library
from transport.contract import Ticket
from transport.devices import net_devices
from transport.host import host_id
from transport.memory import SlotArena
from transport.ucx_link import (
    ANNOUNCE,
    GREETING,
    KIND_ACK,
    KIND_ANNOUNCE,
    KIND_GREETING,
    MAGIC,
    TICKET,
    TO_STUDENT,
    TO_TEACHER,
    WHO,
    Link,
    control_tag,
    payload_tag,
)
from transport.ucx_receiver import UcxReceiver

MIB = 1 << 20


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer(in_thread=False)
    yield made
    made.end()


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> Iterator[tuple[SlotArena, UcxReceiver]]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    arena = SlotArena(2, 4 * MIB)
    receiver = ucx.open_receiver(arena, bind_host="127.0.0.1")
    yield arena, receiver
    receiver.close()
    receiver.forget()
    arena.close()


def python(code: str) -> str:
    run = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return run.stdout.strip()


def test_importing_the_backend_loads_no_ucx_and_opening_it_sets_no_variable() -> None:
    assert python("import transport.ucx; print('libucp' in open('/proc/self/maps').read())") == "False"
    code = "import os; before = dict(os.environ); from transport import ucx_core; ucx_core.context(); "
    assert python(code + "print(before == dict(os.environ))") == "True"


def test_without_the_extra_ucx_says_what_to_install_and_auto_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "libucx" else find_spec(name))
    monkeypatch.setattr(ucx_library, "find_library", lambda name: None)
    assert "ucx" not in registry.offered("auto")
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[ucx\]' in a clone"):
        registry.load("ucx")
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[ucx\]' in a clone"):
        registry.offered("ucx")


def test_a_library_that_can_not_be_loaded_is_named() -> None:
    code = "from transport import ucx_core\ntry: ucx_core.context()\nexcept Exception as e: print(type(e).__name__, e)"
    env = {**os.environ, ucx_library.LIBRARY_VARIABLE: "/nowhere/libucp.so.0"}
    run = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, env=env, capture_output=True, text=True)
    assert run.stdout.startswith("ConfigError")
    assert "/nowhere/libucp.so.0" in run.stdout


def test_a_ucx_that_would_crash_one_day_is_refused_with_the_reason() -> None:
    alone = "7f00-7f01 r-xp 0 00:00 1 /usr/lib/libucm.so.0.0.0\n7f02-7f03 r--p 0 00:00 1 /usr/lib/libucm.so.0.0.0\n"
    beside = alone + "7f04-7f05 r-xp 0 00:00 2 /venv/other.libs/libucm-f6ca5dec.so.0.0.0\n"
    assert ucx_library.why_unsafe((1, 21), environ={}, maps=alone) is None
    assert ucx_library.why_unsafe((1, 22), environ={"UCX_MEM_EVENTS": "n"}, maps=beside) is None
    assert ucx_library.why_unsafe((1, 21), environ={"UCX_MEM_EVENTS": "n"}, maps=alone) == "UCX_MEM_EVENTS=n"
    reason = ucx_library.why_unsafe((1, 21), environ={}, maps=beside)
    assert reason is not None
    assert "/venv/other.libs/libucm-f6ca5dec.so.0.0.0" in reason
    assert ucx_library.version() >= (1, 22), "what constraints.txt installs is safe"


def test_a_fetch_that_is_given_up_ends_well_where_memory_is_not_watched() -> None:
    """UCX 1.21 died of it."""
    suite = [*sorted(map(str, (REPOSITORY / "tests" / "transport").glob("test_conformance_proc*.py"))), "--backend=ucx"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *suite, "-k", "stopped_teacher"],
        cwd=REPOSITORY,
        env={**os.environ, "UCX_MEM_EVENTS": "n", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-3000:]


def test_every_part_of_a_fill_and_of_the_token_makes_another_tag() -> None:
    tokens = (bytes(32), bytes(31) + b"\1")
    fills = [FillId(*numbers) for numbers in itertools.product((-1, 0, 1, 2**62), (0, 1, 2**62), (0, 1))]
    tags = {
        *(control_tag(token, direction) for token in tokens for direction in (TO_STUDENT, TO_TEACHER)),
        *(payload_tag(token, fill, n, part) for token in tokens for fill in fills for n in (1, 2) for part in (0, 1)),
    }
    assert len(tags) == 2 * (2 + len(fills) * 4)
    assert all(0 <= tag < 2**64 for tag in tags)


def test_who_does_not_know_the_token_is_not_heard(channel: tuple[SlotArena, UcxReceiver], peer: Peer) -> None:
    arena, receiver = channel
    forged = {**receiver.describe(), "token": bytes(32)}
    with pytest.raises(DeadlineExceeded):
        ucx.open_sender(forged, num_slots=2, slot_bytes=arena.slot_bytes, timeout_s=0.2)
    assert receiver.poll() == []
    peer.connect_to(receiver, arena, "ucx")
    receiver.arm(FillId(1, 1, 0), num_bytes=MIB)
    peer.start("put", FillId(1, 1, 0), MIB)
    assert [arrival.fill for arrival in receiver.wait(timeout_s=HANG_GUARD_S)] == [FillId(1, 1, 0)]


@pytest.mark.parametrize("missing", ["address", "token", "host", "host_id", "pid"])
def test_a_description_that_makes_no_sense_is_refused(channel: tuple[SlotArena, UcxReceiver], missing: str) -> None:
    description = {key: value for key, value in channel[1].describe().items() if key != missing}
    with pytest.raises(RemoteProtocolError, match="described by"):
        ucx.open_sender(description, num_slots=2, slot_bytes=4 * MIB, timeout_s=HANG_GUARD_S)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pid": 0}, "process 0; allowed"),
        ({"pid": -1}, "process -1; allowed"),
        ({"pid": 2**31}, "process 2147483648; allowed"),
        ({"address": b""}, "an address of 0 bytes"),
        ({"address": bytes(15)}, "an address of 15 bytes"),
        ({"address": b"\x0f" + bytes(63)}, "begins with 0f; ours"),
    ],
)
def test_a_process_or_an_address_that_is_none_is_refused(
    channel: tuple[SlotArena, UcxReceiver], changes: dict[str, int | bytes], message: str
) -> None:
    description = {**channel[1].describe(), **changes}
    with pytest.raises(RemoteProtocolError, match=message):
        ucx.open_sender(description, num_slots=2, slot_bytes=4 * MIB, timeout_s=HANG_GUARD_S)


def as_teacher(channel: tuple[SlotArena, UcxReceiver], *, pid: int | None = None) -> Link:
    """The bare link of somebody who knows the token, and says what a teacher would not. It has greeted."""
    arena, receiver = channel
    token = receiver.describe()["token"]
    address = receiver.describe()["address"]
    assert isinstance(token, bytes)
    assert isinstance(address, bytes)
    link = ends_with_its_test(Link(token, listens=TO_TEACHER, speaks=TO_STUDENT, local_host="127.0.0.1"))
    link.connect(address, host="elsewhere", pid=os.getpid())
    greeting = GREETING.pack(KIND_GREETING, MAGIC, arena.num_slots, arena.slot_bytes)
    who = WHO.pack(host_id().encode(), os.getpid() if pid is None else pid)
    link.say(greeting + who + link.address())
    return link


def poll_both(link: Link, receiver: UcxReceiver, until: Callable[[], bool]) -> None:
    """Poll both ends until something holds, or the receiver raises."""
    deadline_s = time.monotonic() + HANG_GUARD_S
    while not until():
        link.poll()
        receiver.poll()
        assert time.monotonic() < deadline_s


@pytest.mark.parametrize("pid", [0, 2**31, 2**63])
def test_a_greeting_from_no_process_ends_the_channel(channel: tuple[SlotArena, UcxReceiver], pid: int) -> None:
    link = as_teacher(channel, pid=pid)
    with pytest.raises(PeerLost, match=f"process {pid}; allowed"):
        poll_both(link, channel[1], lambda: False)
    link.close()


def test_parts_that_nobody_announces_are_repeated_and_flooded_without_being_kept(
    channel: tuple[SlotArena, UcxReceiver],
) -> None:
    link = as_teacher(channel)
    receiver = channel[1]
    poll_both(link, receiver, lambda: receiver._link.is_connected)
    sent = [link.send(b"junk", tag=7) for _ in range(3)]
    sent += [link.send(b"junk", tag=1000 + i) for i in range(200)]
    poll_both(link, receiver, lambda: 1199 in receiver._early and all(transfer.is_done for transfer in sent))
    assert len(receiver._early) == 64
    assert 7 not in receiver._early, "the oldest gave way"
    link.close()


def test_a_teacher_that_announces_without_end_is_dropped(channel: tuple[SlotArena, UcxReceiver]) -> None:
    link = as_teacher(channel)
    receiver = channel[1]
    poll_both(link, receiver, lambda: receiver._link.is_connected)
    for seq in range(100):
        link.say(ANNOUNCE.pack(KIND_ANNOUNCE, seq, seq, 1, 0, 16, 0, 1) + (16).to_bytes(8, "little"))
    with pytest.raises(PeerLost, match="64 fills before it are not whole"):
        poll_both(link, receiver, lambda: False)
    link.close()


@pytest.mark.parametrize(
    ("num_bytes", "num_parts", "rest"),
    [
        (0, 3, b""),  # too short for the sizes of its parts
        (0, 3, bytes(23)),
        (16, 1, bytes(8)),  # sizes of another sum
        (16, 1, (8).to_bytes(8, "little") + bytes(8)),  # both parts and payload
        (16, 0, bytes(15)),
        (0, 0, b"x"),
        (8 * MIB, 1, (8 * MIB).to_bytes(8, "little")),  # no slot is so large
    ],
)
def test_an_announcement_that_makes_no_sense_ends_the_channel(
    channel: tuple[SlotArena, UcxReceiver], num_bytes: int, num_parts: int, rest: bytes
) -> None:
    link = as_teacher(channel)
    receiver = channel[1]
    poll_both(link, receiver, lambda: receiver._link.is_connected)
    link.say(ANNOUNCE.pack(KIND_ANNOUNCE, 1, 1, 1, 0, num_bytes, 0, num_parts) + rest)
    with pytest.raises(PeerLost, match="makes no sense"):
        poll_both(link, receiver, lambda: False)
    link.close()


def test_slots_of_another_size_are_refused(channel: tuple[SlotArena, UcxReceiver], peer: Peer) -> None:
    arena, receiver = channel
    peer.start("open_sender", "ucx", dict(receiver.describe()), arena.num_slots, arena.slot_bytes * 2)
    with pytest.raises(PeerLost):
        receiver.wait(timeout_s=HANG_GUARD_S)
    with pytest.raises(RemoteProtocolError, match="greeting"):
        peer.result()


def open_here(channel: tuple[SlotArena, UcxReceiver]) -> ucx.UcxSender:
    """The teacher of a channel whose student is in this process too."""
    arena, receiver = channel
    sender = while_serving(
        receiver,
        lambda: ucx.open_sender(receiver.describe(), num_slots=2, slot_bytes=arena.slot_bytes, timeout_s=HANG_GUARD_S),
    )
    return ends_with_its_test(sender)


def poll_until_lost(sender: ucx.UcxSender, receiver: UcxReceiver) -> None:
    """While the student says what it has to say, and takes nothing in."""
    deadline_s = time.monotonic() + HANG_GUARD_S
    while time.monotonic() < deadline_s:
        assert sender.poll() == []
        receiver._link._open_worker().progress(budget_s=1e-3)
    raise AssertionError("the sender goes on")


@pytest.mark.parametrize("number", [1, 4, 5], ids=["not fetched", "not announced", "never put"])
def test_a_student_can_not_acknowledge_what_it_did_not_fetch(
    channel: tuple[SlotArena, UcxReceiver], number: int
) -> None:
    """Else one that fetches nothing and acknowledges everything would be sent more and more, all of it kept."""
    receiver = channel[1]
    sender = open_here(channel)
    source = payload(1, MIB)
    for seq in range(4):
        sender.put(FillId(seq, 1, 0), header=b"", parts=[source])
    receiver._link.say(TICKET.pack(KIND_ACK, number))
    with pytest.raises(PeerLost, match="acknowledged what was not sent"):
        poll_until_lost(sender, receiver)
    assert sender.unfinished == 4
    sender.close()


def test_a_short_put_that_has_not_left_is_complete_only_when_it_has(channel: tuple[SlotArena, UcxReceiver]) -> None:
    receiver = channel[1]
    sender = open_here(channel)
    source = payload(1, 4096)
    tickets: list[Ticket] = []
    while len(sender._moving) < 2:  # UCX takes a bounded number of them at a time
        tickets.append(sender.put(FillId(len(tickets), 1, 0), header=b"", parts=[source]))
    late = sender._moving[0].ticket
    receiver._link.say(TICKET.pack(KIND_ACK, late.number))
    deadline_s = time.monotonic() + HANG_GUARD_S
    while not sender._moving[0].is_acknowledged:
        assert sender.poll() == []
        assert time.monotonic() < deadline_s
    assert sender.unfinished == len(tickets)
    done: list[Ticket] = []

    def read() -> None:
        while time.monotonic() < deadline_s:
            receiver.poll()
            done.extend(sender.poll())

    # The student acknowledges it again when it has read it; that ends the channel, which either side may see first.
    with pytest.raises(PeerLost):
        read()
    with pytest.raises(PeerLost, match="acknowledged what was not sent"):
        sender.poll()
    assert sorted(ticket.number for ticket in done) == list(range(1, late.number + 1))
    sender.close()


def test_more_parts_than_an_announcement_has_room_for_arrive_as_one(peer: Peer) -> None:
    whole = payload(3, 2000 * 64)
    sender = peer.accept("ucx", num_slots=1, slot_bytes=MIB)
    peer.call("arm", [FillId(3, 1, 0)], whole.numel())
    sender.put(FillId(3, 1, 0), header=b"h", parts=list(torch.split(whole, 64)))
    peer.start("receive", 1)
    assert peer.result_while_polling(sender)[0] == [(FillId(3, 1, 0), b"h", payload_digest(3, whole.numel()))]
    sender.close()


def test_a_sender_closes_and_leaks_nothing_while_its_student_is_stopped_in_the_middle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def life() -> None:
        student = Peer(in_thread=False)
        try:
            sender = student.accept("ucx", num_slots=2, slot_bytes=4 * MIB)
            student.call("arm", [FillId(seq, 1, seq) for seq in range(2)], 4 * MIB)
            student.stop()
            for seq in range(2):
                sender.put(FillId(seq, 1, seq), header=b"", parts=[payload(seq, 4 * MIB)])
            assert sender.poll() == []
            sender.close()
            student.kill()
        finally:
            student.end()

    life()
    before = resources()
    for _ in range(3):
        life()
    expect_no_more(resources, before)


def test_an_address_is_turned_into_the_devices_that_have_it() -> None:
    assert net_devices("127.0.0.1") == "lo"
    assert net_devices("localhost") == "lo"
    for bad in ("0.0.0.0", "no.such.host.invalid"):
        with pytest.raises(ConfigError, match=bad.replace(".", r"\.")):
            net_devices(bad)
