"""Ports for tests in which an address outlives, or comes before, whoever listens there.

A port that was given by chance and let go is given to the next that asks, maybe in another process, before the test
listens there itself. These lie below those that Linux gives by chance (32768 and on), and every process that runs tests
has a range of its own.
"""

from __future__ import annotations

import itertools
import os
import socket

_FIRST, _NUM_RANGES, _RANGE = 12000, 100, 200


def _own_range() -> range:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    # Workers of one session lie beside each other; sessions, which know nothing of each other, lie apart by chance.
    place = 4 * os.getppid() + int(worker.removeprefix("gw")) if worker else 4 * os.getpid()
    first = _FIRST + place % _NUM_RANGES * _RANGE
    return range(first, first + _RANGE)


_candidates = itertools.cycle(_own_range())


def free_port() -> str:
    """Nobody listens there, on any address, and no other call of this process gives it before 199 more have."""
    for port in itertools.islice(_candidates, _RANGE):
        with socket.socket() as probe:
            # As whoever listens there will: connections that are over do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return str(port)
    raise AssertionError(f"none of the ports {_own_range()} is free")
