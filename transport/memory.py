"""Slot memory on the host: one memfd a slot, so that a slot can be handed to another process without a name.

The student allocates the arena; every backend receives into it (zmq) or lets the teacher map it (shm). A memfd has no
name in /dev/shm, so nothing can leak when a process is killed; sealing it against shrinking keeps a truncation from
raising SIGBUS in the other process. Pages are allocated and touched at start: a lack of memory is a ConfigError then,
and no SIGBUS in the middle of a run.
"""

from __future__ import annotations

import errno
import fcntl
import math
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from ring.core.errors import ConfigError, LocalProtocolError

PAGE_BYTES = 4096
#: Kept when a receiver maps a slot: its size can't change any more, and neither can these seals.
SLOT_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
POISON_BYTE = 0xFF  # bytes of all ones are a NaN in every float dtype


class SlotArena:
    """`num_slots` buffers of `slot_bytes` (rounded up to whole pages) in memory that can be shared by descriptor.

    Raises ConfigError: not that much memory, or not that many descriptors, is free; nothing was kept.
    Lifetime: tensors and memoryviews of a slot keep its memory alive, also past close().
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        if num_slots < 1:
            raise ConfigError(f"a slot arena needs at least 1 slot, got {num_slots}")
        if slot_bytes < 1:
            raise ConfigError(f"slots need at least 1 byte, got {slot_bytes}")
        self.num_slots = num_slots
        self.slot_bytes = -(-slot_bytes // PAGE_BYTES) * PAGE_BYTES
        self._fds: list[int] = []
        self._slots: list[torch.Tensor] = []
        try:
            check_free_memory(num_slots * self.slot_bytes, purpose=f"{num_slots} slots of {self.slot_bytes} bytes")
            for slot in range(num_slots):
                self._fds.append(_make_memfd(slot, self.slot_bytes))
                self._slots.append(map_slot(self._fds[slot], self.slot_bytes))
                # The first touch costs 3 ns a byte; here it delays the start and not the first step.
                self._slots[slot].zero_()
        except OSError as error:
            self.close()
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise ConfigError(
                    f"{num_slots} slots need two descriptors each, and none is left ({error}): raise `ulimit -n`"
                ) from error
            raise
        except BaseException:
            self.close()
            raise

    @property
    def total_bytes(self) -> int:
        return self.num_slots * self.slot_bytes

    def view(self, slot: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """The first bytes of a slot as a tensor, without a copy, at an address that is a multiple of 64.

        Raises LocalProtocolError: no such slot, or the tensor would not fit."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > self.slot_bytes:
            raise LocalProtocolError(
                f"slot {slot}: a view of {dtype} {tuple(shape)} needs {num_bytes} bytes; a slot has {self.slot_bytes}"
            )
        return self._slot(slot)[:num_bytes].view(dtype).view(tuple(shape))

    def buffer(self, slot: int) -> memoryview:
        """The whole slot as writable bytes. Raises LocalProtocolError: no such slot."""
        return as_bytes(self._slot(slot))

    def fileno(self, slot: int) -> int:
        """The slot's memfd, owned by the arena. Raises LocalProtocolError: no such slot."""
        self._slot(slot)
        return self._fds[slot]

    def poison(self, slot: int) -> None:
        """Make whatever still reads this slot see NaN in every float dtype. Raises LocalProtocolError: no such slot."""
        self._slot(slot).fill_(POISON_BYTE)

    def close(self) -> None:
        """Give the memory back; what tensors still view goes with the last of them. Idempotent."""
        # The mappings are never unmapped by hand: a tensor holds a bare pointer, and only its reference keeps it valid.
        self._slots.clear()
        while self._fds:
            os.close(self._fds.pop())

    def _slot(self, slot: int) -> torch.Tensor:
        if not self._slots:
            raise LocalProtocolError(f"slot {slot} was asked of an arena that is closed")
        if not 0 <= slot < self.num_slots:
            raise LocalProtocolError(f"slot {slot} is out of range; allowed: 0 to {self.num_slots - 1}")
        return self._slots[slot]


