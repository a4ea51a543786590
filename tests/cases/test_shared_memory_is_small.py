"""A container with 64 MiB of /dev/shm: slots don't live there, and nothing is killed by a page that can't be had."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests.rights import lack

#: One slot of 4096 states of 8192 numbers in bf16 is all of that /dev/shm.
SLOT_BYTES = 4096 * 8192 * 2
FILL_THREE_SLOTS = """
    import ctypes, os, sys
    libc = ctypes.CDLL(None, use_errno=True)
    CLONE_NEWNS, CLONE_NEWUSER, MS_NOSUID = 0x20000, 0x10000000, 2
    flags = CLONE_NEWNS if os.geteuid() == 0 else CLONE_NEWNS | CLONE_NEWUSER
    # Mounts within it are ours alone where the namespace's root says so first.
    private, size = ctypes.c_ulong(1 << 18 | 1 << 14), b"size=64m"
    if (
        libc.unshare(flags)
        or libc.mount(b"none", b"/", None, private, None)
        or libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", ctypes.c_ulong(MS_NOSUID), size)
    ):
        print(os.strerror(ctypes.get_errno()))
        sys.exit(77)
    import shutil, torch
    from transport.memory import SlotArena
    assert shutil.disk_usage("/dev/shm").total == 64 << 20
    arena = SlotArena(num_slots=3, slot_bytes=int(sys.argv[1]))
    for slot in range(3):
        arena.view(slot, torch.uint8, (int(sys.argv[1]),)).fill_(7)
    assert shutil.disk_usage("/dev/shm").used == 0
    arena.close()
    print("filled")
"""


@pytest.mark.case(57)
def test_slots_larger_than_dev_shm_are_filled_without_a_sigbus() -> None:
    script = textwrap.dedent(FILL_THREE_SLOTS)
    command = [sys.executable, "-c", script, str(SLOT_BYTES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    if done.returncode == 77:
        lack(f"no right to mount in a namespace of its own here: {done.stdout.strip()}")
    assert (done.returncode, done.stdout) == (0, "filled\n"), done.stderr
