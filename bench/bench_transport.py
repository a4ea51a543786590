"""`python -m bench transport`: how fast the transports fill slots, against what the machine can do without them.

Two processes. In every round, one after the other: a plain copy of the same bytes into the same slots, a bare TCP
stream received into them, and each transport with the credit loop of the ring (a slot is asked for again once its fill
came). shm is held against the copy, zmq against the stream, ucx (where it is installed) against a minimal loop on UCX's
own calls over the same of its transports; figures are medians over rounds of ratios within a round.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import crc32c
import torch
from rich.console import Console

from bench.processes import queued_s
from bench.records import RECORDS_DIR, Check, Record, Spread, write_record
from bench.report import console, exit_code, print_checks, print_spreads
from bench.transport_teacher import HANG_TIMEOUT_S, Open, Put, Stream, Teacher, cpu_s, source, teacher
from bench.transport_ucx import UCX_COPIES, UCX_WAYS, Bare, bare_receive, bare_worker, progress, ucx_transports
from ring.command import flag, parse, run, set_up_logging
from ring.core.errors import ConfigError, TransportError
from ring.core.messages import FillId
from transport import registry
from transport.contract import Receiver, wait_readable
from transport.memory import SlotArena

PROG = "bench.transport"
SHM_TARGET, ZMQ_TARGET, UCX_TARGET = 0.80, 0.85, 0.85
#: From this slot size on the target of ucx holds; below it the round trips of a fill count.
UCX_TARGET_BYTES = 4 << 20
#: This far below its target a ratio fails the bench.
MARGIN = 0.15
MEMCPY, STREAM = "memcpy", "bare socket"
#: Part of the time that other work had the core of the plain copy, which alone has nobody else to share it with; above
#: it a note says so.
QUIET_FRAC = 0.03


@dataclass(frozen=True, kw_only=True)
class TransportConfig:
    """Raises ConfigError on construction: a value out of its range."""

    rounds: int = flag(7, "rounds; figures are medians over them")
    fills: int = flag(64, "fills of each way in a round")
    slot_bytes: int = flag(16 << 20, "bytes of a slot, and of a fill")
    depth: int = flag(4, "slots of the ring")
    out: str = flag(str(RECORDS_DIR), "where the record is written", metavar="DIR")
    debug: bool = flag(False, "log more, and print tracebacks")

    def __post_init__(self) -> None:
        for name in ("rounds", "fills", "slot_bytes", "depth"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be >= 1, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class Pace:
    """One way in one round. `cpu_s_per_gb`: of both processes. `queued_frac`: part of the time that this thread was
    ready to run while something else had its core."""

    gb_per_s: float
    cpu_s_per_gb: float
    queued_frac: float


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to fill slots. `copies`: how often a byte is copied between the teacher's buffer and the slot."""

    name: str
    copies: str
    measure: Callable[[], Pace]


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 1 if a transport is 0.15 below its target, 2 for bad usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    code = 0

    def command() -> None:
        nonlocal code
        config = parse(TransportConfig, arguments, prog=PROG, description=(__doc__ or "").split("\n")[0])
        if config.debug:
            set_up_logging(debug=True)
        code = bench(config, console())

    return run(command, prog=PROG, debug="--debug" in arguments) or code


def bench(config: TransportConfig, out: Console) -> int:
    """Measure, print, record; returns the exit code. Raises DisaggKDError."""
    torch.set_num_threads(1)
    paces: dict[str, list[Pace]] = {}
    with _ways(config) as ways:
        for way in ways:  # connections, pages and processor clocks warm up
            way.measure()
        for _ in range(config.rounds):
            for way in ways:
                paces.setdefault(way.name, []).append(way.measure())
        copies = {way.name: way.copies for way in ways}
    record = _record(config, paces)
    title = f"slots of {config.slot_bytes / 2**20:g} MiB, {config.fills} fills a round; medians over rounds"
    rows = [
        (f"{name}, {copies[name]}", "GB/s", Spread.of([pace.gb_per_s for pace in found]))
        for name, found in paces.items()
    ]
    print_spreads(out, title, rows)
    print_checks(out, "transport", record.checks)
    for note in record.notes:
        out.print(f"note: {note}", style="yellow", highlight=False)
    path = write_record(record, directory=Path(config.out))
    out.print(f"record: {path}", highlight=False)
    return exit_code(record.checks)


