"""The transport contract, clause by clause: payloads, deadlines, ends, completions, back-pressure.

Fences and capabilities are in test_conformance_fences.py, what happens when a process is killed or stopped in
test_conformance_processes.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from ring.core.errors import DeadlineExceeded, LocalProtocolError, PeerLost, TransportClosed
from ring.core.messages import FillId
from tests.transport.peers import (
    HANG_GUARD_S,
    Peer,
    digest,
    header_of,
    is_poisoned,
    payload,
    receive,
    sent,
    wait_readable,
)
from transport import registry
from transport.contract import MAX_HEADER_BYTES, Endpoint, Fence, Receiver, Ticket
from transport.memory import SlotArena

MakePeer = Callable[[], Peer]
MakeReceiver = Callable[..., tuple[SlotArena, Receiver]]
MIB = 1 << 20
#: Not a whole number of chunks, so that the last one is short.
SLOT_BYTES = 2 * MIB + 4096


# ---- T1 payload intact ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, MIB, MIB + 1, SLOT_BYTES])
def test_t1_payload_and_header_arrive_intact_and_touch_nothing_else(
    peer: Peer, make_receiver: MakeReceiver, backend: str, num_bytes: int
) -> None:
    arena, receiver = make_receiver(num_slots=3, slot_bytes=SLOT_BYTES)
    peer.connect_to(receiver, arena, backend)
    for slot in range(3):
        arena.poison(slot)
    fill = FillId(seq=2**40 + 7, attempt=3, slot=1)
    receiver.arm(fill, num_bytes=num_bytes)
    peer.start("put", fill, num_bytes)
    assert receive(receiver, arena) == [sent(fill, num_bytes)]
    assert is_poisoned(arena, 1, after_bytes=num_bytes)
    assert is_poisoned(arena, 0)
    assert is_poisoned(arena, 2)


def test_t1_parts_of_any_shape_and_dtype_follow_each_other_bit_for_bit(peer: Peer, backend: str) -> None:
    sender = peer.accept(backend, num_slots=1, slot_bytes=SLOT_BYTES)
    parts = [
        torch.tensor(1.5, dtype=torch.float64),
        torch.full((3, 5), 70144.0, dtype=torch.bfloat16),  # infinite in float16
        torch.empty((0, 7), dtype=torch.float32),
        torch.tensor([float("nan"), -0.0, 6e-8], dtype=torch.float16),
        torch.arange(300_000, dtype=torch.float32).view(3, 1000, 100),
        torch.tensor([True, False]),
    ]
    whole = b"".join(part.reshape(-1).view(torch.uint8).numpy().tobytes() for part in parts)
    fill, header = FillId(-5, 1, 0), bytes(range(256)) * (MAX_HEADER_BYTES // 256)  # head pieces have negative seqs
    peer.call("arm", [fill], len(whole))
    sender.put(fill, header=header, parts=parts)
    peer.start("receive", 1)
    assert peer.result_while_polling(sender)[0] == [(fill, header, digest(memoryview(whole)))]
    sender.close()


def test_t1_puts_of_very_many_parts_at_a_time_arrive_whole(peer: Peer, backend: str) -> None:
    """A part for each row range of each document: packed microbatches of short documents have hundreds."""
    sender = peer.accept(backend, num_slots=4, slot_bytes=SLOT_BYTES)
    fills = [FillId(seq, 1, seq) for seq in range(4)]
    wholes = [payload(fill.seq, 250 * 300) for fill in fills]
    peer.call("arm", fills, 250 * 300)
    for fill, whole in zip(fills, wholes, strict=True):
        sender.put(fill, header=b"h", parts=list(whole.split(300)))
    peer.start("receive", len(fills))
    received = [(fill, b"h", digest(whole)) for fill, whole in zip(fills, wholes, strict=True)]
    assert peer.result_while_polling(sender)[0] == received
    sender.close()


def test_t1_what_can_not_be_sent_is_refused_and_nothing_is_written(peer: Peer, backend: str) -> None:
    sender = peer.accept(backend, num_slots=1, slot_bytes=4096)
    fill = FillId(1, 1, 0)
    peer.call("arm", [fill], 4096)
    with pytest.raises(LocalProtocolError, match="4097"):
        sender.put(fill, header=b"", parts=[payload(1, 4096), payload(2, 1)])
    for bad in (
        {"fill": FillId(1, 1, 1), "header": b"", "parts": []},
        {"fill": FillId(1, -1, 0), "header": b"", "parts": []},
        {"fill": fill, "header": bytes(MAX_HEADER_BYTES + 1), "parts": []},
        {"fill": fill, "header": b"", "parts": [torch.zeros(8, 8).t()]},
    ):
        with pytest.raises(LocalProtocolError):
            sender.put(bad["fill"], header=bad["header"], parts=bad["parts"])
    assert sender.unfinished == 0
    sender.put(fill, header=header_of(fill), parts=[payload(1, 4096)])
    assert peer.call("receive", 1) == [sent(fill, 4096)]
    sender.close()


def test_t1_a_refused_arm_changes_nothing(peer: Peer, make_receiver: MakeReceiver, backend: str) -> None:
    arena, receiver = make_receiver(num_slots=2, slot_bytes=4096)
    peer.connect_to(receiver, arena, backend)
    receiver.arm(FillId(1, 1, 0), num_bytes=100)
    for fill, num_bytes in ((FillId(2, 1, 0), 100), (FillId(1, 1, 2), 100), (FillId(1, 1, 1), 4097)):
        with pytest.raises(LocalProtocolError):
            receiver.arm(fill, num_bytes=num_bytes)
    peer.start("put", FillId(1, 1, 0), 100)
    assert receive(receiver, arena) == [sent(FillId(1, 1, 0), 100)]


# ---- T2 deadlines --------------------------------------------------------------------------------------------------


def test_t2_a_fill_that_does_not_come_raises_deadline_exceeded_and_may_still_come(
    peer: Peer, make_receiver: MakeReceiver, backend: str
) -> None:
    arena, receiver = make_receiver(num_slots=1, slot_bytes=4096)
    peer.connect_to(receiver, arena, backend)
    receiver.arm(FillId(1, 1, 0), num_bytes=4096)
    with pytest.raises(DeadlineExceeded):
        receiver.wait(timeout_s=0.01)
    peer.start("put", FillId(1, 1, 0), 4096)
    assert receive(receiver, arena) == [sent(FillId(1, 1, 0), 4096)]


def test_t2_a_ticket_that_does_not_come_raises_deadline_exceeded(peer: Peer, backend: str) -> None:
    sender = peer.accept(backend, num_slots=1, slot_bytes=4096)
    with pytest.raises(DeadlineExceeded):
        sender.wait(Ticket(1), timeout_s=0.01)
    sender.close()


def test_t2_opening_a_sender_whose_student_does_not_answer_raises_deadline_exceeded(
    make_receiver: MakeReceiver, backend: str
) -> None:
    _, receiver = make_receiver(num_slots=1, slot_bytes=4096)
    with pytest.raises(DeadlineExceeded):
        registry.load(backend).open_sender(receiver.describe(), num_slots=1, slot_bytes=4096, timeout_s=0.05)


# ---- T3 ends -------------------------------------------------------------------------------------------------------


def in_thread(wait: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    """Call it elsewhere; what it raised is in the list when the thread has ended."""
    raised: list[BaseException] = []

    def call() -> None:
        try:
            wait()
        except (TransportClosed, PeerLost, DeadlineExceeded) as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    return thread, raised


def assert_woken(thread: threading.Thread, raised: list[BaseException], kind: type[BaseException]) -> None:
    thread.join(HANG_GUARD_S)
    assert not thread.is_alive()
    assert [type(error) for error in raised] == [kind]


def assert_closed(endpoint: Endpoint) -> None:
    endpoint.close()
    endpoint.close()
    assert endpoint.wait_fds() == ()
    with pytest.raises(TransportClosed):
        endpoint.poll()


def test_t3_closing_a_receiver_wakes_its_waiter_and_the_teacher(
    peer: Peer, make_receiver: MakeReceiver, backend: str
) -> None:
    arena, receiver = make_receiver(num_slots=1, slot_bytes=4096)
    peer.connect_to(receiver, arena, backend)
    peer.start("put_until_lost", [], 0)
    waiter = in_thread(lambda: receiver.wait(timeout_s=10 * HANG_GUARD_S))
    receiver.close()
    assert_woken(*waiter, TransportClosed)
    peer.result()
    assert_closed(receiver)
    with pytest.raises(TransportClosed):
        receiver.arm(FillId(1, 1, 0), num_bytes=1)
    assert receiver.disarm(FillId(1, 1, 0)) is Fence.FENCED


def test_t3_closing_a_sender_wakes_its_waiter_and_the_student(peer: Peer, backend: str) -> None:
    sender = peer.accept(backend, num_slots=1, slot_bytes=4096)
    peer.start("receive_until_lost")
    waiter = in_thread(lambda: sender.wait(Ticket(1), timeout_s=10 * HANG_GUARD_S))
    sender.close()
    assert_woken(*waiter, TransportClosed)
    assert peer.result() == []
    assert_closed(sender)
    with pytest.raises(TransportClosed):
        sender.put(FillId(1, 1, 0), header=b"", parts=[])


def test_t3_a_lost_peer_is_reported_to_every_call_until_close(
    peer: Peer, make_receiver: MakeReceiver, backend: str
) -> None:
    arena, receiver = make_receiver(num_slots=1, slot_bytes=4096)
    peer.connect_to(receiver, arena, backend)
    receiver.arm(FillId(1, 1, 0), num_bytes=10)
    peer.start("close")
    for _ in range(2):
        with pytest.raises(PeerLost):
            receiver.wait(timeout_s=HANG_GUARD_S)
    assert receiver.disarm(FillId(1, 1, 0)) is Fence.FENCED
    assert_closed(receiver)


def test_t3_fills_that_were_whole_before_the_teacher_closed_are_reported(
    peer: Peer, make_receiver: MakeReceiver, backend: str
) -> None:
    """A ticket says that closing can't lose the fill, so a teacher that drains waits for its tickets and goes."""
    arena, receiver = make_receiver(num_slots=4, slot_bytes=SLOT_BYTES)
    peer.connect_to(receiver, arena, backend)
    fills = [FillId(seq, 1, seq) for seq in range(4)]
    arrived = []
    for fill in fills:
        receiver.arm(fill, num_bytes=SLOT_BYTES)
        peer.start("put", fill, SLOT_BYTES)
        peer.start("finish", fill.seq)
    peer.start("close")
    while len(arrived) < len(fills):
        arrived += receive(receiver, arena)
    with pytest.raises(PeerLost):
        receiver.wait(timeout_s=HANG_GUARD_S)
    assert arrived == [sent(fill, SLOT_BYTES) for fill in fills]


