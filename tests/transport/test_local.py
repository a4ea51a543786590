"""The local backend: what the conformance suite can't see because both sides share a process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from ring.core.errors import LocalProtocolError, PeerLost, RemoteProtocolError, TransportError
from ring.core.messages import FillId
from tests.transport.peers import HANG_GUARD_S, wait_readable
from transport import local
from transport.contract import Fence, Receiver, Sender
from transport.fills import Part, copy_into
from transport.memory import SlotArena

FILL = FillId(1, 1, 0)
NUM_BYTES = 4096
#: What must not happen during a copy would have happened by then. A slow machine may hide a fault, and fails nothing.
SETTLED_S = 0.2


@pytest.fixture
def arena() -> Iterator[SlotArena]:
    made = SlotArena(2, NUM_BYTES)
    yield made
    made.close()


@pytest.fixture
def receiver(arena: SlotArena) -> Iterator[Receiver]:
    made = local.open_receiver(arena, bind_host="")
    yield made
    made.forget()


def open_sender(receiver: Receiver) -> Sender:
    return local.open_sender(receiver.describe(), num_slots=2, slot_bytes=NUM_BYTES, timeout_s=1)


class HalfWay:
    """Holds a copy in its middle until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        monkeypatch.setattr(local, "copy_into", self._copy)

    def _copy(self, slot: torch.Tensor, sources: Sequence[Part]) -> None:
        (source,) = sources
        half = source.num_bytes // 2
        copy_into(slot, [source._replace(num_bytes=half)])
        self.reached.set()
        assert self.go_on.wait(HANG_GUARD_S)
        copy_into(slot[half:], [source._replace(address=source.address + half, num_bytes=source.num_bytes - half)])


@pytest.fixture
def half_way(monkeypatch: pytest.MonkeyPatch) -> Iterator[HalfWay]:
    made = HalfWay(monkeypatch)
    yield made
    made.go_on.set()


def putting(sender: Sender) -> threading.Thread:
    source = torch.ones(NUM_BYTES, dtype=torch.uint8)
    thread = threading.Thread(target=lambda: sender.put(FILL, header=b"", parts=[source]))
    thread.start()
    return thread


@pytest.mark.parametrize("give_up", [lambda receiver: receiver.disarm(FILL), lambda receiver: receiver.close()])
def test_a_fill_given_up_while_it_is_copied_is_fenced_when_the_copy_ended(
    arena: SlotArena, receiver: Receiver, half_way: HalfWay, give_up: Callable[[Receiver], object]
) -> None:
    sender = open_sender(receiver)
    receiver.arm(FILL, num_bytes=NUM_BYTES)
    thread = putting(sender)
    assert half_way.reached.wait(HANG_GUARD_S)
    give_up(receiver)
    assert receiver.disarm(FILL) is Fence.PENDING
    assert receiver.poll_fenced() == []
    assert receiver.wait_fds() != ()
    half_way.go_on.set()
    assert wait_readable(receiver, timeout_s=HANG_GUARD_S)
    assert receiver.poll_fenced() == [FILL]
    assert receiver.disarm(FILL) is Fence.FENCED
    assert receiver.dropped == 1
    assert arena.view(0, torch.uint8, (NUM_BYTES,)).eq(1).all()
    thread.join(HANG_GUARD_S)
    sender.close()


def test_a_slot_that_is_still_written_can_not_be_armed_again(receiver: Receiver, half_way: HalfWay) -> None:
    sender = open_sender(receiver)
    receiver.arm(FILL, num_bytes=NUM_BYTES)
    thread = putting(sender)
    assert half_way.reached.wait(HANG_GUARD_S)
    receiver.disarm(FILL)
    with pytest.raises(LocalProtocolError, match="given up"):
        receiver.arm(FillId(1, 2, 0), num_bytes=NUM_BYTES)
    half_way.go_on.set()
    thread.join(HANG_GUARD_S)
    receiver.arm(FillId(1, 2, 0), num_bytes=NUM_BYTES)
    sender.close()


def test_closing_the_sender_waits_for_its_copy(receiver: Receiver, half_way: HalfWay) -> None:
    sender = open_sender(receiver)
    receiver.arm(FILL, num_bytes=NUM_BYTES)
    thread = putting(sender)
    assert half_way.reached.wait(HANG_GUARD_S)
    closing = threading.Thread(target=sender.close)
    closing.start()
    # No event says that it waits; one that does not is over, or heard of, long before this.
    closing.join(SETTLED_S)
    assert closing.is_alive()
    assert receiver.poll() == [], "and its end is not told either"
    half_way.go_on.set()
    closing.join(HANG_GUARD_S)
    assert not closing.is_alive()
    thread.join(HANG_GUARD_S)
    assert [arrival.fill for arrival in receiver.poll()] == [FILL]
    with pytest.raises(PeerLost):
        receiver.poll()


def test_both_sides_work_in_one_thread_without_waiting(arena: SlotArena, receiver: Receiver) -> None:
    sender = open_sender(receiver)
    for seq in range(10):
        fill = FillId(seq, 1, seq % 2)
        receiver.arm(fill, num_bytes=8)
        ticket = sender.put(fill, header=b"h", parts=[torch.full((8,), seq, dtype=torch.uint8)])
        assert [(a.fill, a.num_bytes, a.header) for a in receiver.poll()] == [(fill, 8, b"h")]
        assert sender.poll() == [ticket]
        assert arena.view(fill.slot, torch.uint8, (8,)).eq(seq).all()
    sender.close()


def test_only_one_sender_and_only_the_right_one_gets_in(arena: SlotArena, receiver: Receiver) -> None:
    with pytest.raises(RemoteProtocolError, match="token"):
        local.open_sender({}, num_slots=2, slot_bytes=NUM_BYTES, timeout_s=1)
    with pytest.raises(TransportError, match="no such local channel"):
        local.open_sender({"token": "?"}, num_slots=2, slot_bytes=NUM_BYTES, timeout_s=1)
    with pytest.raises(RemoteProtocolError, match="3 slots"):
        local.open_sender(receiver.describe(), num_slots=3, slot_bytes=NUM_BYTES, timeout_s=1)
    sender = open_sender(receiver)
    with pytest.raises(TransportError, match="has a sender"):
        open_sender(receiver)
    sender.close()


def test_a_receiver_that_is_gone_is_found_no_more(arena: SlotArena) -> None:
    receiver = local.open_receiver(arena, bind_host="")
    description = receiver.describe()
    receiver.close()
    with pytest.raises(TransportError):
        local.open_sender(description, num_slots=2, slot_bytes=NUM_BYTES, timeout_s=1)
