"""`python -m bench core`: what the ring's state machines cost a fill, from one replica and student to a thousand.

Real machines on both sides, in virtual time, without I/O: each fill is submitted, asked for, queued, batched, computed,
put, accepted, leased and released. Three ways to grow: as many students as replicas, with eight replicas a student; one
student with many replicas; one replica with many students. The cost should grow with none of them.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.core_fleet import CoreFleet, answer, microbatch
from bench.outputs import check_outputs
from bench.records import RECORDS_DIR, Check, Record, Spread, write_record
from bench.report import console, exit_code, print_checks
from ring.command import flag, parse, run
from ring.core import codec
from ring.core.errors import ConfigError
from ring.core.messages import FillId, Request

PROG = "bench.core"
REPLICAS_A_STUDENT = 8
#: Every way to grow is held against its cost at this size, the first at which each student has its eight replicas.
BASE_SIZE = 10
GROWTH_TARGET, GROWTH_LIMIT = 1.5, 3.0
SIZES = (1, 3, 10, 30, 100, 300, 1000)
QUICK_SIZES = (1, 10, 20)
#: Ways to grow: name -> (students, replicas, replicas a student) at a size.
WAYS: dict[str, Callable[[int], tuple[int, int, int]]] = {
    "8 replicas a student": lambda n: (n, n, min(n, REPLICAS_A_STUDENT)),
    "one student": lambda n: (1, n, n),
    "one replica": lambda n: (n, 1, 1),
}


@dataclass(frozen=True, kw_only=True)
class CoreBenchConfig:
    """Raises ConfigError on construction: a value out of its range."""

    rounds: int = flag(5, "rounds; figures are medians over them")
    fills: int = flag(4000, "fills that are timed in a round, at each size")
    quick: bool = flag(False, "a few sizes and fills, to see that it runs; held against no target")
    plot: str = flag("", "also draw the figures into this file (needs the extra `report`)", metavar="FILE")
    out: str = flag(str(RECORDS_DIR), "where the record is written", metavar="DIR")
    debug: bool = flag(False, "print tracebacks")

    def __post_init__(self) -> None:
        for name in ("rounds", "fills"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} must be >= 1, got {getattr(self, name)}")


Costs = dict[tuple[str, int], list[float]]


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 1 if the cost grows beyond its limit, 2 for bad usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    code = 0

    def command() -> None:
        nonlocal code
        config = parse(CoreBenchConfig, arguments, prog=PROG, description=(__doc__ or "").split("\n")[0])
        code = bench(config, console())

    return run(command, prog=PROG, debug="--debug" in arguments) or code


def bench(config: CoreBenchConfig, out: Console) -> int:
    """Measure, print, record; returns the exit code. Raises ConfigError."""
    check_outputs(out=config.out, plot=config.plot)
    sizes, fills, rounds = (QUICK_SIZES, 50, 1) if config.quick else (SIZES, config.fills, config.rounds)
    costs = measure(sizes, fills=fills, rounds=rounds)
    wire_s, ping_s = codec_cost(fills), keep_alive_cost()
    checks = [] if config.quick else _checks(costs, sizes[-1])
    record = Record(
        bench="core",
        case="cost of a fill",
        settings={"fills": fills, "rounds": rounds, "replicas_a_student": REPLICAS_A_STUDENT},
        measured={
            **{f"{way}, {size}: cpu_s": Spread.of(values) for (way, size), values in costs.items()},
            "codec: cpu_s": Spread.of([wire_s]),
            "ping: cpu_s": Spread.of([ping_s]),
        },
        bytes_moved=0,
        checks=tuple(checks),
    )
    _print(out, costs, sizes, wire_s=wire_s, ping_s=ping_s)
    if checks:
        print_checks(out, "core", checks)
    out.print(f"record: {write_record(record, directory=Path(config.out))}", highlight=False)
    if config.plot:
        plot(costs, sizes, Path(config.plot))
        out.print(f"plot: {config.plot}", highlight=False)
    return exit_code(checks)


def measure(sizes: Sequence[int], *, fills: int, rounds: int) -> Costs:
    """CPU seconds of a fill, by way to grow and size, a value a round. Rounds interleave, so that a machine that slows
    down for a while slows all sizes."""
    fleets = {}
    for way, shape in WAYS.items():
        for size in sizes:
            num_students, num_replicas, links = shape(size)
            fleets[way, size] = CoreFleet(num_students=num_students, num_replicas=num_replicas, links=links)
    costs: Costs = {key: [] for key in fleets}
    # What all of them hold is not garbage: looking through it again and again would be charged to the fills.
    gc.collect()
    gc.freeze()
    for (_, size), fleet in fleets.items():
        fleet.run(10 * size)  # as the queues are from then on
    for _ in range(rounds):
        for key, fleet in fleets.items():
            costs[key].append(fleet.run(fills))
    gc.unfreeze()
    return costs


def codec_cost(num: int) -> float:
    """CPU seconds of a fill's control traffic: its request and its header, encoded and decoded."""
    payload, _ = microbatch(1)
    request = Request(fill=FillId(1, 0, 1), payload=payload, time_left_s=60.0)
    header = answer("s0", "r0", request)
    begin_s = time.process_time()
    for _ in range(num):
        codec.decode(codec.encode(request))
        codec.decode_header(codec.encode_header(header))
    return (time.process_time() - begin_s) / num


