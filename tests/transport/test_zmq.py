"""The zmq backend: who is let in, what a peer that breaks the protocol gets, and what happens when the wire does."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import zmq

from ring.core.errors import ConfigError, DeadlineExceeded, PeerLost, RemoteProtocolError, TransportError
from ring.core.messages import Description, FillId
from tests.endings import ends_with_its_test
from tests.limits import few_descriptors
from tests.transport.peers import HANG_GUARD_S, payload, wait_readable, while_serving
from transport import zmq_tcp
from transport.contract import Receiver, Sender, Ticket
from transport.memory import POISON_BYTE, SlotArena
from transport.zmq_link import (
    ACK,
    ANNOUNCE,
    CHUNK,
    CHUNK_BYTES,
    GREETING,
    KIND_ANNOUNCE,
    KIND_CHUNK,
    MAGIC,
    Link,
    bind,
    connect,
    tune_malloc,
)

NUM_SLOTS, SLOT_BYTES = 2, 3 * CHUNK_BYTES
FILL = FillId(1, 1, 0)


@pytest.fixture
def arena() -> Iterator[SlotArena]:
    made = SlotArena(NUM_SLOTS, SLOT_BYTES)
    yield made
    made.close()


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def receiver(arena: SlotArena, request: pytest.FixtureRequest) -> Iterator[Receiver]:
    made = zmq_tcp.open_receiver(arena, bind_host="127.0.0.1", encrypt=request.param)
    yield made
    made.forget()


def open_sender(description: Description, *, num_slots: int = NUM_SLOTS, timeout_s: float = HANG_GUARD_S) -> Sender:
    return ends_with_its_test(
        zmq_tcp.open_sender(description, num_slots=num_slots, slot_bytes=SLOT_BYTES, timeout_s=timeout_s)
    )


def assert_works(receiver: Receiver, sender: Sender, arena: SlotArena) -> None:
    """One fill gets through, and its ticket back."""
    source = payload(7, SLOT_BYTES)
    receiver.arm(FILL, num_bytes=SLOT_BYTES)
    ticket = sender.put(FILL, header=b"h", parts=[source])
    arrived, tickets = [], []
    while not (arrived and tickets):
        arrived += receiver.poll()
        tickets += sender.poll()
        wait_readable(receiver, sender)
    assert [arrival.fill for arrival in arrived] == [FILL]
    assert tickets == [ticket]
    assert torch.equal(arena.view(0, torch.uint8, (SLOT_BYTES,)), source)


def expect_lost(endpoint: Receiver | Sender) -> None:
    """Its end, and nothing else, is reported."""
    try:
        while endpoint.poll() == []:
            assert wait_readable(endpoint, timeout_s=HANG_GUARD_S)
        pytest.fail("something else was reported")
    except PeerLost:
        with pytest.raises(PeerLost):
            endpoint.poll()


# ---- who is let in


def test_a_wrong_token_or_key_is_turned_away_at_once_and_the_right_one_still_works(
    receiver: Receiver, arena: SlotArena
) -> None:
    guess: Description = {"token": b"guess"} if "token" in receiver.describe() else {"secret": zmq.curve_keypair()[1]}
    with pytest.raises(TransportError, match="turned us away") as raised:
        while_serving(receiver, lambda: open_sender({**receiver.describe(), **guess}))
    assert not isinstance(raised.value, DeadlineExceeded)
    sender = while_serving(receiver, lambda: open_sender(receiver.describe()))
    assert_works(receiver, sender, arena)
    sender.close()


def test_no_link_is_made_of_the_last_descriptors(arena: SlotArena) -> None:
    """At the limit libzmq ends the process."""
    with few_descriptors(20), pytest.raises(TransportError, match=r"needs 32 descriptors, and .* are left: raise"):
        zmq_tcp.open_receiver(arena, bind_host="127.0.0.1")


def test_a_second_teacher_can_not_take_over_even_with_the_token(receiver: Receiver, arena: SlotArena) -> None:
    sender = while_serving(receiver, lambda: open_sender(receiver.describe()))
    with pytest.raises(TransportError, match="turned us away"):
        while_serving(receiver, lambda: open_sender(receiver.describe()))
    assert_works(receiver, sender, arena)
    sender.close()


def address_of(description: Description) -> tuple[str, int]:
    host, _, port = str(description["endpoint"]).removeprefix("tcp://").rpartition(":")
    return host, int(port)


def test_strangers_that_speak_anything_else_change_nothing(receiver: Receiver, arena: SlotArena) -> None:
    sender = while_serving(receiver, lambda: open_sender(receiver.describe()))
    with contextlib.ExitStack() as strangers:
        context = zmq.Context()
        strangers.callback(context.destroy, linger=0)
        link = context.socket(zmq.DEALER)  # speaks zmq, shows no token
        link.connect(str(receiver.describe()["endpoint"]))
        link.send(GREETING.pack(MAGIC, NUM_SLOTS, SLOT_BYTES))
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"", b"\x80\x04K\x01.", bytes(1000)):
            connection = socket.create_connection(address_of(receiver.describe()))
            strangers.enter_context(connection)
            connection.send(words)
        assert_works(receiver, sender, arena)
    assert_works(receiver, sender, arena)
    sender.close()


def test_offered_slots_that_are_not_there_are_refused(receiver: Receiver) -> None:
    with pytest.raises(RemoteProtocolError, match="slots that were offered"):
        while_serving(receiver, lambda: open_sender(receiver.describe(), num_slots=3))


@pytest.mark.parametrize(
    "description",
    [
        {},
        {"endpoint": "ipc:///tmp/x", "token": b"x"},
        {"endpoint": "tcp://127.0.0.1:99999999", "token": b"x"},
        {"endpoint": "tcp://127.0.0.1:9", "token": b"x" * 256},
        {"endpoint": "tcp://127.0.0.1:9", "server_key": b"x" * 40, "secret": b"short"},
        {"endpoint": "tcp://127.0.0.1:9", "server_key": b"\xff" * 40, "secret": b"\xff" * 40},
        {"endpoint": "tcp://127.0.0.1:9", "server_key": zmq.curve_keypair()[0]},
        {"endpoint": "tcp://127.0.0.1:9", "token": 7},
    ],
)
def test_a_description_that_makes_no_sense_is_the_peers_fault(description: Description) -> None:
    with pytest.raises(RemoteProtocolError):
        open_sender(description)


def test_an_endpoint_where_nobody_listens_is_a_transport_error_at_once(receiver: Receiver) -> None:
    description = receiver.describe()
    receiver.close()
    with pytest.raises(TransportError, match="can't connect") as raised:
        open_sender(description)
    assert not isinstance(raised.value, DeadlineExceeded)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "no-such-host.invalid", "*"])
def test_an_address_that_can_not_be_listened_on_is_a_config_error(arena: SlotArena, host: str) -> None:
    with pytest.raises(ConfigError, match="zmq"):
        zmq_tcp.open_receiver(arena, bind_host=host)


def test_a_host_name_is_resolved(arena: SlotArena) -> None:
    receiver = zmq_tcp.open_receiver(arena, bind_host="localhost")
    host, port = address_of(receiver.describe())
    assert host in ("127.0.0.1", "[::1]")
    assert port > 0
    receiver.close()


def test_restarting_at_once_finds_a_port(arena: SlotArena) -> None:
    for _ in range(10):
        receiver = zmq_tcp.open_receiver(arena, bind_host="127.0.0.1")
        sender = while_serving(receiver, lambda made=receiver: open_sender(made.describe()))
        sender.close()
        receiver.close()


class LosesItsStudent(Link):
    """The student goes between the handshake and our greeting."""

    def __init__(self, student: zmq.Socket[bytes]) -> None:
        super().__init__()
        self._student = student

    def life_events(self) -> Iterator[tuple[zmq.Event, int]]:
        for event, value in super().life_events():
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._student.close(linger=0)
                give_up_s = time.monotonic() + HANG_GUARD_S
                while int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT and time.monotonic() < give_up_s:
                    self._monitor.poll(100)
            yield event, value


def test_a_student_that_goes_right_after_the_handshake_blocks_nobody() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    student = context.socket(zmq.DEALER)
    server_key, server_secret = zmq.curve_keypair()
    student.setsockopt(zmq.CURVE_SERVER, 1)
    student.setsockopt(zmq.CURVE_SECRETKEY, server_secret)
    student.bind("tcp://127.0.0.1:*")
    endpoint = student.getsockopt_string(zmq.LAST_ENDPOINT)
    link = LosesItsStudent(student)
    invitation: Description = {"server_key": server_key, "secret": zmq.curve_keypair()[1]}
    errors: list[TransportError] = []

    def knock() -> None:
        with pytest.raises(TransportError) as raised:
            connect(link, endpoint, invitation, GREETING.pack(MAGIC, 1, 1), timeout_s=HANG_GUARD_S)
        errors.append(raised.value)

    thread = threading.Thread(target=knock, daemon=True)
    thread.start()
    thread.join(HANG_GUARD_S)
    assert not thread.is_alive()
    link.close()
    context.destroy(linger=0)
    assert student.closed, "it came as far as the handshake"
    assert [type(error) for error in errors] == [TransportError], "at once, not when its time was over"


# ---- a peer that breaks the protocol


@pytest.fixture
def rogue(receiver: Receiver) -> Iterator[Link]:
    """A link that has the token and was greeted, and then says what it likes."""
    with contextlib.closing(Link()) as link:
        let_in(link, receiver)
        yield link


def let_in(link: Link, receiver: Receiver) -> None:
    endpoint = str(receiver.describe()["endpoint"])
    greeting = GREETING.pack(MAGIC, NUM_SLOTS, SLOT_BYTES)
    while_serving(receiver, lambda: connect(link, endpoint, receiver.describe(), greeting, timeout_s=HANG_GUARD_S))


def announce(ticket: int, fill: FillId, num_bytes: int, header: bytes = b"") -> bytes:
    return ANNOUNCE.pack(KIND_ANNOUNCE, ticket, *fill, num_bytes) + header


def chunk(ticket: int, index: int) -> bytes:
    return CHUNK.pack(KIND_CHUNK, ticket, index)


@pytest.mark.parametrize(
    "messages",
    [
        [[b""]],
        [[b"\x80\x04K\x01."]],
        [[chunk(1, 0), bytes(10)]],  # of nothing that was announced
        [[announce(1, FILL, 100)], [chunk(1, 1), bytes(100)]],  # not the first
        [[announce(1, FILL, 100)], [chunk(2, 0), bytes(100)]],  # another put's
        [[announce(1, FILL, 100)], [chunk(1, 0), bytes(101)]],  # more than announced
        [[announce(1, FILL, 100)], [chunk(1, 0)]],  # no payload
        [[announce(1, FILL, 100)], [chunk(1, 0), b""]],
        [[announce(1, FILL, 100)], [chunk(1, 0), bytes(60)], [chunk(1, 0), bytes(40)]],  # repeated
        [[announce(1, FILL, 100)], [announce(2, FILL, 100)]],  # before the first was whole
        [[announce(1, FillId(1, 1, 0), 2**62)]],
        [[announce(1, FILL, 100, header=bytes(1025))]],
    ],
)
def test_a_broken_protocol_ends_the_channel_and_reports_no_fill(
    receiver: Receiver, arena: SlotArena, rogue: Link, messages: list[list[bytes]]
) -> None:
    arena.poison(0)
    receiver.arm(FILL, num_bytes=100)
    for message in messages:
        rogue.socket.send_multipart(message)
    expect_lost(receiver)
    assert arena.view(0, torch.uint8, (SLOT_BYTES,))[100:].eq(POISON_BYTE).all()


def test_frames_beyond_the_payload_of_a_chunk_are_ignored(receiver: Receiver, rogue: Link) -> None:
    receiver.arm(FILL, num_bytes=4)
    rogue.socket.send_multipart([announce(1, FILL, 4), b"more", b"and more"])
    rogue.socket.send_multipart([chunk(1, 0), b"data", b"more"])
    assert [arrival.fill for arrival in receiver.wait(timeout_s=HANG_GUARD_S)] == [FILL]


def test_a_frame_larger_than_any_chunk_is_not_even_received(receiver: Receiver, rogue: Link) -> None:
    rogue.socket.send(bytes(4 * CHUNK_BYTES))
    expect_lost(receiver)


def test_an_acknowledgement_of_what_was_not_sent_ends_the_channel(arena: SlotArena, receiver: Receiver) -> None:
    sender = while_serving(receiver, lambda: open_sender(receiver.describe()))
    receiver._link.socket.send(ACK.pack(5))
    expect_lost(sender)
    sender.close()


def test_a_student_can_not_acknowledge_what_is_still_in_the_teachers_hands(
    arena: SlotArena, receiver: Receiver
) -> None:
    """Else one that reads nothing and acknowledges everything would be sent more and more, all of it kept."""
    sender = while_serving(receiver, lambda: open_sender(receiver.describe()))
    source = payload(1, SLOT_BYTES)
    num_puts = 20  # far more than zmq and the kernel take
    for seq in range(num_puts):
        sender.put(FillId(seq, 1, 0), header=b"", parts=[source])
    while 1 not in sender._unacknowledged:
        assert sender.poll() == []
    receiver._link.socket.send(ACK.pack(1))  # it left, whatever became of it
    receiver._link.socket.send(ACK.pack(num_puts))
    assert [ticket.number for ticket in poll_until_news(sender)] == [1]
    expect_lost(sender)
    assert sender.unfinished == num_puts - 1
    sender.close()


def poll_until_news(sender: Sender) -> list[Ticket]:
    while not (tickets := sender.poll()):
        assert wait_readable(sender, timeout_s=HANG_GUARD_S), "nothing comes"
    return tickets


def test_an_acknowledgement_may_follow_right_after_the_last_chunk(arena: SlotArena, receiver: Receiver) -> None:
    """However many chunks a turn of the teacher hands over, what has left whole is known to have left."""
    sender = while_serving(receiver, lambda: open_sender(receiver.describe()))
    for num_bytes in (0, 1, CHUNK_BYTES, CHUNK_BYTES + 1):
        fill = FillId(num_bytes, 1, 0)
        receiver.arm(fill, num_bytes=num_bytes)
        ticket = sender.put(fill, header=b"", parts=[payload(1, num_bytes)])
        assert [arrival.fill for arrival in receiver.wait(timeout_s=HANG_GUARD_S)] == [fill]
        assert sender.unfinished == 1
        assert poll_until_news(sender) == [ticket]
    sender.close()


def test_a_teacher_that_reads_no_acknowledgement_is_dropped(arena: SlotArena, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait in the student's memory, and nothing else bounds them: an unarmed fill of no bytes costs it nothing."""

    def bind_with_little_room(link: Link, host: str) -> str:
        link.socket.setsockopt(zmq.SNDBUF, 4096)  # of the kernel, or the test would take a minute
        return bind(link, host)

    monkeypatch.setattr(zmq_tcp, "bind", bind_with_little_room)
    monkeypatch.setattr(zmq_tcp, "_MAX_UNREAD_ACKS", 256)
    receiver = zmq_tcp.open_receiver(arena, bind_host="127.0.0.1")
    ends = contextlib.ExitStack()
    ends.callback(receiver.forget)
    rogue = ends.enter_context(contextlib.closing(Link()))
    # Less than a few segments, and the kernel drops what acknowledges the rogue's own bytes: neither side gets on.
    rogue.socket.setsockopt(zmq.RCVBUF, 65536)

    def flood() -> None:
        until_s = time.monotonic() + HANG_GUARD_S
        while time.monotonic() < until_s:
            with contextlib.suppress(zmq.Again):
                rogue.socket.send(announce(1, FILL, 0), zmq.NOBLOCK)
            assert receiver.poll() == []

    with ends:
        let_in(rogue, receiver)
        with pytest.raises(PeerLost, match="does not read its acknowledgements, 257 of them"):
            flood()


