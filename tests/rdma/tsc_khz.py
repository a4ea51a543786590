"""Prints how many thousand ticks a second this processor's time stamp counter makes.

An emulated machine reads that very counter. Left to find out its rate while it boots on a busy host, it was seen to
be wrong by a factor of eight, and all its timeouts with it.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable

PAGE = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
PAGE.write(bytes.fromhex("0f31 48c1e220 4809d0 c3"))  # rdtsc; shl rdx, 32; or rax, rdx; ret


def counter() -> Callable[[], int]:
    """A function that reads it."""
    return ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(ctypes.c_char.from_buffer(PAGE)))


def reading(count: Callable[[], int]) -> tuple[float, int]:
    """(nanoseconds, ticks) at one moment: of many tries the one that nothing came between."""
    tries = []
    for _ in range(300):
        before_ns = time.perf_counter_ns()
        ticks = count()
        after_ns = time.perf_counter_ns()
        tries.append((after_ns - before_ns, (before_ns + after_ns) / 2, ticks))
    _, moment_ns, ticks = min(tries)
    return moment_ns, ticks


if __name__ == "__main__":
    count = counter()
    first_ns, first = reading(count)
    time.sleep(0.5)
    last_ns, last = reading(count)
    print(round((last - first) / (last_ns - first_ns) * 1e6))
