"""What a process holds that could leak, and that no more of it is held than before.

Less is no leak: what an earlier test had let go of, or was about to, may go at any time.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

#: Only ends the wait for what is really left.
HANG_GUARD_S = 60.0 * float(os.environ.get("DISAGGKD_TEST_PATIENCE", "1"))  # more of it where all is emulated


def held(sockets: Path | None = None) -> Counter[str]:
    """How many of each kind this process holds, once Python has let go of what it can. sockets: where it makes its
    socket files."""
    gc.collect()
    found = descriptors()
    found["thread"] = len(os.listdir("/proc/self/task"))
    found["slot mapping"] = sum("memfd:disaggkd" in line for line in Path("/proc/self/maps").read_text().splitlines())
    found.update(f"{path.name} where the sockets are" for path in (sockets.iterdir() if sockets else ()))
    return found


def descriptors() -> Counter[str]:
    """How many of each kind are open; also what Python would let go of if it looked."""
    return Counter(_descriptor_kinds())


def _descriptor_kinds() -> Iterator[str]:
    """What each open descriptor is, without the number that tells one socket from another."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            yield "descriptor of " + os.readlink(f"/proc/self/fd/{fd}").split(":[")[0]


def expect_no_more(look: Callable[[], Counter[str]], before: Counter[str]) -> None:
    """Wait until nothing is held beyond what was held `before`: threads and sockets may take a while to end."""
    deadline_s = time.monotonic() + HANG_GUARD_S
    while more := look() - before:
        assert time.monotonic() < deadline_s, f"left behind: {dict(more)}; before: {dict(before)}"
        time.sleep(0.01)