# ---- the wire


@contextlib.contextmanager
def wire(target: tuple[str, int], *, limit_bytes: int) -> Iterator[str]:
    """An endpoint that forwards to the real one, and is cut once so many bytes went through or either side ended."""
    listener = socket.create_server(("127.0.0.1", 0))

    def forward() -> None:
        left_bytes = limit_bytes
        # Whoever ends may reset, and nobody may come at all: then the listener is shut down.
        with contextlib.suppress(OSError), listener.accept()[0] as teacher, socket.create_connection(target) as student:
            while left_bytes > 0:
                for end in select.select([teacher, student], [], [])[0]:
                    data = end.recv(min(left_bytes, 1 << 16))
                    if not data:
                        return
                    (student if end is teacher else teacher).sendall(data)
                    left_bytes -= len(data)

    thread = threading.Thread(target=forward)
    with listener:
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(HANG_GUARD_S)
        assert not thread.is_alive(), "the wire hangs"


@pytest.mark.parametrize("limit_bytes", [1000, CHUNK_BYTES, 2 * CHUNK_BYTES + 5000])
def test_a_cut_wire_is_noticed_by_both_and_no_partial_fill_is_reported(receiver: Receiver, limit_bytes: int) -> None:
    with wire(address_of(receiver.describe()), limit_bytes=limit_bytes) as endpoint:
        sender = while_serving(receiver, lambda: open_sender({**receiver.describe(), "endpoint": endpoint}))
        receiver.arm(FILL, num_bytes=SLOT_BYTES)
        sender.put(FILL, header=b"", parts=[payload(1, SLOT_BYTES)])
        sender_end = threading.Thread(target=expect_lost, args=(sender,))
        sender_end.start()  # both have to keep going for the bytes to flow
        expect_lost(receiver)
        sender_end.join(HANG_GUARD_S)
        assert sender.unfinished == 1
    sender.close()


