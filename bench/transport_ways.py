"""The student's side of the transport bench: everything that it measures, each as a way to fill slots.

Two processes; the other one is `bench.transport_teacher`. All ways fill the same slots from the same sources, and what
arrived is compared with what was sent after every measurement. Transports run with the credit loop of the ring: a slot
is asked for again once its fill came.
"""

from __future__ import annotations

import ctypes
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import crc32c
import torch

from bench.processes import queued_s
from bench.transport_perftest import PROGRAM, Perftest, perftest_program
from bench.transport_teacher import HANG_TIMEOUT_S, Echo, Open, Put, Stream, Teacher, cpu_s, source
from bench.transport_ucx import UCX_COPIES, UCX_WAYS, Bare, BareEnd, ucx_transports
from ring.core.errors import TransportError
from ring.core.messages import FillId
from transport import registry
from transport.contract import Receiver, wait_readable
from transport.memory import POISON_BYTE, SlotArena

MEMCPY, STREAM, SHM, ZMQ = "memcpy", "bare socket", "shm", "zmq"
ZMQ_CRC, ZMQ_CURVE = "zmq with CRC", "zmq with CURVE"
#: What a way is held against, by its name.
BASE_OF = {SHM: MEMCPY, ZMQ: STREAM, ZMQ_CRC: STREAM, ZMQ_CURVE: STREAM} | {name: f"bare {name}" for name in UCX_WAYS}
#: Of a round trip.
TRIP_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class Load:
    """`num_fills` fills of `num_bytes` each, at most `depth` of them asked for at a time."""

    num_bytes: int
    num_fills: int
    depth: int

    @property
    def total_bytes(self) -> int:
        return self.num_fills * self.num_bytes


@dataclass(frozen=True, kw_only=True)
class Pace:
    """One way in one round. `cpu_s_per_gb`: of both processes; None: not known. `queued_frac`: part of the time that
    this thread was ready to run while something else had its core."""

    gb_per_s: float
    cpu_s_per_gb: float | None
    queued_frac: float


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to fill slots. `copies`: how often a byte is copied between the teacher's buffer and the slot.

    `trip_s`: seconds of a round trip of TRIP_BYTES, the mean over as many as it is told: of a transport, from asking
    for a fill to having it. None: it has no other side."""

    name: str
    copies: str
    measure: Callable[[Load], Pace]
    trip_s: Callable[[int], float] | None = None


class Clock:
    """Times the student's side of one way, from its making to `stop`."""

    def __init__(self) -> None:
        self._begin_s, self._begin_cpu_s, self._begin_queued_s = time.perf_counter(), cpu_s(), queued_s()

    def stop(self) -> None:
        self.wall_s = time.perf_counter() - self._begin_s
        self._cpu_s = cpu_s() - self._begin_cpu_s
        self._queued_s = queued_s() - self._begin_queued_s

    def pace(self, load: Load, *, teacher_cpu_s: float = 0.0) -> Pace:
        moved_gb = load.total_bytes / 1e9
        return Pace(
            gb_per_s=moved_gb / self.wall_s,
            cpu_s_per_gb=(self._cpu_s + teacher_cpu_s) / moved_gb,
            queued_frac=self._queued_s / self.wall_s,
        )


