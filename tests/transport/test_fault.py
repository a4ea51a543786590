"""The fault decorator: each fault is what it says, and a seed decides all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from ring.core.errors import LocalProtocolError, PeerLost, TransportClosed
from ring.core.messages import FillId
from tests.transport.peers import HANG_GUARD_S, payload, wait_readable, while_serving
from transport import local, registry
from transport.contract import Arrival, Fence, Receiver, Sender, Ticket
from transport.fault import FaultPlan, FaultyBackend, fault
from transport.memory import POISON_BYTE, SlotArena

NUM_BYTES = 1000
NUM_SLOTS = 4


@contextmanager
def channel(backend: FaultyBackend) -> Iterator[tuple[SlotArena, Receiver, Sender]]:
    """Both sides, in this thread."""
    arena = SlotArena(NUM_SLOTS, NUM_BYTES)
    receiver = backend.open_receiver(arena, bind_host="127.0.0.1")
    sender = while_serving(
        receiver,
        lambda: backend.open_sender(
            receiver.describe(), num_slots=NUM_SLOTS, slot_bytes=arena.slot_bytes, timeout_s=HANG_GUARD_S
        ),
    )
    try:
        yield arena, receiver, sender
    finally:
        sender.close()
        receiver.close()
        receiver.forget()
        arena.close()


def faulty_local(seed: int = 1, **shares: float) -> FaultyBackend:
    return fault(local, seed=seed, plan=FaultPlan(**shares))


def put(receiver: Receiver, sender: Sender, seq: int) -> tuple[FillId, Ticket]:
    fill = FillId(seq, 1, seq % NUM_SLOTS)
    receiver.arm(fill, num_bytes=NUM_BYTES)
    return fill, sender.put(fill, header=b"header", parts=[payload(seq, NUM_BYTES)])


def settle(receiver: Receiver, sender: Sender) -> tuple[list[Arrival], list[Ticket], int]:
    """Poll both until neither has news: (arrivals, tickets, polls of both)."""
    arrivals: list[Arrival] = []
    tickets: list[Ticket] = []
    num_polls = 0
    while wait_readable(receiver, sender, timeout_s=0):
        tickets += sender.poll()
        arrivals += receiver.poll()
        num_polls += 1
    return arrivals, tickets, num_polls


def test_without_faults_it_is_the_inner_backend() -> None:
    with channel(faulty_local()) as (arena, receiver, sender):
        fill, ticket = put(receiver, sender, 1)
        arrivals, tickets, _ = settle(receiver, sender)
        assert [arrival.fill for arrival in arrivals] == [fill]
        assert tickets == [ticket]
        assert torch.equal(arena.view(1, torch.uint8, (NUM_BYTES,)), payload(1, NUM_BYTES))
        with pytest.raises(LocalProtocolError):
            sender.put(FillId(1, 1, NUM_SLOTS), header=b"", parts=[])


def test_a_dropped_put_completes_and_never_arrives() -> None:
    backend = faulty_local(drop_frac=1.0)
    with channel(backend) as (arena, receiver, sender):
        arena.poison(1)
        _, ticket = put(receiver, sender, 1)
        assert sender.unfinished == 1
        assert settle(receiver, sender)[:2] == ([], [ticket])
        assert sender.unfinished == 0
        assert arena.view(1, torch.uint8, (NUM_BYTES,)).eq(POISON_BYTE).all()
    assert backend.injected == {"drop": 1}


def test_a_delayed_put_arrives_within_its_polls_and_keeps_the_sender_awake() -> None:
    backend = fault(local, seed=3, plan=FaultPlan(delay_frac=1.0, max_delay_polls=7))
    polls = []
    with channel(backend) as (_, receiver, sender):
        for seq in range(20):
            fill, ticket = put(receiver, sender, seq)
            assert receiver.poll() == []
            arrivals, tickets, num_polls = settle(receiver, sender)
            assert [arrival.fill for arrival in arrivals] == [fill]
            assert tickets == [ticket]
            polls.append(num_polls)
    assert max(polls) <= 7 + 1
    assert len(set(polls)) > 1


@pytest.mark.parametrize("num_bytes", [NUM_BYTES, 0])
def test_a_corrupted_put_differs_in_one_bit(num_bytes: int) -> None:
    with channel(faulty_local(corrupt_frac=1.0)) as (arena, receiver, sender):
        source = payload(1, num_bytes)
        receiver.arm(FillId(1, 1, 0), num_bytes=num_bytes)
        sender.put(FillId(1, 1, 0), header=b"header", parts=[source])
        (arrival,), _, _ = settle(receiver, sender)
        wrong = torch.cat(
            [arena.view(0, torch.uint8, (num_bytes,)), torch.tensor(list(arrival.header), dtype=torch.uint8)]
        )
        right = torch.cat([source, torch.tensor(list(b"header"), dtype=torch.uint8)])
        different = wrong ^ right
        assert different.count_nonzero() == 1
        assert different.sum() == 1
        assert torch.equal(source, payload(1, num_bytes))  # the teacher's own buffer is untouched


def test_a_cut_ends_both_sides_and_reports_no_fill() -> None:
    with channel(faulty_local(cut_frac=1.0)) as (_, receiver, sender):
        receiver.arm(FillId(1, 1, 0), num_bytes=NUM_BYTES)
        with pytest.raises(PeerLost):
            sender.put(FillId(1, 1, 0), header=b"", parts=[payload(1, NUM_BYTES)])
        with pytest.raises(PeerLost):
            receiver.wait(timeout_s=HANG_GUARD_S)
        assert wait_readable(sender, timeout_s=0)
        with pytest.raises(PeerLost):
            sender.poll()
        assert receiver.disarm(FillId(1, 1, 0)) is Fence.FENCED
        sender.close()
        with pytest.raises(TransportClosed):
            sender.poll()


@pytest.mark.parametrize(("kind", "num_reports"), [("lose", 0), ("repeat", 2), ("postpone", 1)])
def test_a_receiver_breaks_its_word_as_planned(kind: str, num_reports: int) -> None:
    backend = faulty_local(**{f"{kind}_frac": 1.0})
    with channel(backend) as (_, receiver, sender):
        fill, _ = put(receiver, sender, 1)
        arrivals, _, _ = settle(receiver, sender)
        assert [arrival.fill for arrival in arrivals] == [fill] * num_reports
    assert backend.injected == {kind: 1}


@pytest.mark.parametrize("kind", ["repeat", "postpone"])
def test_a_postponed_arrival_is_not_reported_after_disarm(kind: str) -> None:
    with channel(faulty_local(**{f"{kind}_frac": 1.0})) as (_, receiver, sender):
        fill, _ = put(receiver, sender, 1)
        first = receiver.poll()
        assert len(first) == (1 if kind == "repeat" else 0)
        assert receiver.disarm(fill) is Fence.FENCED
        assert settle(receiver, sender)[0] == []


@pytest.mark.parametrize("name", registry.names(same_process=True))
def test_every_put_is_arrived_lost_or_dropped_over_any_backend(name: str) -> None:
    plan = FaultPlan(drop_frac=0.2, delay_frac=0.2, corrupt_frac=0.1, repeat_frac=0.2, postpone_frac=0.2, lose_frac=0.1)
    backend = fault(registry.load(name), seed=11, plan=plan)
    arrived: list[FillId] = []
    with channel(backend) as (_, receiver, sender):
        for first in range(0, 100, NUM_SLOTS):
            fills = [put(receiver, sender, first + slot)[0] for slot in range(NUM_SLOTS)]
            while sender.unfinished:
                sender.poll()
                arrived += [arrival.fill for arrival in receiver.poll()]
                wait_readable(receiver, sender, timeout_s=0.001)
            # zmq's ticket says that the student has consumed it; the others' completions may still be on their way.
            arrived += [arrival.fill for arrival in settle(receiver, sender)[0]]
            for fill in fills:
                assert receiver.disarm(fill, refused=True) is Fence.FENCED
    missing = 100 - len(set(arrived))
    assert missing == backend.injected["drop"] + backend.injected["lose"]
    assert len(arrived) - len(set(arrived)) == backend.injected["repeat"]
    assert all(backend.injected[kind] for kind in ("drop", "delay", "corrupt", "lose", "repeat", "postpone"))


def history(seed: int) -> tuple[list[tuple[FillId, bytes]], dict[str, int]]:
    """Everything that comes out of a run with all faults but the cut."""
    plan = FaultPlan(drop_frac=0.2, delay_frac=0.2, corrupt_frac=0.2, repeat_frac=0.3, lose_frac=0.2)
    backend = fault(local, seed=seed, plan=plan)
    seen = []
    for _ in range(2):  # each channel has its own faults
        with channel(backend) as (arena, receiver, sender):
            for seq in range(50):
                fill, _ = put(receiver, sender, seq)
                for arrival in settle(receiver, sender)[0]:
                    seen.append((arrival.fill, bytes(arena.buffer(arrival.fill.slot)[:NUM_BYTES])))
                receiver.disarm(fill)
    return seen, dict(backend.injected)


def test_the_same_seed_gives_the_same_faults_and_another_seed_others() -> None:
    assert history(5) == history(5)
    assert history(5) != history(6)


def test_capabilities_ask_for_a_crc_where_bytes_are_damaged() -> None:
    assert faulty_local().capabilities().crc_by_default is False
    assert faulty_local(corrupt_frac=0.1).capabilities().crc_by_default is True
    assert faulty_local().unavailable() is None