def _record(config: TransportConfig, paces: dict[str, list[Pace]]) -> Record:
    def ratio(name: str, base: str) -> float:
        pairs = zip(paces[name], paces[base], strict=True)
        return Spread.of([way.gb_per_s / other.gb_per_s for way, other in pairs]).median

    speed = {name: Spread.of([pace.gb_per_s for pace in found]) for name, found in paces.items()}
    cpu = {name: Spread.of([pace.cpu_s_per_gb for pace in found]) for name, found in paces.items()}
    checks = (
        Check(
            name="shm over memcpy of the same slots",
            measured=ratio("shm", MEMCPY),
            target=SHM_TARGET,
            limit=SHM_TARGET - MARGIN,
            at_most=False,
        ),
        Check(
            name="zmq over a bare socket stream",
            measured=ratio("zmq", STREAM),
            target=ZMQ_TARGET,
            limit=ZMQ_TARGET - MARGIN,
            at_most=False,
        ),
        *_ucx_checks(config, paces, ratio),
        Check(name="zmq with CRC over a bare socket stream", measured=ratio("zmq with CRC", STREAM)),
        *(Check(name=f"{name}: CPU of both sides", measured=s.median, unit="s/GB") for name, s in cpu.items()),
    )
    return Record(
        bench="transport",
        case="fills",
        settings={name: value for name, value in asdict(config).items() if name != "out"},
        measured={
            **{f"{name} gb_per_s": spread for name, spread in speed.items()},
            **{f"{name} cpu_s_per_gb": spread for name, spread in cpu.items()},
        },
        bytes_moved=config.rounds * config.fills * config.slot_bytes * len(paces),
        checks=checks,
        notes=_notes(paces),
    )


def _ucx_checks(
    config: TransportConfig, paces: dict[str, list[Pace]], ratio: Callable[[str, str], float]
) -> Iterator[Check]:
    is_large = config.slot_bytes >= UCX_TARGET_BYTES
    for name in UCX_WAYS:
        if name in paces:
            yield Check(
                name=f"{name} over UCX's own minimal loop",
                measured=ratio(name, f"bare {name}"),
                target=UCX_TARGET if is_large else None,
                limit=UCX_TARGET - MARGIN if is_large else None,
                at_most=False,
            )


def _notes(paces: dict[str, list[Pace]]) -> tuple[str, ...]:
    """What makes these figures less than they claim to be."""
    queued = Spread.of([pace.queued_frac for pace in paces[MEMCPY]]).median
    if not queued > QUIET_FRAC:
        return ()
    return (
        f"not quiet: other work had the core for {queued:.0%} of the time; the times are noise: run it again on an "
        f"idle machine (the CPU figures hold)",
    )


@contextmanager
def _ways(config: TransportConfig) -> Iterator[list[Way]]:
    """Everything that is measured, open and ready."""
    arena = SlotArena(config.depth, config.slot_bytes)
    sources = [source(number, config.slot_bytes) for number in range(config.depth)]
    receivers: dict[str, Receiver] = {}
    try:
        with teacher(num_sources=config.depth, source_bytes=config.slot_bytes) as process:
            has_ucx = registry.unavailable("ucx") is None
            channels: dict[str, tuple[str, str | None]] = {"shm": ("shm", None), "zmq": ("zmq", None)}
            channels |= {name: ("ucx", tls) for name, tls in UCX_WAYS.items() if has_ucx}
            for name, (backend, tls) in channels.items():
                with ucx_transports(tls):
                    receivers[name] = registry.load(backend).open_receiver(arena, bind_host="127.0.0.1")
                _connect(process, name, backend, tls, receivers[name], arena)

            def fills(channel: str, *, with_crc: bool = False) -> Callable[[], Pace]:
                def measure() -> Pace:
                    pace = _fills(config, process, channel, receivers[channel], arena, with_crc=with_crc)
                    _check(arena, sources[: config.fills], what=channel)
                    return pace

                return measure

            def bare(tls: str) -> Callable[[], Pace]:
                def measure() -> Pace:
                    pace = _bare(config, process, tls, arena)
                    _check(arena, sources[: config.fills], what=f"the minimal loop over {tls}")
                    return pace

                return measure

            yield [
                Way(name=MEMCPY, copies="1 copy", measure=lambda: _memcpy(config, arena, sources)),
                Way(name="shm", copies="1 copy", measure=fills("shm")),
                Way(name=STREAM, copies="through the kernel", measure=lambda: _stream(config, process, arena)),
                Way(name="zmq", copies="through the kernel + 1", measure=fills("zmq")),
                Way(name="zmq with CRC", copies="through the kernel + 1", measure=fills("zmq", with_crc=True)),
                *(
                    way
                    for name, tls in UCX_WAYS.items()
                    if has_ucx
                    for way in (
                        Way(name=f"bare {name}", copies=UCX_COPIES[name], measure=bare(tls)),
                        Way(name=name, copies=UCX_COPIES[name], measure=fills(name)),
                    )
                ),
            ]
    finally:
        for receiver in receivers.values():
            receiver.close()
            receiver.forget()
        arena.close()