class Ways:
    """Both processes, the slots between them, and the ways that can be measured here, open and ready."""

    def __init__(self, process: Teacher, *, depth: int, slot_bytes: int) -> None:
        self._process = process
        self._arena = SlotArena(depth, slot_bytes)
        self._sources = [source(number, slot_bytes) for number in range(depth)]
        self._receivers: dict[str, Receiver] = {}

    def close(self) -> None:
        for receiver in self._receivers.values():
            receiver.close()
            receiver.forget()
        self._arena.close()

    def open(self) -> Iterator[Way]:
        """Each beside what it is held against."""
        yield Way(name=MEMCPY, copies="1", measure=self._checked(MEMCPY, self._memcpy))
        yield self._channel(SHM, "shm", copies="1")
        yield Way(name=STREAM, copies="kernel", measure=self._checked(STREAM, self._stream), trip_s=self._stream_trip_s)
        yield self._channel(ZMQ, "zmq", copies="kernel + 1")
        yield Way(
            name=ZMQ_CRC,
            copies="kernel + 1",
            measure=self._checked(ZMQ_CRC, partial(self._fills, ZMQ, with_crc=True)),
            trip_s=partial(self._fill_trip_s, ZMQ, with_crc=True),
        )
        if registry.load("zmq").capabilities().encrypts:
            yield self._channel(ZMQ_CURVE, "zmq", copies="kernel + 3", encrypt=True)
        if registry.unavailable("ucx") is None:
            for name, tls in UCX_WAYS.items():
                yield from self._ucx(name, tls, UCX_COPIES[name])

    def _ucx(self, name: str, tls: str, copies: str) -> Iterator[Way]:
        yield Way(
            name=f"bare {name}",
            copies=copies,
            measure=self._checked(f"bare {name}", partial(self._bare, tls)),
            trip_s=partial(self._bare_trip_s, tls),
        )
        yield self._channel(name, "ucx", tls=tls, copies=copies)
        program = perftest_program()
        if program is not None:
            perftest = Perftest(program=program, tls=tls)
            yield Way(
                name=f"{PROGRAM} {name.removeprefix('ucx ')}",
                copies=copies,
                measure=partial(_perftest, perftest),
                trip_s=lambda num_trips: perftest.trip_s(num_bytes=TRIP_BYTES, num_trips=num_trips),
            )

    def _channel(self, name: str, backend: str, *, copies: str, tls: str | None = None, encrypt: bool = False) -> Way:
        """One of our transports."""
        with ucx_transports(tls):
            receiver = registry.load(backend).open_receiver(self._arena, bind_host="127.0.0.1", encrypt=encrypt)
        self._receivers[name] = receiver
        arena = self._arena
        self._process.start(
            Open(backend, receiver.describe(), arena.num_slots, arena.slot_bytes, channel=name, tls=tls)
        )
        deadline_s = time.monotonic() + HANG_TIMEOUT_S
        while not self._process.is_done():
            receiver.poll()
            wait_readable(receiver, deadline_s, what="the bench's teacher")
        self._process.result()
        measure = self._checked(name, partial(self._fills, name))
        return Way(name=name, copies=copies, measure=measure, trip_s=partial(self._fill_trip_s, name))

    def _checked(self, name: str, measure: Callable[[Load], Pace]) -> Callable[[Load], Pace]:
        """Afterwards the slots must hold what was put; they are poisoned for the next way."""

        def measured(load: Load) -> Pace:
            pace = measure(load)
            for slot in range(min(load.depth, load.num_fills)):
                filled = self._arena.view(slot, torch.uint8, (load.num_bytes,))
                if not torch.equal(filled, self._sources[slot][: load.num_bytes]):
                    raise TransportError(f"{name}: slot {slot} does not hold what was put")
                filled.fill_(POISON_BYTE)
            return pace

        return measured

    def _slots(self, load: Load) -> list[memoryview]:
        return [self._arena.buffer(slot)[: load.num_bytes] for slot in range(load.depth)]

    def _memcpy(self, load: Load) -> Pace:
        slots = [self._arena.view(slot, torch.uint8, (load.num_bytes,)) for slot in range(load.depth)]
        clock = Clock()
        for number in range(load.num_fills):
            slot = number % load.depth
            ctypes.memmove(slots[slot].data_ptr(), self._sources[slot].data_ptr(), load.num_bytes)
        clock.stop()
        return clock.pace(load)

    def _stream(self, load: Load) -> Pace:
        slots = self._slots(load)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._process.start(Stream(listener.getsockname(), load.num_fills, load.num_bytes))
            connection, _ = listener.accept()
        with connection:
            clock = Clock()
            for number in range(load.num_fills):
                left = slots[number % load.depth]
                while left:
                    num_bytes = connection.recv_into(left)
                    if num_bytes == 0:
                        raise TransportError("the bare socket ended early")
                    left = left[num_bytes:]
            clock.stop()
            connection.send(b"!")
        return clock.pace(load, teacher_cpu_s=self._process.result())

    def _stream_trip_s(self, num_trips: int) -> float:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._process.start(Echo(listener.getsockname(), num_trips, TRIP_BYTES))
            connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            clock = Clock()
            for _ in range(num_trips):
                connection.sendall(bytes(TRIP_BYTES))
                connection.recv(TRIP_BYTES, socket.MSG_WAITALL)
            clock.stop()
        self._process.result()
        return clock.wall_s / num_trips

    def _fills(self, channel: str, load: Load, *, with_crc: bool = False) -> Pace:
        clock, teacher_cpu_s = self._fill(channel, load, with_crc=with_crc)
        return clock.pace(load, teacher_cpu_s=teacher_cpu_s)

    def _fill_trip_s(self, channel: str, num_trips: int, *, with_crc: bool = False) -> float:
        load = Load(num_bytes=TRIP_BYTES, num_fills=num_trips, depth=1)
        clock, _ = self._fill(channel, load, with_crc=with_crc)
        return clock.wall_s / num_trips

    def _fill(self, channel: str, load: Load, *, with_crc: bool) -> tuple[Clock, float]:
        """(our time, the teacher's CPU seconds)"""
        process, receiver = self._process, self._receivers[channel]
        process.start(Put(channel, load.num_fills, load.num_bytes, with_crc))
        clock = Clock()
        num_asked = num_arrived = 0
        while num_arrived < load.num_fills:
            while num_asked < load.num_fills and num_asked - num_arrived < load.depth:
                # The teacher takes its sources in turn, one for each slot there is.
                slot = num_asked % self._arena.num_slots
                receiver.arm(FillId(num_asked, 1, slot), num_bytes=load.num_bytes)
                os.write(process.credits_fd, b"!")
                num_asked += 1
            for arrival in receiver.wait(timeout_s=HANG_TIMEOUT_S):
                data = self._arena.buffer(arrival.fill.slot)[: arrival.num_bytes]
                if with_crc and crc32c.crc32c(data).to_bytes(4, "little") != arrival.header:
                    raise TransportError(f"{arrival.fill} arrived damaged")
                num_arrived += 1
        clock.stop()
        while not process.is_done():  # acknowledgements still have to leave
            receiver.poll()
        return clock, process.result()

    def _bare(self, tls: str, load: Load) -> Pace:
        with self._bare_end(tls, Bare(tls, b"", load.num_fills, load.num_bytes)) as end:
            clock = Clock()
            end.receive(self._slots(load), num_fills=load.num_fills)
            clock.stop()
            end.say_goodbye()
        return clock.pace(load, teacher_cpu_s=self._process.result())

    def _bare_trip_s(self, tls: str, num_trips: int) -> float:
        with self._bare_end(tls, Bare(tls, b"", num_trips, TRIP_BYTES, echoes=True)) as end:
            clock = Clock()
            for _ in range(num_trips):
                end.trip(bytes(TRIP_BYTES))
            clock.stop()
            end.say_goodbye()
        self._process.result()
        return clock.wall_s / num_trips

    @contextmanager
    def _bare_end(self, tls: str, task: Bare) -> Iterator[BareEnd]:
        """Our end of the minimal loop; the other one begins with the task as soon as it is there."""
        end = BareEnd(tls)
        try:
            self._process.start(replace(task, address=end.address()))
            end.await_greeting()
            yield end
            while not self._process.is_done():  # it has to learn that all was fetched
                end.progress()
        finally:
            end.close()


def _perftest(perftest: Perftest, load: Load) -> Pace:
    begin_s, begin_queued_s = time.perf_counter(), queued_s()
    gb_per_s = perftest.gb_per_s(num_bytes=load.num_bytes, num_messages=load.num_fills)
    queued_frac = (queued_s() - begin_queued_s) / (time.perf_counter() - begin_s)
    return Pace(gb_per_s=gb_per_s, cpu_s_per_gb=None, queued_frac=queued_frac)
