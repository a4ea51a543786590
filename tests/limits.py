"""Limits of this process, lowered for a while. They hold for all its threads."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


def few_descriptors(num_more: int) -> AbstractContextManager[None]:
    """Of this process, whose other threads take from the same few."""
    listed = os.listdir("/proc/self/fd")
    used = {int(fd) for fd in listed if os.path.lexists(f"/proc/self/fd/{fd}")}  # the listing's own is closed again
    free = [fd for fd in range(len(used) + num_more + 1) if fd not in used]
    return descriptors_below(free[num_more])


@contextmanager
def descriptors_below(limit: int) -> Iterator[None]:
    """Nothing is opened at or above `limit`. With 0 nothing at all, whatever is closed meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def files_below(num_bytes: int) -> Iterator[None]:
    """No file grows beyond that, memory that counts as one neither."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