def test_a_teacher_that_is_gone_stays_gone_though_a_stranger_has_the_number_of_its_connection(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel gives descriptors out anew; both events may be there at one look."""
    assert isinstance(receiver, zmq_tcp.ZmqReceiver)
    sender = while_serving(receiver, lambda: open_sender(receiver.describe()))
    peer = receiver._peer
    assert peer is not None
    events = [(zmq.EVENT_DISCONNECTED, peer), (zmq.EVENT_ACCEPTED, peer)]
    monkeypatch.setattr(receiver._link, "life_events", lambda: iter(events))
    with pytest.raises(PeerLost):
        receiver.poll()
    sender.close()


def test_no_timer_of_zmq_can_cut_or_mend_a_link_and_its_queues_are_bounded(receiver: Receiver) -> None:
    """Heartbeats would cut off a student that reads nothing for a while, with all that is in the queue."""
    sender = while_serving(receiver, lambda: open_sender(receiver.describe()))
    for link in (receiver._link, sender._link):
        assert link.socket.getsockopt(zmq.HEARTBEAT_IVL) == 0
        assert link.socket.getsockopt(zmq.RECONNECT_IVL) == -1
        assert link.socket.getsockopt(zmq.LINGER) == 0
        assert 0 < link.socket.getsockopt(zmq.MAXMSGSIZE) < 2 * CHUNK_BYTES
    sender.close()


def test_the_allocator_takes_the_settings_for_chunks() -> None:
    assert tune_malloc()