def map_slot(fd: int, num_bytes: int) -> torch.Tensor:
    """The shared memory behind `fd` as a uint8 tensor, which owns the mapping; a forked child does not inherit it."""
    if sys.version_info >= (3, 13):
        mapping = mmap.mmap(fd, num_bytes, trackfd=False)  # older ones hold a duplicate of the descriptor as well
    else:
        mapping = mmap.mmap(fd, num_bytes)
    mapping.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype and shape, without a copy; keeps it alive.

    Raises LocalProtocolError: it is not contiguous, or not plain memory on the CPU."""
    return byte_tensor(tensor).numpy().data


def byte_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Like `as_bytes`, as a one-dimensional uint8 tensor."""
    # numpy knows no bfloat16, so every dtype goes through uint8; a 0-d tensor can't change its dtype, hence view(-1).
    check_plain(tensor)
    return tensor.detach().view(-1).view(torch.uint8)


def check_plain(tensor: torch.Tensor) -> None:
    """Raises LocalProtocolError: its bytes don't lie one after the other in plain memory of the CPU."""
    if not tensor.is_cpu or tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        raise LocalProtocolError(
            f"a part must be plain memory on the CPU, got {tensor.layout} {tensor.dtype} on {tensor.device}"
        )
    if not tensor.is_contiguous():
        raise LocalProtocolError(
            f"a part must be contiguous, got shape {tuple(tensor.shape)} with strides {tensor.stride()}"
        )


def check_free_memory(
    needed_bytes: int, *, purpose: str, remedy: str = "use a smaller ring depth or shorter rows, or give it more memory"
) -> None:
    """Raises ConfigError: the machine, or the control group that this process runs in, has not that much left."""
    for place, free_bytes in _free_memory():
        if needed_bytes > free_bytes:
            raise ConfigError(
                f"{purpose} need {needed_bytes} bytes of memory, but {place} has only {free_bytes} bytes free: {remedy}"
            )


def _free_memory() -> list[tuple[str, int]]:
    """(what limits, bytes left there) for each limit that can be read."""
    limits = []
    for line in _read_lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            limits.append(("the machine", int(line.split()[1]) * 1024))
    for line in _read_lines(Path("/proc/self/cgroup")):
        _, controllers, group = line.split(":", 2)
        if not controllers:  # version 2
            root, limit_file, usage_file = "/sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit_file, usage_file = "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        limits += free_in_group(Path(root), group, limit_file, usage_file)
    return limits


def free_in_group(root: Path, group: str, limit_file: str, usage_file: str) -> list[tuple[str, int]]:
    """(what limits, bytes left there) for a control group and those around it; what can't be read does not limit."""
    limits = []
    directory = root / group.strip("/")
    while True:
        limit_bytes, usage_bytes = _read_int(directory / limit_file), _read_int(directory / usage_file)
        if limit_bytes is not None and usage_bytes is not None:
            # Cached file pages count as usage, but the kernel gives them up first.
            stat = _read_stat(directory / "memory.stat")
            cache_bytes = stat.get("total_inactive_file", stat.get("inactive_file", 0))
            limits.append((f"control group {directory}", max(0, limit_bytes - usage_bytes + cache_bytes)))
        if directory == root:
            return limits
        directory = directory.parent


def _read_int(path: Path) -> int | None:
    """None: no such file, or it says "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _read_stat(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in _read_lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _make_memfd(slot: int, num_bytes: int) -> int:
    fd = os.memfd_create(f"disaggkd-slot-{slot}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        os.posix_fallocate(fd, 0, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SLOT_SEALS)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise ConfigError(f"slot {slot}: {num_bytes} bytes of shared memory are not free ({error})") from error
        if error.errno == errno.EFBIG:  # memory counts as a file
            raise ConfigError(f"slot {slot}: {num_bytes} bytes are more than `ulimit -f` allows ({error})") from error
        raise
    return fd
