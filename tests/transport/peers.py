"""The other side of a channel, in a process of its own (or in a thread, for the backend whose two sides share one).

A test speaks to it by remote calls of the methods of `Side`, which run where the peer lives. Peers are forked from a
server that has imported everything already, so that each costs milliseconds. Payloads are never sent along: both sides
make them from the fill's seq.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import select
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from ring.core.errors import DisaggKDError, PeerLost
from ring.core.messages import Description, FillId
from tests.leaks import held
from transport import registry
from transport.contract import Arrival, Endpoint, Receiver, Sender, Ticket
from transport.memory import POISON_BYTE, SlotArena, as_bytes

T = TypeVar("T")

#: No step of a test takes a tenth of this; it only ends tests that hang.
HANG_GUARD_S = 60.0 * float(os.environ.get("DISAGGKD_TEST_PATIENCE", "1"))  # more of it where all is emulated

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__, *(entry.module for entry in registry.ENTRIES)])


def payload(seq: int, num_bytes: int) -> torch.Tensor:
    """Bytes that only this seq gives: no other fill's can be mistaken for them."""
    block_bytes = 1 << 18
    block = torch.randint(0, 256, (block_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seq))
    num_blocks = -(-num_bytes // block_bytes)
    numbers = torch.arange(num_blocks, dtype=torch.int64).to(torch.uint8)  # blocks that change places are noticed
    return (block.expand(num_blocks, -1) ^ numbers.unsqueeze(1)).reshape(-1)[:num_bytes]


def payload_digest(seq: int, num_bytes: int) -> str:
    return digest(payload(seq, num_bytes))


def digest(data: memoryview | torch.Tensor) -> str:
    return hashlib.blake2b(data if isinstance(data, memoryview) else as_bytes(data), digest_size=16).hexdigest()


def receive(receiver: Receiver, arena: SlotArena) -> list[tuple[FillId, bytes, str]]:
    arrivals = receiver.wait(timeout_s=HANG_GUARD_S)
    return [(a.fill, a.header, digest(arena.buffer(a.fill.slot)[: a.num_bytes])) for a in arrivals]


def sent(fill: FillId, num_bytes: int) -> tuple[FillId, bytes, str]:
    return fill, header_of(fill), digest(payload(fill.seq, num_bytes))


def is_poisoned(arena: SlotArena, slot: int, *, after_bytes: int = 0) -> bool:
    return bool((arena.view(slot, torch.uint8, (arena.slot_bytes,))[after_bytes:] == POISON_BYTE).all())


def header_of(fill: FillId) -> bytes:
    return f"header of {fill.seq}, attempt {fill.attempt}".encode()


def wait_readable(*waited: Endpoint | Connection, timeout_s: float = 0.1) -> bool:
    """Until one of them has news; not for ever, as another thread may close one meanwhile."""
    poller = select.poll()
    for one in waited:
        for fd in (one.fileno(),) if isinstance(one, Connection) else one.wait_fds():
            poller.register(fd, select.POLLIN)
    return bool(poller.poll(timeout_s * 1e3))


def resources() -> Counter[str]:
    """What this process holds that could leak."""
    return held(Path(os.environ["XDG_RUNTIME_DIR"]))


def while_serving(receiver: Receiver, call: Callable[[], T]) -> T:
    """The result of a call that needs a student who polls; we are that student. Raises what it raised."""
    results: list[T] = []
    errors: list[DisaggKDError] = []

    def record() -> None:
        try:
            results.append(call())
        except DisaggKDError as error:
            errors.append(error)

    thread = threading.Thread(target=record)
    thread.start()
    with contextlib.suppress(PeerLost):  # as a teacher that refused us
        while thread.is_alive():
            assert receiver.poll() == []
            wait_readable(receiver, timeout_s=0.01)
    thread.join(HANG_GUARD_S)
    for error in errors:
        raise error
    return results[0]


class Side:
    """What a peer can be asked to do; it is at one end of at most one channel at a time."""

    def __init__(self, requests: Connection) -> None:
        self._requests = requests
        self._arena: SlotArena
        self._receiver: Receiver | None = None
        self._sender: Sender | None = None
        self._sources: dict[int, torch.Tensor] = {}
        self._tickets: dict[int, Ticket] = {}
        self._done: set[Ticket] = set()

    def rest(self) -> None:
        """Until the test asks for something: a teacher that has nothing to do polls its sender, as a service does."""
        while self._sender is not None and not self._requests.poll():
            try:
                self._done.update(self._sender.poll())
            except PeerLost:
                return
            wait_readable(self._sender, self._requests)

    # ---- as the student

    def open_receiver(self, backend: str, num_slots: int, slot_bytes: int) -> Description:
        self._arena = SlotArena(num_slots, slot_bytes)
        self._receiver = registry.load(backend).open_receiver(self._arena, bind_host="127.0.0.1")
        return dict(self._receiver.describe())

    def accept(self) -> None:
        """Let a sender connect, until the next request of the test."""
        while not self._requests.poll():
            assert self._receiver.poll() == []
            wait_readable(self._receiver, self._requests)

    def arm(self, fills: Sequence[FillId], num_bytes: int) -> None:
        for fill in fills:
            self._receiver.arm(fill, num_bytes=num_bytes)

    def receive(self, num_fills: int) -> list[tuple[FillId, bytes, str]]:
        """Wait for that many fills: (fill, header, digest of its slot) of each."""
        arrivals = []
        while len(arrivals) < num_fills:
            arrivals += self._receiver.wait(timeout_s=HANG_GUARD_S)
        return [(a.fill, a.header, digest(self._arena.buffer(a.fill.slot)[: a.num_bytes])) for a in arrivals]

    def receive_until_lost(self) -> list[tuple[FillId, bytes, str]]:
        received = []
        with contextlib.suppress(PeerLost):
            while True:
                received += self.receive(1)
        return received

    # ---- as the teacher

    def open_sender(self, backend: str, description: Description, num_slots: int, slot_bytes: int) -> None:
        self._sender = registry.load(backend).open_sender(
            description, num_slots=num_slots, slot_bytes=slot_bytes, timeout_s=HANG_GUARD_S
        )

    def put(self, fill: FillId, num_bytes: int) -> None:
        self._sources[fill.seq] = payload(fill.seq, num_bytes)
        self._tickets[fill.seq] = self._sender.put(fill, header=header_of(fill), parts=[self._sources[fill.seq]])

    def finish(self, seq: int) -> None:
        """Wait for that put's ticket, and then use its source for something else, as a teacher does."""
        ticket = self._tickets.pop(seq)
        if ticket not in self._done:
            self._sender.wait(ticket, timeout_s=HANG_GUARD_S)
        self._sources.pop(seq).fill_(0xEE)

    def put_and_finish(self, fill: FillId, num_bytes: int) -> None:
        self.put(fill, num_bytes)
        self.finish(fill.seq)

    def put_until_lost(self, fills: Sequence[FillId], num_bytes: int) -> None:
        """Put these, and then wait for the other side to go away."""
        with contextlib.suppress(PeerLost):
            for fill in fills:
                self.put(fill, num_bytes)
            while True:
                self._sender.poll()
                wait_readable(self._sender)

    # ---- as either

    def set_runtime_directory(self, path: str) -> None:
        os.environ["XDG_RUNTIME_DIR"] = path

    def fork_a_sleeper(self) -> int:
        """A child that inherits every descriptor and outlives us; its pid."""
        child = os.fork()
        if child == 0:
            signal.pause()
        return child

    def die_after_the_token(self, description: Description) -> None:
        """Connect to a shm channel as its teacher, and be killed before the slots are mapped."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(description["path"])
        connection.send(description["token"])
        os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        if self._receiver is not None:
            self._receiver.close()
            self._receiver.forget()
            self._arena.close()
        requests = self._requests
        self.__dict__.clear()
        Side.__init__(self, requests)

    def resources(self) -> Counter[str]:
        return resources()

    def anonymous_bytes(self) -> int:
        return anonymous_bytes()


def anonymous_bytes() -> int:
    """Memory of this process that no file stands behind: what a backend buffers is in here, the slots are not."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


def _serve(requests: Connection, environment: Mapping[str, str] | None = None) -> None:
    """environment: the one of who made the peer, where this process's own is another."""
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    torch.set_num_threads(1)
    if "DISAGGKD_PEER_NET_DEVICES" in os.environ:  # the other end of a cable that both processes have
        os.environ["UCX_NET_DEVICES"] = os.environ["DISAGGKD_PEER_NET_DEVICES"]
    side = Side(requests)
    # The test ends without asking for every result.
    with contextlib.suppress(EOFError, ConnectionError), requests:
        while True:
            side.rest()
            method, args = requests.recv()
            try:
                requests.send((getattr(side, method)(*args), None))
            except (DisaggKDError, AssertionError) as error:
                requests.send((None, error))
    side.close()


class Peer:
    """A `Side` somewhere else."""

    def __init__(self, *, in_thread: bool) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self._senders: list[Sender] = []
        if in_thread:
            self._process = None
            self._thread = threading.Thread(target=_serve, args=(theirs,))
            self._thread.start()
        else:
            # The server keeps the environment of the test that made the first peer of all.
            self._process = _processes.Process(target=_serve, args=(theirs, dict(os.environ)))
            self._process.start()
            theirs.close()

    def start(self, method: str, *args: Any) -> None:
        self._connection.send((method, args))

    def result(self) -> Any:
        """What the oldest call that was started gave. Raises what it raised."""
        assert self._connection.poll(HANG_GUARD_S), "the peer hangs"
        value, error = self._connection.recv()
        if error is not None:
            raise error
        return value

    def result_while_polling(self, endpoint: Receiver | Sender) -> tuple[Any, list[Arrival] | list[Ticket]]:
        """Be a working student or teacher until the peer's oldest call is over: (its result, what was polled)."""
        news = []
        while not self._connection.poll():
            news += endpoint.poll()
            wait_readable(endpoint, self._connection)
        return self.result(), news

    def call(self, method: str, *args: Any) -> Any:
        self.start(method, *args)
        return self.result()

    def connect_to(self, receiver: Receiver, arena: SlotArena, backend: str) -> None:
        """Make the peer the teacher of our channel."""
        self.start("open_sender", backend, dict(receiver.describe()), arena.num_slots, arena.slot_bytes)
        assert self.result_while_polling(receiver) == (None, [])

    def accept(self, backend: str, *, num_slots: int, slot_bytes: int) -> Sender:
        """Make the peer a student, and us its teacher."""
        description = self.call("open_receiver", backend, num_slots, slot_bytes)
        self.start("accept")
        sender = registry.load(backend).open_sender(
            description, num_slots=num_slots, slot_bytes=slot_bytes, timeout_s=HANG_GUARD_S
        )
        self._senders.append(sender)
        self.start("anonymous_bytes")  # any request ends "accept"
        self.result()
        self.result()
        return sender

    def stop(self) -> None:
        """Returns once no thread of it runs any more."""
        self.signal(signal.SIGSTOP)
        deadline_s = time.monotonic() + HANG_GUARD_S
        tasks = Path(f"/proc/{self._process.pid}/task")
        while any((task / "stat").read_text().rpartition(")")[2].split()[0] != "T" for task in tasks.iterdir()):
            assert time.monotonic() < deadline_s, "the peer does not stop"

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.has_been_killed()

    def has_been_killed(self) -> None:
        self._process.join(HANG_GUARD_S)
        assert self._process.exitcode == -signal.SIGKILL

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def end(self) -> None:
        """And with it our senders to it, where the test did not come so far."""
        for sender in self._senders:
            sender.close()
        self._connection.close()
        if self._process is None:
            self._thread.join(HANG_GUARD_S)
            assert not self._thread.is_alive(), "the peer hangs"
            return
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
        self._process.join(HANG_GUARD_S)
        if self._process.exitcode is None:
            self._process.kill()
            raise AssertionError("the peer hangs")
        self._process.close()