# ---- T5 completions ------------------------------------------------------------------------------------------------


@pytest.mark.case(52)
def test_t5_the_source_may_be_reused_once_its_ticket_came_exactly_once(peer: Peer, backend: str) -> None:
    num_slots = 6
    sender = peer.accept(backend, num_slots=num_slots, slot_bytes=SLOT_BYTES)
    fills = [FillId(seq, 1, seq) for seq in range(num_slots)]
    peer.call("arm", fills, SLOT_BYTES)
    peer.start("receive", num_slots)
    sources = {}
    returned = []
    for fill in fills:
        source = payload(fill.seq, SLOT_BYTES)
        sources[sender.put(fill, header=header_of(fill), parts=[source])] = source
    assert sender.unfinished == num_slots
    while sender.unfinished:
        for ticket in sender.poll():
            sources[ticket].fill_(0xEE)
            returned.append(ticket)
        wait_readable(sender)
    assert sorted(returned, key=lambda ticket: ticket.number) == list(sources)
    assert sorted(peer.result()) == [sent(fill, SLOT_BYTES) for fill in fills]
    assert sender.poll() == []
    sender.close()


def test_t5_a_ready_ticket_makes_the_sender_readable(peer: Peer, backend: str) -> None:
    """Also one that is ready as soon as put returns: whoever waits before polling must not sleep."""
    sender = peer.accept(backend, num_slots=1, slot_bytes=4096)
    peer.call("arm", [FillId(1, 1, 0)], 10)
    assert sender.poll() == []
    sender.put(FillId(1, 1, 0), header=b"", parts=[payload(1, 10)])
    peer.call("receive", 1)
    tickets: list[Ticket] = []
    while not tickets:
        assert wait_readable(sender, timeout_s=HANG_GUARD_S)
        tickets = sender.poll()
    assert tickets == [Ticket(1)]
    sender.close()


