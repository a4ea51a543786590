"""What transports have to know of the host: whether two processes share it, and how many descriptors are left."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import resource
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

from ring.core.errors import TransportError

#: What a link of zmq may take: its context's threads, its sockets and their monitor, its connection.
DESCRIPTORS_A_LINK = 32


def host_id() -> str:
    """Equal on both sides exactly if a same-host backend works between them.

    That takes one kernel (its boot id), the same view of the socket's path (mount namespace), process ids that mean
    the same (pid namespace), and one user (the socket is private). Two containers of one machine therefore differ,
    even if they share a volume. The ipc namespace is left out: memfds and unix sockets don't belong to one.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("mnt", "pid", "user")]
    except OSError:
        return f"unknown-{uuid.uuid4().hex}"  # shares with nobody
    whole = "\n".join([boot_id, *namespaces, str(os.getuid())])
    return hashlib.sha256(whole.encode()).hexdigest()[:32]


@contextlib.contextmanager
def descriptors_for(what: str) -> Iterator[None]:
    """Around what opens some. Raises TransportError: the kernel gave none."""
    try:
        yield
    except OSError as error:
        raise TransportError(f"{what} could not be opened: {error.strerror}{remedy(error)}") from error


def remedy(error: Exception) -> str:
    """What to append to a message about it; empty unless a lack of descriptors is what it is about."""
    # zmq's errors have a number too, and are no OSError.
    return ": raise `ulimit -n`" if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE) else ""


def check_descriptors(needed: int, *, what: str) -> None:
    """Raises TransportError: fewer are left. At the limit libzmq ends the process, in a thread of its own, so it has to
    be asked before."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    with descriptors_for(what):  # to look takes one too
        free = sys.maxsize if limit == resource.RLIM_INFINITY else limit - len(os.listdir("/proc/self/fd"))
    if free < needed:
        raise TransportError(f"{what} needs {needed} descriptors, and {max(free, 0)} are left: raise `ulimit -n`")