def keep_alive_cost() -> float:
    """CPU seconds of one ping and its answer, at the student: each replica takes one a second."""
    return CoreFleet(num_students=1, num_replicas=100, links=100, pings=True).keep_alive(60.0)


def _checks(costs: Costs, size: int) -> list[Check]:
    """How much more a fill costs at the largest size: medians over rounds of ratios within a round."""
    checks = []
    for way in WAYS:
        ratios = [large / base for large, base in zip(costs[way, size], costs[way, BASE_SIZE], strict=True)]
        name = f"{way}: a fill at {size} over one at {BASE_SIZE}"
        growth = Spread.of(ratios).median
        checks.append(Check(name=name, measured=growth, unit="x", target=GROWTH_TARGET, limit=GROWTH_LIMIT))
    return checks


def _print(out: Console, costs: Costs, sizes: Sequence[int], *, wire_s: float, ping_s: float) -> None:
    table = Table(title="CPU time of a fill, both sides, us", title_justify="left", title_style="bold")
    table.add_column("replicas or students")
    for way in WAYS:
        table.add_column(way, justify="right")
    for size in sizes:
        table.add_row(str(size), *(f"{1e6 * Spread.of(costs[way, size]).median:.1f}" for way in WAYS))
    out.print(table)
    out.print(f"encoding and decoding its request and header: {1e6 * wire_s:.1f} us", highlight=False)
    out.print(f"one ping, once a second for each replica: {1e6 * ping_s:.1f} us", highlight=False)


def plot(costs: Costs, sizes: Sequence[int], path: Path) -> None:
    """The cost of a fill over the size, a line for each way to grow; the file's suffix says the format.

    Raises ConfigError: matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib; pip install -e '.[report]' in a clone of DisaggKD") from error
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for way, color in zip(WAYS, ("#2a6f97", "#c1666b", "#7a9e7e"), strict=True):
        spreads = [Spread.of(costs[way, size]) for size in sizes]
        axes.plot(sizes, [1e6 * s.median for s in spreads], marker="o", label=way, color=color)
        axes.fill_between(
            sizes, [1e6 * s.low for s in spreads], [1e6 * s.high for s in spreads], alpha=0.15, color=color
        )
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("replicas or students")
    axes.set_ylabel("CPU time of a fill, us")
    axes.set_title("What the ring's state machines cost a fill, both sides")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
