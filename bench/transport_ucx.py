"""UCX in the transport bench: which of its transports a way uses, and its own limit, a minimal loop on the same calls.

The minimal loop moves the same bytes between two workers: each is offered, and fetched into a slot, two at a time.
There is no announcement, no credit and no acknowledgement but a last word.
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
from transport.ucx_core import Connection, Message, Transfer, Worker

#: By the name of the way: UCX's transports within one host.
UCX_WAYS = {"ucx tcp": "tcp", "ucx shm": "posix,sysv,cma"}
UCX_COPIES = {"ucx tcp": "kernel + 1", "ucx shm": "2"}
_IN_FLIGHT = 2
_HANG_TIMEOUT_S = 120.0
_POLL_BUDGET_S = 2e-3
_HELLO_TAG, _PAYLOAD_TAG = 1, 2


@dataclass(frozen=True)
class Bare:
    """Be the other end of that worker's minimal loop, over these transports of UCX.

    Sends `num_fills` sources, the first `num_bytes` of each; `echoes`: instead sends back that many messages."""

    tls: str
    address: bytes
    num_fills: int
    num_bytes: int
    echoes: bool = False


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


class BareEnd:
    """One end of the minimal loop."""

    def __init__(self, tls: str) -> None:
        with ucx_transports(tls):
            self._worker = Worker(ucx_core.context(net_devices="lo"))
        self._connection: Connection | None = None

    def address(self) -> bytes:
        return self._worker.address()

    def greet(self, address: bytes) -> None:
        """Connect to the end that has this address, and tell it ours."""
        self._connection = self._worker.connect(address)
        self._connection.send(self._worker.address(), tag=_HELLO_TAG)

    def await_greeting(self) -> None:
        """Until the other end has connected; we are connected to it then."""
        message = self._next()
        assert message.tag == _HELLO_TAG
        self._connection = self._worker.connect(self._read(message))

    def send(self, sources: Sequence[torch.Tensor], *, num_fills: int, num_bytes: int) -> None:
        """Returns once the other end has fetched all of them, and said so: what is small is sent before the other end
        has so much as connected to this one, which it could not if this one had left."""
        moving: deque[Transfer] = deque()
        for number in range(num_fills):
            moving.append(self._send(as_bytes(sources[number % len(sources)])[:num_bytes]))
            if len(moving) == _IN_FLIGHT:
                self._finish(moving.popleft())
        for transfer in moving:
            self._finish(transfer)
        self._read(self._next())

    def receive(self, slots: Sequence[memoryview], *, num_fills: int) -> None:
        """Returns once all are in their slots."""
        moving: deque[Transfer] = deque()
        for number in range(num_fills):
            moving.append(self._worker.receive(self._next(), slots[number % len(slots)]))
            while moving and moving[0].is_done:
                self._finish(moving.popleft())
        for transfer in moving:
            self._finish(transfer)

    def echo(self, *, num_trips: int) -> None:
        """Send back what comes, and stay until a last message says that all of it arrived."""
        for _ in range(num_trips):
            self._finish(self._send(self._read(self._next())))
        self._read(self._next())

    def trip(self, message: bytes) -> None:
        """There and back."""
        self._send(message)
        self._read(self._next())

    def say_goodbye(self) -> None:
        """What `send` and `echo` wait for in the end."""
        self._send(b"!")

    def progress(self) -> None:
        """What the other end still has to learn is sent by and by."""
        self._worker.progress(budget_s=_POLL_BUDGET_S)
        self._worker.forget_done()

    def close(self) -> None:
        self._worker.close()

    def _send(self, memory: memoryview | bytes) -> Transfer:
        assert self._connection is not None
        return self._connection.send(memory, tag=_PAYLOAD_TAG)

    def _read(self, message: Message) -> bytes:
        buffer = bytearray(message.num_bytes)
        self._finish(self._worker.receive(message, memoryview(buffer)))
        return bytes(buffer)

    def _next(self) -> Message:
        """The next message that the other end offers."""
        found: list[Message] = []

        def take() -> bool:
            if not found and (message := self._worker.next_message()) is not None:
                found.append(message)
            return bool(found)

        self._work(until=take)
        return found[0]

    def _finish(self, transfer: Transfer) -> None:
        self._work(until=lambda: transfer.is_done)
        error = transfer.error()
        if error is not None:
            raise TransportError(f"the minimal loop of UCX failed: {error}")

    def _work(self, *, until: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + _HANG_TIMEOUT_S
        poller = select.poll()
        poller.register(self._worker, select.POLLIN)
        while not until():
            if self._worker.progress(budget_s=_POLL_BUDGET_S) or until() or not self._worker.arm():
                continue
            poller.poll(100)
            if time.monotonic() > deadline_s:
                raise TransportError(f"the minimal loop of UCX did not end within {_HANG_TIMEOUT_S} s")


def serve_bare(task: Bare, sources: Sequence[torch.Tensor]) -> None:
    """What the teacher's process does of the minimal loop."""
    end = BareEnd(task.tls)
    try:
        end.greet(task.address)
        if task.echoes:
            end.echo(num_trips=task.num_fills)
        else:
            end.send(sources, num_fills=task.num_fills, num_bytes=task.num_bytes)
    finally:
        end.close()
