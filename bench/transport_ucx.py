"""UCX in the transport bench: which of its transports a way uses, and its own limit, a minimal loop on the same calls.

The minimal loop moves the same bytes between two workers: each is offered, and fetched into a slot, two at a time.
There is no announcement, no credit and no acknowledgement.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ring.core.errors import TransportError
from transport import ucx_core
from transport.memory import as_bytes
from transport.ucx_core import Transfer, Worker

#: By the name of the way: UCX's transports within one host.
UCX_WAYS = {"ucx tcp": "tcp", "ucx shm": "posix,sysv,cma"}
UCX_COPIES = {"ucx tcp": "through the kernel + 1", "ucx shm": "2 copies"}
_IN_FLIGHT = 2
_HANG_TIMEOUT_S = 120.0
_HELLO_TAG, _PAYLOAD_TAG = 1, 2


@dataclass(frozen=True)
class Bare:
    """Send `num_fills` sources to that worker, over these transports of UCX."""

    tls: str
    address: bytes
    num_fills: int


@contextmanager
def ucx_transports(tls: str | None) -> Iterator[None]:
    """What is opened in here uses these transports of UCX, whatever the environment says; None: as it says."""
    before = os.environ.get("UCX_TLS")
    if tls is not None:
        os.environ["UCX_TLS"] = tls
    try:
        yield
    finally:
        if before is not None:
            os.environ["UCX_TLS"] = before
        elif tls is not None:
            del os.environ["UCX_TLS"]


def bare_worker(tls: str) -> Worker:
    with ucx_transports(tls):
        return Worker(ucx_core.context(net_devices="lo"))


def bare_send(task: Bare, sources: Sequence[torch.Tensor]) -> None:
    worker = bare_worker(task.tls)
    try:
        connection = worker.connect(task.address)
        connection.send(worker.address(), tag=_HELLO_TAG)
        moving: deque[Transfer] = deque()
        for number in range(task.num_fills):
            moving.append(connection.send(as_bytes(sources[number % len(sources)]), tag=_PAYLOAD_TAG))
            if len(moving) == _IN_FLIGHT:
                _finish(worker, moving.popleft())
        _work(worker, until=lambda: all(transfer.is_done for transfer in worker.transfers))
    finally:
        worker.close()


def bare_receive(worker: Worker, slots: Sequence[memoryview], num_fills: int, *, on_begin: Callable[[], None]) -> None:
    """Until all fills are in their slots. on_begin: called once, when the other side is there."""
    num_offered = 0
    moving: deque[Transfer] = deque()

    def take() -> bool:
        nonlocal num_offered
        while (message := worker.next_message()) is not None:
            if message.tag == _HELLO_TAG:
                buffer = bytearray(message.num_bytes)
                hello = worker.receive(message, memoryview(buffer))
                _finish(worker, hello)
                worker.connect(bytes(buffer))
                on_begin()
            else:
                moving.append(worker.receive(message, slots[num_offered % len(slots)]))
                num_offered += 1
        while moving and moving[0].is_done:
            error = moving.popleft().error()
            if error is not None:
                raise TransportError(f"the minimal loop of UCX failed: {error}")
        return num_offered == num_fills and not moving

    _work(worker, until=take)


def progress(worker: Worker) -> None:
    worker.progress(budget_s=2e-3)


def _finish(worker: Worker, transfer: Transfer) -> None:
    _work(worker, until=lambda: transfer.is_done)


def _work(worker: Worker, *, until: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _HANG_TIMEOUT_S
    poller = select.poll()
    poller.register(worker, select.POLLIN)
    while not until():
        if worker.progress(budget_s=2e-3) or until() or not worker.arm():
            continue
        poller.poll(100)
        if time.monotonic() > deadline_s:
            raise TransportError(f"the minimal loop of UCX did not end within {_HANG_TIMEOUT_S} s")
