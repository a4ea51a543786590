"""The transport contract where a process is killed or stopped: peer death (T4), leaks (T7), late writes (T9)."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest
import torch

from ring.core.errors import LocalProtocolError, PeerLost
from ring.core.messages import FillId
from tests.leaks import expect_no_more
from tests.transport.peers import (
    HANG_GUARD_S,
    Peer,
    digest,
    header_of,
    is_poisoned,
    payload,
    payload_digest,
    resources,
    wait_readable,
)
from transport import registry
from transport.contract import Arrival, Fence, Receiver, Sender
from transport.memory import POISON_BYTE, SlotArena

MakePeer = Callable[[], Peer]
MakeReceiver = Callable[..., tuple[SlotArena, Receiver]]
MIB = 1 << 20
SLOT_BYTES = 2 * MIB


def fills_of(num_fills: int) -> list[FillId]:
    return [FillId(seq, 1, seq) for seq in range(num_fills)]


def receive_until_lost(receiver: Receiver, arena: SlotArena) -> list[tuple[FillId, str]]:
    received = []
    try:
        while True:
            for arrival in receiver.wait(timeout_s=HANG_GUARD_S):
                received.append((arrival.fill, digest(arena.buffer(arrival.fill.slot)[: arrival.num_bytes])))
    except PeerLost:
        return received


# ---- T4 peer death -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_before", [0, 1, 5])
def test_t4_killing_the_teacher_wakes_the_student_with_peer_lost(
    peer: Peer, make_receiver: MakeReceiver, backend: str, num_before: int
) -> None:
    """num_before: fills received when it is killed in the middle of the others; 0: it is idle."""
    arena, receiver = make_receiver(num_slots=12, slot_bytes=SLOT_BYTES)
    peer.connect_to(receiver, arena, backend)
    fills = fills_of(12)
    for fill in fills:
        receiver.arm(fill, num_bytes=SLOT_BYTES)
    peer.start("put_until_lost", fills if num_before else [], SLOT_BYTES)
    received: list[tuple[FillId, str]] = []
    while len(received) < num_before:
        for arrival in receiver.wait(timeout_s=HANG_GUARD_S):
            received.append((arrival.fill, digest(arena.buffer(arrival.fill.slot)[: arrival.num_bytes])))
    peer.kill()
    received += receive_until_lost(receiver, arena)
    # In order, none twice, and every one that is reported is whole.
    assert received == [(fill, payload_digest(fill.seq, SLOT_BYTES)) for fill in fills[: len(received)]]
    assert all(receiver.disarm(fill) is Fence.FENCED for fill in fills)


@pytest.mark.parametrize("num_puts", [0, 12])
def test_t4_killing_the_student_wakes_the_teacher_with_peer_lost(peer: Peer, backend: str, num_puts: int) -> None:
    sender = peer.accept(backend, num_slots=12, slot_bytes=SLOT_BYTES)
    fills = fills_of(num_puts)
    peer.call("arm", fills, SLOT_BYTES)
    source = payload(1, SLOT_BYTES)
    for fill in fills:
        sender.put(fill, header=b"", parts=[source])
    peer.kill()
    expect_lost(sender)
    with pytest.raises(PeerLost):
        sender.put(FillId(1, 1, 0), header=b"", parts=[source])
    sender.close()


@pytest.mark.parametrize("num_puts", [1, 3])
def test_t4_a_student_that_dies_unnoticed_costs_the_next_put_a_lost_peer_and_nothing_else(
    peer: Peer, backend: str, num_puts: int
) -> None:
    """Nothing looked at the channel between the death and the put, as when it comes while bytes are copied."""
    sender = peer.accept(backend, num_slots=12, slot_bytes=SLOT_BYTES)
    fills = fills_of(num_puts)
    peer.call("arm", fills, SLOT_BYTES)
    peer.kill()
    with suppress(PeerLost):  # it may know already
        for fill in fills:
            sender.put(fill, header=b"", parts=[payload(1, SLOT_BYTES)])
    expect_lost(sender)
    sender.close()


def expect_lost(sender: Sender) -> None:
    """Wait until the sender says so, after the tickets that were complete before."""
    try:
        while sender.poll() or wait_readable(sender, timeout_s=HANG_GUARD_S):
            pass
    except PeerLost:
        return
    pytest.fail("the sender did not notice")


# ---- T6 the dead student -------------------------------------------------------------------------------------------


@pytest.mark.case(49)
def test_t6_what_a_dead_student_did_not_take_goes_to_the_next(make_peer: MakePeer, backend: str) -> None:
    """110 fills asked for four at a time: the first student takes 5 and dies; the next gets all the others."""
    num_slots, num_bytes = 4, 4096

    def serve(student: Peer, sender: Sender, seqs: Sequence[int]) -> list[int]:
        fills = [FillId(seq, 1, slot) for slot, seq in enumerate(seqs)]
        student.call("arm", fills, num_bytes)
        for fill in fills:
            sender.put(fill, header=header_of(fill), parts=[payload(fill.seq, num_bytes)])
        student.start("receive", len(fills))
        received, _ = student.result_while_polling(sender)
        assert received == [(fill, header_of(fill), payload_digest(fill.seq, num_bytes)) for fill in fills]
        return [fill.seq for fill, _, _ in received]

    first = make_peer()
    sender = first.accept(backend, num_slots=num_slots, slot_bytes=num_bytes)
    taken = serve(first, sender, [0, 1, 2, 3]) + serve(first, sender, [4])
    first.call("arm", [FillId(seq, 1, slot) for slot, seq in enumerate((5, 6, 7, 8))], num_bytes)
    for slot, seq in enumerate((5, 6, 7, 8)):
        sender.put(FillId(seq, 1, slot), header=b"", parts=[payload(seq, num_bytes)])
    first.kill()
    expect_lost(sender)
    sender.close()

    second = make_peer()
    sender = second.accept(backend, num_slots=num_slots, slot_bytes=num_bytes)
    left = [seq for seq in range(110) if seq not in taken]
    retaken = []
    for begin in range(0, len(left), num_slots):
        retaken += serve(second, sender, left[begin : begin + num_slots])
    sender.close()
    assert (len(taken), len(retaken)) == (5, 105)
    assert sorted(taken + retaken) == list(range(110))


# ---- T7 leaks ------------------------------------------------------------------------------------------------------


def as_student(peer: Peer, backend: str, *, kill: bool) -> None:
    """One whole life of a channel on which a teacher puts, and then closes or is killed in the middle."""
    arena = SlotArena(4, SLOT_BYTES)
    receiver = registry.load(backend).open_receiver(arena, bind_host="127.0.0.1")
    peer.connect_to(receiver, arena, backend)
    for fill in fills_of(4):
        receiver.arm(fill, num_bytes=SLOT_BYTES)
    peer.start("put_until_lost", fills_of(4), SLOT_BYTES)
    receiver.wait(timeout_s=HANG_GUARD_S)
    if kill:
        peer.kill()
        receive_until_lost(receiver, arena)
    receiver.close()
    while receiver.wait_fds():
        receiver.poll_fenced()
        if receiver.wait_fds():
            wait_readable(receiver)
    if not kill:
        peer.result()
        peer.call("close")
    arena.close()


def as_teacher(peer: Peer, backend: str, *, kill: bool) -> None:
    """The same from the other side."""
    sender = peer.accept(backend, num_slots=4, slot_bytes=SLOT_BYTES)
    peer.call("arm", fills_of(4), SLOT_BYTES)
    source = payload(1, SLOT_BYTES)
    for fill in fills_of(4):
        sender.put(fill, header=b"", parts=[source])
    if kill:
        peer.kill()
        expect_lost(sender)
    else:
        peer.start("receive", 1)
        peer.result_while_polling(sender)
    sender.close()
    if not kill:
        peer.call("close")


@pytest.mark.parametrize("life", [as_student, as_teacher])
def test_t7_closing_leaks_nothing_on_either_side(peer: Peer, backend: str, life: Callable[..., None]) -> None:
    life(peer, backend, kill=False)  # what is made once for the process, is made now
    before = resources(), peer.call("resources")
    for _ in range(3):
        life(peer, backend, kill=False)
    expect_no_more(resources, before[0])
    expect_no_more(lambda: peer.call("resources"), before[1])


def test_t7_killing_the_teacher_leaks_nothing_in_the_student(make_peer: MakePeer, backend: str) -> None:
    check_killing_leaks_nothing(make_peer, backend, as_student)


def test_t7_killing_the_student_leaks_nothing_in_the_teacher(make_peer: MakePeer, backend: str) -> None:
    check_killing_leaks_nothing(make_peer, backend, as_teacher)


def check_killing_leaks_nothing(make_peer: MakePeer, backend: str, life: Callable[..., None]) -> None:
    peers = [make_peer() for _ in range(4)]
    life(peers[0], backend, kill=True)
    before = resources()
    for peer in peers[1:]:
        life(peer, backend, kill=True)
    expect_no_more(resources, before)


# ---- T9 late writes ------------------------------------------------------------------------------------------------

#: A copy or transfer of this takes tens of milliseconds: the teacher can be stopped in its middle.
BIG_BYTES = 96 * MIB


def stop_in_the_middle(teacher: Peer, receiver: Receiver, arena: SlotArena) -> FillId:
    """Have the teacher fill slot 0, and stop its process when the slot holds the beginning but not the end."""
    slot = arena.view(0, torch.uint8, (BIG_BYTES,))
    for attempt in range(1, 100):
        fill = FillId(1, attempt, 0)
        arena.poison(0)
        receiver.arm(fill, num_bytes=BIG_BYTES)
        teacher.start("put_and_finish", fill, BIG_BYTES)
        arrivals: list[Arrival] = []
        while not arrivals and bool((slot[:4096] == POISON_BYTE).all()):
            arrivals += receiver.poll()
        teacher.stop()
        if not arrivals and bool((slot[-4096:] == POISON_BYTE).all()):
            return fill
        teacher.signal(signal.SIGCONT)  # too late: this process had no CPU in between
        arrivals += teacher.result_while_polling(receiver)[1]
        assert [arrival.fill for arrival in arrivals or receiver.wait(timeout_s=HANG_GUARD_S)] == [fill]
    raise AssertionError("the teacher was never stopped in time")


def test_t9_a_write_that_wakes_up_after_its_fence_reaches_no_live_slot(
    make_peer: MakePeer, make_receiver: MakeReceiver, backend: str
) -> None:
    arena, receiver = make_receiver(num_slots=2, slot_bytes=BIG_BYTES)
    _, other_receiver = make_receiver(num_slots=2, slot_bytes=BIG_BYTES, arena=arena)
    stopped, other = make_peer(), make_peer()
    stopped.connect_to(receiver, arena, backend)
    other.connect_to(other_receiver, arena, backend)
    late = stop_in_the_middle(stopped, receiver, arena)

    fence = receiver.disarm(late)
    assert receiver.poll_fenced() == []
    if fence is Fence.PENDING:
        with pytest.raises(LocalProtocolError):
            receiver.arm(FillId(2, 1, late.slot), num_bytes=BIG_BYTES)
    # The fill is asked again of another teacher; only a fenced slot may carry the answer.
    again = FillId(1, late.attempt + 1, late.slot if fence is Fence.FENCED else 1)
    other_receiver.arm(again, num_bytes=BIG_BYTES)
    other.start("put_and_finish", again, BIG_BYTES)
    _, arrivals = other.result_while_polling(other_receiver)
    assert [arrival.fill for arrival in arrivals] == [again]

    stopped.signal(signal.SIGCONT)
    assert stopped.result_while_polling(receiver) == (None, [])
    assert receiver.poll() == []
    assert receiver.poll_fenced() == ([late] if fence is Fence.PENDING else [])
    assert digest(arena.buffer(again.slot)) == payload_digest(1, BIG_BYTES)
    receiver.arm(FillId(3, 1, late.slot), num_bytes=10)  # out of quarantine


def test_t9_a_stopped_teacher_is_fenced_by_its_death_even_after_close(
    peer: Peer, make_receiver: MakeReceiver, backend: str
) -> None:
    """Or by the close itself: then what wakes up writes nothing any more."""
    arena, receiver = make_receiver(num_slots=1, slot_bytes=BIG_BYTES)
    peer.connect_to(receiver, arena, backend)
    late = stop_in_the_middle(peer, receiver, arena)
    receiver.close()
    fenced = receiver.poll_fenced()
    if fenced:
        arena.poison(late.slot)
        peer.signal(signal.SIGCONT)
        with pytest.raises(PeerLost):
            peer.result()
        assert is_poisoned(arena, late.slot)
    peer.kill()
    while receiver.wait_fds():
        assert wait_readable(receiver, timeout_s=HANG_GUARD_S)
        fenced += receiver.poll_fenced()
    assert fenced == [late]