def _connect(
    process: Teacher, channel: str, backend: str, tls: str | None, receiver: Receiver, arena: SlotArena
) -> None:
    process.start(Open(backend, receiver.describe(), arena.num_slots, arena.slot_bytes, channel=channel, tls=tls))
    while not process.is_done():
        receiver.poll()
        wait_readable(receiver, time.monotonic() + HANG_TIMEOUT_S, what="the bench's teacher")
    process.result()


def _check(arena: SlotArena, sources: Sequence[torch.Tensor], *, what: str) -> None:
    for slot, expected in enumerate(sources):
        if not torch.equal(arena.view(slot, torch.uint8, expected.shape), expected):
            raise TransportError(f"{what}: slot {slot} does not hold what was put")
        arena.poison(slot)


def _memcpy(config: TransportConfig, arena: SlotArena, sources: Sequence[torch.Tensor]) -> Pace:
    slots = [arena.view(slot, torch.uint8, (config.slot_bytes,)) for slot in range(config.depth)]
    clock = _Clock()
    for number in range(config.fills):
        slot = number % config.depth
        ctypes.memmove(slots[slot].data_ptr(), sources[slot].data_ptr(), config.slot_bytes)
    clock.stop()
    return clock.pace(config)


def _stream(config: TransportConfig, process: Teacher, arena: SlotArena) -> Pace:
    slots = [arena.buffer(slot)[: config.slot_bytes] for slot in range(config.depth)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        process.start(Stream((host, port), config.fills))
        connection, _ = listener.accept()
    with connection:
        clock = _Clock()
        for number in range(config.fills):
            left = slots[number % config.depth]
            while left:
                num_bytes = connection.recv_into(left)
                if num_bytes == 0:
                    raise TransportError("the bare socket ended early")
                left = left[num_bytes:]
        clock.stop()
        connection.send(b"!")
    return clock.pace(config, teacher_cpu_s=process.result())


def _fills(
    config: TransportConfig, process: Teacher, backend: str, receiver: Receiver, arena: SlotArena, *, with_crc: bool
) -> Pace:
    process.start(Put(backend, config.fills, with_crc))
    clock = _Clock()
    num_asked = num_arrived = 0
    while num_arrived < config.fills:
        while num_asked < config.fills and num_asked - num_arrived < config.depth:
            slot = num_asked % config.depth
            receiver.arm(FillId(num_asked, 1, slot), num_bytes=config.slot_bytes)
            os.write(process.credits_fd, b"!")
            num_asked += 1
        for arrival in receiver.wait(timeout_s=HANG_TIMEOUT_S):
            data = arena.buffer(arrival.fill.slot)[: arrival.num_bytes]
            if with_crc and crc32c.crc32c(data).to_bytes(4, "little") != arrival.header:
                raise TransportError(f"{arrival.fill} arrived damaged")
            num_arrived += 1
    clock.stop()
    while not process.is_done():  # acknowledgements still have to leave
        receiver.poll()
    return clock.pace(config, teacher_cpu_s=process.result())


def _bare(config: TransportConfig, process: Teacher, tls: str, arena: SlotArena) -> Pace:
    slots = [arena.buffer(slot)[: config.slot_bytes] for slot in range(config.depth)]
    worker = bare_worker(tls)
    try:
        process.start(Bare(tls, worker.address(), config.fills))
        clocks: list[_Clock] = []
        bare_receive(worker, slots, config.fills, on_begin=lambda: clocks.append(_Clock()))
        clocks[0].stop()
        while not process.is_done():  # it has to learn that all was fetched
            progress(worker)
    finally:
        worker.close()
    return clocks[0].pace(config, teacher_cpu_s=process.result())


class _Clock:
    """Times the student's side of one way, from its making to `stop`."""

    def __init__(self) -> None:
        self._begin_s, self._begin_cpu_s, self._begin_queued_s = time.perf_counter(), cpu_s(), queued_s()

    def stop(self) -> None:
        self._wall_s = time.perf_counter() - self._begin_s
        self._cpu_s = cpu_s() - self._begin_cpu_s
        self._queued_s = queued_s() - self._begin_queued_s

    def pace(self, config: TransportConfig, *, teacher_cpu_s: float = 0.0) -> Pace:
        moved_gb = config.fills * config.slot_bytes / 1e9
        return Pace(
            gb_per_s=moved_gb / self._wall_s,
            cpu_s_per_gb=(self._cpu_s + teacher_cpu_s) / moved_gb,
            queued_frac=self._queued_s / self._wall_s,
        )


if __name__ == "__main__":
    sys.exit(main())