@pytest.mark.case(52)
def test_t5_after_close_the_source_is_read_no_more(peer: Peer, backend: str) -> None:
    """A student that gets anything of a put whose sender was closed gets the bytes that were put."""
    num_slots = 8
    sender = peer.accept(backend, num_slots=num_slots, slot_bytes=SLOT_BYTES)
    fills = [FillId(seq, 1, seq) for seq in range(num_slots)]
    peer.call("arm", fills, SLOT_BYTES)
    sources = [payload(fill.seq, SLOT_BYTES) for fill in fills]
    for fill, source in zip(fills, sources, strict=True):
        sender.put(fill, header=header_of(fill), parts=[source])
    sender.close()
    for source in sources:
        source.fill_(0xEE)
    arrived = peer.call("receive_until_lost")
    assert arrived == [sent(fill, SLOT_BYTES) for fill in fills[: len(arrived)]]


# ---- T6 back-pressure ----------------------------------------------------------------------------------------------


def test_t6_a_student_that_does_not_read_holds_the_teacher_up_and_loses_nothing(
    peer: Peer, make_receiver: MakeReceiver, backend: str
) -> None:
    num_slots, slot_bytes = 16, 4 * MIB
    arena, receiver = make_receiver(num_slots=num_slots, slot_bytes=slot_bytes)
    peer.connect_to(receiver, arena, backend)
    fills = [FillId(seq, 1, seq) for seq in range(num_slots)]
    for fill in fills:
        receiver.arm(fill, num_bytes=slot_bytes)
        peer.call("put", fill, slot_bytes)  # returns although nobody reads
    peer.start("finish", fills[-1].seq)
    arrived = []
    while len(arrived) < num_slots:
        arrived += receive(receiver, arena)
    assert arrived == [sent(fill, slot_bytes) for fill in fills]
    assert receiver.dropped == 0
