"""`python -m bench transport`: how fast the transports fill slots, against what the machine can do without them.

Two processes. In every round, size by size, one after the other: a plain copy of the same bytes into the same slots, a
bare TCP stream received into them, each transport, and where UCX is installed a minimal loop on its own calls and its
own benchmark. shm is held against the copy, zmq against the stream, ucx against the minimal loop over the same of its
transports. Figures are medians over rounds; a ratio is the median of the ratios within a round.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.outputs import check_outputs
from bench.records import RECORDS_DIR, Check, Record, Setting, Spread, write_record
from bench.report import console, exit_code, print_checks
from bench.transport_plot import Line, plot
from bench.transport_teacher import teacher
from bench.transport_ucx import UCX_WAYS
from bench.transport_ways import BASE_OF, MEMCPY, SHM, TRIP_BYTES, ZMQ, Load, Pace, Way, Ways
from ring.command import flag, parse, run, set_up_logging
from ring.core.errors import ConfigError

PROG = "bench.transport"
TARGETS = {SHM: 0.80, ZMQ: 0.85} | dict.fromkeys(UCX_WAYS, 0.85)
#: From this size on the targets hold; below it the round trips of a fill count.
TARGET_BYTES = 4 << 20
#: This far below its target a ratio fails the bench.
MARGIN = 0.15
#: Each size is this many times the one before.
STEP = 4
#: Part of the time that other work had the core of the plain copy, which alone has nobody else to share it with; above
#: it a note says so.
QUIET_FRAC = 0.03

#: By size, then by way, round by round.
Paces = dict[int, dict[str, list[Pace]]]


@dataclass(frozen=True, kw_only=True)
class TransportConfig:
    """Raises ConfigError on construction: a value out of its range."""

    rounds: int = flag(7, "rounds; figures are medians over them")
    round_bytes: int = flag(256 << 20, "bytes that each way moves of each size in a round; at least a ring full")
    min_bytes: int = flag(256 << 10, "bytes of the smallest fills; the next ones have four times as many")
    max_bytes: int = flag(64 << 20, "bytes of the largest fills, and of a slot")
    depth: int = flag(4, "slots of the ring")
    trips: int = flag(500, f"round trips of {TRIP_BYTES} bytes of each way in a round")
    plot: str = flag("", "also draw the figures into this file (needs the extra `report`)", metavar="FILE")
    out: str = flag(str(RECORDS_DIR), "where the records are written", metavar="DIR")
    debug: bool = flag(False, "log more, and print tracebacks")

    def __post_init__(self) -> None:
        for name in ("rounds", "round_bytes", "min_bytes", "depth", "trips"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be >= 1, got {getattr(self, name)}")
        if self.max_bytes < max(self.min_bytes, TRIP_BYTES):
            least = max(self.min_bytes, TRIP_BYTES)
            raise ConfigError(
                f"--max-bytes must be at least --min-bytes and {TRIP_BYTES}: {least}; got {self.max_bytes}"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        sizes = [self.min_bytes]
        while sizes[-1] * STEP <= self.max_bytes:
            sizes.append(sizes[-1] * STEP)
        return tuple(sizes)

    def load(self, num_bytes: int) -> Load:
        return Load(num_bytes=num_bytes, num_fills=max(self.depth, self.round_bytes // num_bytes), depth=self.depth)


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
    check_outputs(out=config.out, plot=config.plot)
    torch.set_num_threads(1)
    slot_bytes = config.sizes[-1]
    with (
        teacher(num_sources=config.depth, source_bytes=slot_bytes) as process,
        closing(Ways(process, depth=config.depth, slot_bytes=slot_bytes)) as opener,
    ):
        ways = list(opener.open())
        paces, trips_s = _measure(config, ways)
    records = [*_fill_records(config, paces), _trip_record(config, trips_s)]
    _print_table(out, config, ways, paces, trips_s)
    checks = [check for record in records for check in record.checks]
    print_checks(out, "against what they are built on", [check for check in checks if check.target is not None])
    for note in sorted({note for record in records for note in record.notes}):
        out.print(f"note: {note}", style="yellow", highlight=False)
    # Before the picture: whatever becomes of that, what was measured is kept.
    for record in records:
        path = write_record(record, directory=Path(config.out))
    out.print(f"records: {path}", highlight=False)
    if config.plot:
        plot(_lines(paces), path=Path(config.plot))
        out.print(f"plot: {config.plot}", highlight=False)
    return exit_code(checks)


def _measure(config: TransportConfig, ways: Sequence[Way]) -> tuple[Paces, dict[str, list[float]]]:
    """(paces, seconds of a round trip by way, round by round)"""
    paces: Paces = {size: {way.name: [] for way in ways} for size in config.sizes}
    trips_s: dict[str, list[float]] = {way.name: [] for way in ways if way.trip_s is not None}
    for way in ways:  # connections, pages and processor clocks warm up
        way.measure(config.load(config.sizes[-1]))
    for _ in range(config.rounds):
        for size in config.sizes:
            for way in ways:
                paces[size][way.name].append(way.measure(config.load(size)))
        for way in ways:
            if way.trip_s is not None:
                trips_s[way.name].append(way.trip_s(config.trips))
    return paces, trips_s


# ---- records ---------------------------------------------------------------------------------------------------------


def _fill_records(config: TransportConfig, paces: Paces) -> Iterator[Record]:
    for size, found in paces.items():
        load = config.load(size)
        yield Record(
            bench="transport",
            case=f"fills of {_mib(size)}",
            settings=_settings(config) | {"fill_bytes": size, "fills": load.num_fills},
            measured={
                **{f"{name} gb_per_s": _speed(of) for name, of in found.items()},
                **{f"{name} cpu_s_per_gb": cpu for name, of in found.items() if (cpu := _cpu(of)) is not None},
            },
            bytes_moved=config.rounds * load.total_bytes * len(found),
            checks=tuple(_checks(size, found)),
            notes=_notes(found),
        )


def _trip_record(config: TransportConfig, trips_s: Mapping[str, list[float]]) -> Record:
    return Record(
        bench="transport",
        case=f"round trips of {TRIP_BYTES} bytes",
        settings=_settings(config),
        measured={f"{name} trip_s": Spread.of(found) for name, found in trips_s.items()},
        bytes_moved=config.rounds * config.trips * TRIP_BYTES * len(trips_s),
    )


def _settings(config: TransportConfig) -> dict[str, Setting]:
    return {name: value for name, value in asdict(config).items() if name not in ("out", "plot", "debug")}


def _checks(size: int, found: Mapping[str, Sequence[Pace]]) -> Iterator[Check]:
    for name, base in BASE_OF.items():
        if name not in found:
            continue
        pairs = zip(found[name], found[base], strict=True)
        target = TARGETS.get(name) if size >= TARGET_BYTES else None
        yield Check(
            name=f"{name} over {base}, {_mib(size)}",
            measured=Spread.of([way.gb_per_s / other.gb_per_s for way, other in pairs]).median,
            target=target,
            limit=None if target is None else target - MARGIN,
            at_most=False,
        )


def _notes(found: Mapping[str, Sequence[Pace]]) -> tuple[str, ...]:
    """What makes these figures less than they claim to be."""
    queued = Spread.of([pace.queued_frac for pace in found[MEMCPY]]).median
    if not queued > QUIET_FRAC:
        return ()
    return ("not quiet: other work had the cores; the times are noise: run it again on an idle machine",)


def _speed(of: Sequence[Pace]) -> Spread:
    return Spread.of([pace.gb_per_s for pace in of])


def _cpu(of: Sequence[Pace]) -> Spread | None:
    known = [pace.cpu_s_per_gb for pace in of if pace.cpu_s_per_gb is not None]
    return Spread.of(known) if known else None


# ---- for people ------------------------------------------------------------------------------------------------------


def _print_table(
    out: Console, config: TransportConfig, ways: Sequence[Way], paces: Paces, trips_s: Mapping[str, list[float]]
) -> None:
    title = f"GB/s by the size of a fill; medians over {config.rounds} rounds"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("way")
    for name in (
        *map(_mib, config.sizes),
        f"CPU s/GB, {_mib(config.sizes[-1])}",
        "copies",
        f"{TRIP_BYTES} B there and back",
    ):
        table.add_column(name, justify="right")
    for way in ways:
        cpu = _cpu(paces[config.sizes[-1]][way.name])
        table.add_row(
            way.name,
            *(f"{_speed(found[way.name]).median:.2f}" for found in paces.values()),
            "-" if cpu is None else f"{cpu.median:.2f}",
            way.copies,
            f"{Spread.of(trips_s[way.name]).median * 1e6:.0f} us" if way.name in trips_s else "-",
        )
    out.print(table)


def _lines(paces: Paces) -> list[Line]:
    names = next(iter(paces.values()))
    return [
        Line(
            name=name,
            is_ours=name in BASE_OF,
            speeds=[(size, _speed(found[name])) for size, found in paces.items()],
            cpu_s_per_gb=_cpu(paces[max(paces)][name]),
        )
        for name in names
    ]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:g} MiB"


if __name__ == "__main__":
    sys.exit(main())
