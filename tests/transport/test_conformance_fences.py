"""The transport contract, continued: released slots (T8), fences without killed processes (T9), capabilities (T10)."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from ring.core.errors import ConfigError, LocalProtocolError
from ring.core.messages import FillId
from tests.transport import gaps, test_conformance, test_conformance_processes
from tests.transport.peers import HANG_GUARD_S, Peer, is_poisoned, payload, receive, sent, wait_readable
from transport import registry
from transport.contract import Fence, Receiver
from transport.memory import SlotArena

MakeReceiver = Callable[..., tuple[SlotArena, Receiver]]
MIB = 1 << 20
SLOT_BYTES = 2 * MIB + 4096


# ---- T8 released slots, T9 without processes -----------------------------------------------------------------------


def test_t8_a_poisoned_slot_reads_as_nan_and_takes_the_next_fill(
    peer: Peer, make_receiver: MakeReceiver, backend: str
) -> None:
    arena, receiver = make_receiver(num_slots=1, slot_bytes=4096)
    peer.connect_to(receiver, arena, backend)
    for seq in (1, 2):
        fill = FillId(seq, 1, 0)
        receiver.arm(fill, num_bytes=4096)
        peer.start("put", fill, 4096)
        assert receive(receiver, arena) == [sent(fill, 4096)]
        stale = [
            arena.view(0, dtype, (8, 32)) for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
        ]
        arena.poison(0)
        assert all(view.isnan().all() for view in stale)


@pytest.mark.parametrize("num_bytes", [100, 0])
def test_t9_a_payload_that_was_given_up_is_not_reported(
    peer: Peer, make_receiver: MakeReceiver, backend: str, num_bytes: int
) -> None:
    arena, receiver = make_receiver(num_slots=2, slot_bytes=4096)
    peer.connect_to(receiver, arena, backend)
    given_up, wanted = FillId(1, 1, 0), FillId(2, 1, 1)
    receiver.arm(given_up, num_bytes=num_bytes)
    fence = receiver.disarm(given_up)
    assert receiver.disarm(given_up) is fence  # idempotent
    receiver.arm(wanted, num_bytes=100)
    if fence is Fence.PENDING:
        with pytest.raises(LocalProtocolError, match="given up"):
            receiver.arm(FillId(3, 1, 0), num_bytes=100)
    peer.start("put", given_up, num_bytes)
    peer.start("put", wanted, 100)
    assert receive(receiver, arena) == [sent(wanted, 100)]
    assert receiver.dropped == 1
    assert receiver.poll_fenced() == ([given_up] if fence is Fence.PENDING else [])
    assert receiver.poll_fenced() == []
    receiver.arm(FillId(3, 1, 0), num_bytes=100)
    assert receiver.disarm(FillId(9, 9, 1)) is Fence.FENCED  # never heard of


@pytest.mark.parametrize("refused", [False, True])
def test_t9_a_fill_that_was_given_up_after_it_was_whole_is_not_reported(
    peer: Peer, make_receiver: MakeReceiver, backend: str, refused: bool
) -> None:
    """Whole, but not polled yet: its slot may carry the next fill as soon as the fence says so."""
    arena, receiver = make_receiver(num_slots=2, slot_bytes=4096)
    peer.connect_to(receiver, arena, backend)
    given_up, wanted = FillId(1, 1, 0), FillId(2, 1, 1)
    receiver.arm(given_up, num_bytes=100)
    receiver.arm(wanted, num_bytes=100)
    peer.call("put", given_up, 100)
    wait_until_readable(receiver)
    fence = receiver.disarm(given_up, refused=refused)
    assert fence is Fence.FENCED or not refused
    if fence is Fence.FENCED:  # the next fill of that slot comes where the last one is
        wanted_too = FillId(3, 1, 0)
        receiver.arm(wanted_too, num_bytes=100)
        peer.start("put", wanted_too, 100)
        assert receive(receiver, arena) == [sent(wanted_too, 100)]
    peer.start("put", wanted, 100)
    assert receive(receiver, arena) == [sent(wanted, 100)]
    assert receiver.dropped == 1
    assert receiver.poll_fenced() == ([given_up] if fence is Fence.PENDING else [])


@pytest.mark.parametrize("asked_first", [True, False])
def test_t9_a_fill_that_the_teacher_refused_is_fenced_at_once(
    peer: Peer, make_receiver: MakeReceiver, backend: str, asked_first: bool
) -> None:
    arena, receiver = make_receiver(num_slots=1, slot_bytes=4096)
    peer.connect_to(receiver, arena, backend)
    refused, wanted = FillId(1, 1, 0), FillId(2, 1, 0)
    receiver.arm(refused, num_bytes=100)
    if asked_first:
        receiver.disarm(refused)
    assert receiver.disarm(refused, refused=True) is Fence.FENCED
    assert receiver.disarm(refused) is Fence.FENCED
    receiver.arm(wanted, num_bytes=100)
    peer.start("put", wanted, 100)
    assert receive(receiver, arena) == [sent(wanted, 100)]
    assert receiver.poll_fenced() == []


@pytest.mark.parametrize("put_bytes", [99, 101, 0])
def test_t9_a_payload_of_another_size_than_armed_is_not_reported(
    peer: Peer, make_receiver: MakeReceiver, backend: str, put_bytes: int
) -> None:
    arena, receiver = make_receiver(num_slots=1, slot_bytes=4096)
    peer.connect_to(receiver, arena, backend)
    receiver.arm(FillId(1, 1, 0), num_bytes=100)
    peer.start("put", FillId(1, 1, 0), put_bytes)
    peer.start("put", FillId(1, 2, 0), 100)  # another attempt
    peer.start("put", FillId(1, 1, 0), 100)
    assert receive(receiver, arena) == [sent(FillId(1, 1, 0), 100)]
    assert receiver.dropped == 2


def test_t9_what_was_armed_at_close_is_fenced_once_the_teacher_let_go(
    peer: Peer, make_receiver: MakeReceiver, backend: str
) -> None:
    arena, receiver = make_receiver(num_slots=2, slot_bytes=4096)
    peer.connect_to(receiver, arena, backend)
    fills = [FillId(seq, 1, seq) for seq in range(2)]
    for fill in fills:
        receiver.arm(fill, num_bytes=100)
    receiver.close()
    peer.start("put_until_lost", [], 0)
    fenced: list[FillId] = []
    while len(fenced) < 2:
        fenced += receiver.poll_fenced()
        if receiver.wait_fds():
            wait_readable(receiver)
    assert sorted(fenced) == fills
    assert receiver.poll_fenced() == []
    assert receiver.wait_fds() == ()


def wait_until_readable(receiver: Receiver) -> None:
    assert wait_readable(receiver, timeout_s=HANG_GUARD_S)


# ---- T10 capabilities ----------------------------------------------------------------------------------------------


def test_t10_capabilities_agree_with_the_registry_and_the_gaps(backend: str) -> None:
    capabilities = registry.load(backend).capabilities()
    assert capabilities.name == backend
    ways = {"student_backends": (backend,), "teacher_backends": (backend,)}
    if capabilities.same_host_only:
        with pytest.raises(ConfigError, match="same host"):
            registry.choose(backend, **ways, same_host=False)
    else:
        assert registry.choose(backend, **ways, same_host=False)[0] == backend
    death_is_a_gap = any(gap.backend == backend and gap.test.startswith("test_t4") for gap in gaps.GAPS)
    assert capabilities.notices_peer_death is not death_is_a_gap


def test_t10_only_a_one_sided_backend_may_write_what_was_not_armed(
    peer: Peer, make_receiver: MakeReceiver, backend: str
) -> None:
    arena, receiver = make_receiver(num_slots=2, slot_bytes=SLOT_BYTES)
    peer.connect_to(receiver, arena, backend)
    arena.poison(0)
    receiver.arm(FillId(2, 1, 1), num_bytes=1)
    peer.start("put", FillId(1, 1, 0), SLOT_BYTES)
    peer.start("put", FillId(2, 1, 1), 1)
    assert receive(receiver, arena) == [sent(FillId(2, 1, 1), 1)]
    assert receiver.dropped == 1
    assert registry.load(backend).capabilities().one_sided or is_poisoned(arena, 0)


def test_t10_a_student_that_does_not_read_buffers_no_more_than_stated(peer: Peer, backend: str) -> None:
    slot_bytes, num_slots = 16 * MIB, 4
    sender = peer.accept(backend, num_slots=num_slots, slot_bytes=slot_bytes)
    fills = [FillId(seq, 1, seq) for seq in range(num_slots)]
    peer.call("arm", fills, slot_bytes)
    source = payload(1, slot_bytes)
    before_bytes = peer.call("anonymous_bytes")
    for fill in fills:
        sender.put(fill, header=b"", parts=[source])
    capabilities = registry.load(backend).capabilities()
    allowed_bytes = capabilities.bounce_bytes_per_peer + 4 * MIB  # the interpreter's own
    # Until whatever there is to fill is full; the student's own thread is idle all the while.
    grown_bytes, looks_since_growth, deadline_s = 0, 0, time.monotonic() + HANG_GUARD_S
    while looks_since_growth < 25:
        sender.poll()
        time.sleep(0.02)
        found_bytes = peer.call("anonymous_bytes") - before_bytes
        assert found_bytes <= allowed_bytes
        looks_since_growth = 0 if found_bytes > grown_bytes else looks_since_growth + 1
        grown_bytes = max(grown_bytes, found_bytes)
        assert time.monotonic() < deadline_s, f"{grown_bytes} bytes, and it still grows"
    assert capabilities.one_sided or sender.unfinished, "there was more to send than the student may hold"
    sender.close()


# ---- the list of gaps ----------------------------------------------------------------------------------------------


def test_every_gap_names_a_conformance_test_and_a_backend_and_says_why() -> None:
    tests = {*globals(), *vars(test_conformance), *vars(test_conformance_processes)}
    for gap in gaps.GAPS:
        assert gap.test in tests
        assert gap.backend in registry.names(same_process=True)
        assert gap.reason
        assert gap.removed_by


def test_every_clause_has_a_test() -> None:
    tests = {*globals(), *vars(test_conformance), *vars(test_conformance_processes)}
    for clause in range(1, 11):
        assert any(test.startswith(f"test_t{clause}_") for test in tests)
