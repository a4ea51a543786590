"""Slot memory: views without a copy, refusals instead of SIGBUS, poison, and memory that goes when it should."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ring.core.errors import ConfigError, LocalProtocolError
from tests.leaks import expect_no_more, held
from tests.limits import descriptors_below, few_descriptors, files_below
from transport.memory import SlotArena, as_bytes, check_free_memory, free_in_group


@pytest.fixture
def arena() -> Iterator[SlotArena]:
    made = SlotArena(3, 5000)
    yield made
    made.close()


def slot_mappings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:disaggkd" in line]


def is_slot(address: int) -> bool:
    """Whether a slot is mapped there."""
    ranges = (line.split()[0].split("-") for line in slot_mappings())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


def test_slots_are_whole_pages_and_views_are_aligned_and_share_memory(arena: SlotArena) -> None:
    assert arena.slot_bytes == 8192
    assert arena.total_bytes == 3 * 8192
    for slot in range(3):
        view = arena.view(slot, torch.bfloat16, (4, 1024))
        assert view.data_ptr() % 64 == 0
        view.fill_(70144.0)  # infinite in float16
        assert arena.view(slot, torch.bfloat16, (4096,)).eq(70144.0).all()
        assert bytes(arena.buffer(slot)[:2]) == bytes(as_bytes(view)[:2])
        arena.buffer(slot)[0:2] = b"\0\0"
        assert view[0, 0] == 0
    assert arena.view(0, torch.float32, ()).shape == ()
    assert arena.view(0, torch.float64, (0, 7)).shape == (0, 7)


def test_views_outside_of_a_slot_are_refused(arena: SlotArena) -> None:
    with pytest.raises(LocalProtocolError, match="8194"):
        arena.view(0, torch.bfloat16, (4097,))
    for slot in (-1, 3):
        for use in (arena.buffer, arena.fileno, arena.poison, lambda slot: arena.view(slot, torch.uint8, (1,))):
            with pytest.raises(LocalProtocolError, match="allowed: 0 to 2"):
                use(slot)


def test_poison_is_nan_in_every_float_dtype_and_stays_in_its_slot(arena: SlotArena) -> None:
    for slot in range(3):
        arena.view(slot, torch.float32, (2048,)).fill_(1.0)
    arena.poison(1)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert arena.view(1, dtype, (1024,)).isnan().all()
    assert arena.view(0, torch.float32, (2048,)).eq(1.0).all()
    assert arena.view(2, torch.float32, (2048,)).eq(1.0).all()


def test_a_slot_can_not_be_shrunk_under_the_one_who_reads_it(arena: SlotArena) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fileno(0), 0)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fileno(0), 1 << 20)
    assert arena.buffer(0)[8191] == 0


def test_a_forked_child_does_not_inherit_the_slots(arena: SlotArena) -> None:
    child = os.fork()
    if child == 0:
        os._exit(len(slot_mappings()))
    _, status = os.waitpid(child, 0)
    assert len(slot_mappings()) >= 3
    assert os.waitstatus_to_exitcode(status) == 0


def test_close_is_idempotent_and_memory_goes_with_its_last_view() -> None:
    before = held()
    arena = SlotArena(3, 4096)
    slots = [arena.view(slot, torch.uint8, (1,)).data_ptr() for slot in range(3)]
    view = arena.view(1, torch.float32, (4,))
    view.fill_(3.0)
    data = arena.buffer(2)
    arena.close()
    arena.close()
    assert view.tolist() == [3.0] * 4
    assert [is_slot(address) for address in slots] == [False, True, True]
    with pytest.raises(LocalProtocolError, match="closed"):
        arena.view(1, torch.float32, (4,))
    del view, data
    assert not any(map(is_slot, slots))
    expect_no_more(held, before)


@pytest.mark.parametrize(("num_slots", "slot_bytes"), [(0, 4096), (-1, 4096), (1, 0)])
def test_an_arena_without_memory_is_refused(num_slots: int, slot_bytes: int) -> None:
    with pytest.raises(ConfigError):
        SlotArena(num_slots, slot_bytes)


@pytest.mark.case(57)
def test_more_memory_than_is_free_is_refused_at_start_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=rf"need {64 << 40} bytes.* only [0-9]+ bytes free"):
        SlotArena(64, 1 << 40)


def test_the_limit_of_a_control_group_counts_and_so_do_those_around_it(tmp_path: Path) -> None:
    def group(path: str, limit: str, usage: int, inactive: int) -> None:
        directory = tmp_path / path
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "memory.max").write_text(limit + "\n")
        (directory / "memory.current").write_text(f"{usage}\n")
        (directory / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")

    group("", "max", 500, 0)
    group("outer", "1000", 400, 100)
    group("outer/inner", "max", 300, 0)
    limits = free_in_group(tmp_path, "/outer/inner", "memory.max", "memory.current")
    assert limits == [(f"control group {tmp_path}/outer", 700)]
    assert free_in_group(tmp_path, "/seen/from/outside", "memory.max", "memory.current") == []


def test_free_memory_is_enough_for_a_page() -> None:
    check_free_memory(4096, purpose="a page")


def test_what_can_not_be_read_for_want_of_descriptors_limits_nothing() -> None:
    with descriptors_below(0):
        check_free_memory(1 << 60, purpose="slots")


def test_a_slot_that_is_larger_than_files_may_be_says_so() -> None:
    before = held()
    with files_below(4096), pytest.raises(ConfigError, match="slot 0: 8192 bytes are more than `ulimit -f` allows"):
        SlotArena(1, 8192)
    expect_no_more(held, before)


@pytest.mark.parametrize("num_more", [0, 1, 6, 7])
def test_a_lack_of_descriptors_is_a_config_error_and_nothing_is_kept(num_more: int) -> None:
    SlotArena(1, 4096).close()  # the modules that this needs are open afterwards
    before = held()
    with few_descriptors(num_more), pytest.raises(ConfigError, match="ulimit -n"):
        SlotArena(1000, 4096)
    expect_no_more(held, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool, torch.int32, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_any_contiguous_tensor_is_bytes_without_a_copy(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    data = as_bytes(tensor)
    assert len(data) == tensor.numel() * dtype.itemsize
    if data:
        data[-1] = 1
        assert tensor.reshape(-1)[-1] != 0


def test_what_is_no_plain_memory_is_refused() -> None:
    for tensor in (
        torch.zeros(2, 3).t(),
        torch.zeros(4)[::2],
        torch.eye(2).to_sparse(),
        torch.zeros(2).cfloat().conj(),
    ):
        with pytest.raises(LocalProtocolError):
            as_bytes(tensor)
    assert len(as_bytes(torch.zeros(2, requires_grad=True))) == 8
