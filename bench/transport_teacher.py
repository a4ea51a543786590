"""The other process of the transport bench: puts fills, or sends bytes through a bare socket, as it is told."""

from __future__ import annotations

import multiprocessing
import os
import resource
import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import crc32c
import torch

from bench.transport_ucx import Bare, serve_bare, ucx_transports
from ring.core.errors import DisaggKDError, TransportError
from ring.core.messages import Description, FillId
from transport import registry
from transport.contract import Sender
from transport.memory import as_bytes

OPEN_TIMEOUT_S = 30.0
HANG_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Open:
    """Become the teacher of a channel. `tls`: which transports of UCX it uses, where it is one of UCX."""

    backend: str
    description: Description
    num_slots: int
    slot_bytes: int
    channel: str
    tls: str | None = None


@dataclass(frozen=True)
class Put:
    """Put `num_fills` of `num_bytes` on that channel: each when a byte of credit comes through the pipe."""

    channel: str
    num_fills: int
    num_bytes: int
    with_crc: bool = False


@dataclass(frozen=True)
class Stream:
    """Connect there, and send `num_fills` sources through the bare socket, the first `num_bytes` of each."""

    address: tuple[str, int]
    num_fills: int
    num_bytes: int


@dataclass(frozen=True)
class Echo:
    """Connect there, and send each message of `num_bytes` back, `num_trips` of them."""

    address: tuple[str, int]
    num_trips: int
    num_bytes: int


Task = Open | Put | Stream | Echo | Bare


def cpu_s() -> float:
    """CPU time of all threads of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Teacher:
    """The process. `credits_fd`: each byte written to it lets one fill go."""

    def __init__(self, *, num_sources: int, source_bytes: int) -> None:
        processes = multiprocessing.get_context("spawn")
        self.tasks, theirs = processes.Pipe()
        read_end, write_end = processes.Pipe(duplex=False)
        self.credits_fd = os.dup(write_end.fileno())
        self._process = processes.Process(
            target=_serve, args=(theirs, read_end, num_sources, source_bytes), daemon=True
        )
        self._process.start()
        theirs.close()
        read_end.close()
        write_end.close()

    def start(self, task: Task) -> None:
        self.tasks.send(task)

    def is_done(self) -> bool:
        """Whether `result` would not block. Raises TransportError: the process ended."""
        if not self._process.is_alive():
            raise TransportError("the bench's teacher process ended")
        return self.tasks.poll()

    def result(self) -> float:
        """CPU seconds that the oldest task took it. Raises what it raised there."""
        if not self.tasks.poll(HANG_TIMEOUT_S):
            raise TransportError(f"the bench's teacher process did nothing for {HANG_TIMEOUT_S} s")
        answer = self.tasks.recv()
        if isinstance(answer, DisaggKDError):
            raise answer
        return float(answer)

    def close(self) -> None:
        os.close(self.credits_fd)
        self.tasks.close()
        self._process.join(HANG_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@contextmanager
def teacher(*, num_sources: int, source_bytes: int) -> Iterator[Teacher]:
    """The process while the block runs."""
    process = Teacher(num_sources=num_sources, source_bytes=source_bytes)
    try:
        yield process
    finally:
        process.close()


def source(number: int, num_bytes: int) -> torch.Tensor:
    """What the teacher sends from its staging buffer of that number; the student makes the same to compare."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


def _serve(tasks: Connection, credits: Connection, num_sources: int, source_bytes: int) -> None:
    torch.set_num_threads(1)
    sources = [source(number, source_bytes) for number in range(num_sources)]
    senders: dict[str, Sender] = {}
    try:
        while True:
            task = tasks.recv()
            before_s = cpu_s()
            try:
                match task:
                    case Open():
                        with ucx_transports(task.tls):
                            senders[task.channel] = registry.load(task.backend).open_sender(
                                task.description,
                                num_slots=task.num_slots,
                                slot_bytes=task.slot_bytes,
                                timeout_s=OPEN_TIMEOUT_S,
                            )
                    case Put():
                        _put(senders[task.channel], credits.fileno(), sources, task)
                    case Stream():
                        _stream(task, sources)
                    case Echo():
                        _echo(task)
                    case Bare():
                        serve_bare(task, sources)
                tasks.send(cpu_s() - before_s)
            except DisaggKDError as error:
                tasks.send(error)
    except (EOFError, ConnectionError):
        return  # the bench is over
    finally:
        for sender in senders.values():
            sender.close()


def _put(sender: Sender, credits_fd: int, sources: list[torch.Tensor], task: Put) -> None:
    deadline_s = time.monotonic() + HANG_TIMEOUT_S
    num_credits = num_put = num_done = 0
    while num_done < task.num_fills:
        while num_put < num_credits:
            data = sources[num_put % len(sources)][: task.num_bytes]
            header = crc32c.crc32c(as_bytes(data)).to_bytes(4, "little") if task.with_crc else b""
            sender.put(FillId(num_put, 1, num_put % len(sources)), header=header, parts=[data])
            num_put += 1
        tickets = sender.poll()
        num_done += len(tickets)
        if tickets:
            continue
        if time.monotonic() > deadline_s:
            raise TransportError(f"{num_done} of {task.num_fills} fills were sent within {HANG_TIMEOUT_S} s")
        poller = select.poll()
        for fd in (credits_fd, *sender.wait_fds()):
            poller.register(fd, select.POLLIN)
        if credits_fd in dict(poller.poll(1e3)):
            num_credits += len(os.read(credits_fd, 4096))


def _stream(task: Stream, sources: list[torch.Tensor]) -> None:
    with socket.create_connection(task.address, HANG_TIMEOUT_S) as connection:
        for number in range(task.num_fills):
            left = as_bytes(sources[number % len(sources)])[: task.num_bytes]
            while left:
                left = left[connection.sendmsg([left]) :]
        connection.recv(1)  # until the other side has it all


def _echo(task: Echo) -> None:
    with socket.create_connection(task.address, HANG_TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(task.num_trips):
            connection.sendall(connection.recv(task.num_bytes, socket.MSG_WAITALL))
