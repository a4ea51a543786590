"""`python -m bench ranks`: what many ranks cost: a step and its loss cut over them, and a ring for each of them.

Steps and losses: the same work by one process, by several side by side that exchange nothing, and by several that do
(`bench.ranks_step`). Rings: synthetic teachers that compute nothing fill the rings of several trainer processes, which
release each slot at once; CPU time of a fill must not grow with ranks and replicas (`bench.ranks_ring`). A machine with
fewer cores than processes measures its scheduler as well: the record says how many there were.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import ranks_ring, ranks_step
from bench.outputs import check_outputs
from bench.processes import sigterm_interrupts
from bench.ranks_plot import plot
from bench.ranks_ring import RingCase, RingTimes, RingWork
from bench.ranks_step import Times, Work
from bench.records import RECORDS_DIR, Check, Record, Spread, write_record
from bench.report import console, exit_code, figure, print_checks
from ring.command import flag, parse, run
from ring.core.errors import ConfigError

PROG = "bench.ranks"
RINGS = tuple(
    RingCase(ranks=ranks, replicas=replicas)
    for ranks, replicas in ((1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 8), (4, 1), (4, 4), (4, 8))
)
QUICK_RINGS = (RingCase(ranks=1, replicas=1), RingCase(ranks=2, replicas=2))
#: CPU time over that of one rank and one replica: what is aimed at, and beyond what the bench fails.
FLAT, NOT_FLAT = 1.25, 2.0
#: A way over the same work side by side, without exchange. Where cores are scarce what carries the exchange has none of
#: its own, so that these fail nothing.
EXCHANGE = 1.25


@dataclass(frozen=True, kw_only=True)
class RanksBenchConfig:
    """Raises ConfigError on construction: a value out of its range."""

    ranks: int = flag(2, "processes that share a step, and the heads of the loss")
    rows: int = flag(512, "rows of each of them in the loss, and of a fill")
    hidden_size: int = flag(512, "elements of a state, in the loss and in a fill")
    vocab_size: int = flag(32768, "columns of both heads of the loss")
    batch_size: int = flag(8, "sequences of a step, of all ranks together")
    rounds: int = flag(7, "times that each is measured")
    fills: int = flag(400, "fills that each ring takes in a round")
    quick: bool = flag(False, "one round of few fills, to see that it runs")
    plot: str = flag("", "also draw the figures into this file (needs the extra `report`)", metavar="FILE")
    out: str = flag(str(RECORDS_DIR), "where the record is written", metavar="DIR")
    debug: bool = flag(False, "print tracebacks")

    def __post_init__(self) -> None:
        for name in ("rows", "hidden_size", "vocab_size", "rounds", "fills"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be >= 1, got {getattr(self, name)}")
        if self.ranks < 2:
            raise ConfigError(f"--ranks must be >= 2, got {self.ranks}")
        if self.batch_size < 1 or self.batch_size % self.ranks:
            raise ConfigError(f"--batch-size {self.batch_size}: allowed: a multiple of the {self.ranks} ranks")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 1 if it failed or a figure is beyond its limit, 2 for bad usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    code = 0

    def command() -> None:
        nonlocal code
        config = parse(RanksBenchConfig, arguments, prog=PROG, description=(__doc__ or "").split("\n")[0])
        with sigterm_interrupts():
            code = bench(config, console())

    return run(command, prog=PROG, debug="--debug" in arguments) or code


def bench(config: RanksBenchConfig, out: Console) -> int:
    """Measure, print, record; returns the exit code. Raises ConfigError, TeacherFailed, RankFailed."""
    check_outputs(out=config.out, plot=config.plot)
    rounds, fills = (1, 20) if config.quick else (config.rounds, config.fills)
    rings = QUICK_RINGS if config.quick else RINGS
    steps = ranks_step.measure(
        Work(
            ranks=config.ranks,
            rounds=rounds,
            rows=config.rows,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            batch_size=config.batch_size,
        )
    )
    of_rings = ranks_ring.measure(
        RingWork(cases=rings, rounds=rounds, rows=config.rows, hidden_size=config.hidden_size, fills=fills)
    )
    step_checks, ring_checks = checks_of_steps(config, steps), checks_of_rings(of_rings)
    record = Record(
        bench="ranks",
        case="steps, losses and rings over ranks",
        settings={
            **{name: getattr(config, name) for name in ("ranks", "rows", "hidden_size", "vocab_size", "batch_size")},
            "rounds": rounds,
            "fills": fills,
            "cpus": len(os.sched_getaffinity(0)),
        },
        measured=_measured(steps, of_rings),
        bytes_moved=sum(case.ranks for case in rings) * rounds * fills * config.rows * config.hidden_size * 2,
        checks=(*step_checks, *ring_checks),
    )
    print_checks(out, f"a step and its loss over {config.ranks} ranks", step_checks)
    _print_rings(out, of_rings)
    print_checks(out, "the rings' CPU time, over that of 1 x 1", ring_checks)
    out.print(f"record: {write_record(record, directory=Path(config.out))}", highlight=False)
    if config.plot:
        plot(steps, of_rings, path=Path(config.plot))
        out.print(f"plot: {config.plot}", highlight=False)
    return exit_code(record.checks)


def checks_of_steps(config: RanksBenchConfig, steps: dict[str, list[Times]]) -> list[Check]:
    """Medians of the ratios within rounds."""

    def ratio(way: str, base: str, what: str) -> float:
        pairs = zip(steps[way], steps[base], strict=True)
        return Spread.of([getattr(ours, what) / getattr(theirs, what) for ours, theirs in pairs]).median

    whole, cut = ranks_step.LOSS_WAYS
    over = f"over {config.ranks} ranks"
    return [
        Check(
            name=f"loss, heads cut {over} / whole heads: time", measured=ratio(cut, whole, "wall_s"), target=EXCHANGE
        ),
        Check(name=f"loss, heads cut {over} / whole heads: CPU", measured=ratio(cut, whole, "cpu_s")),
        *(
            check
            for way in ("summed", "fsdp")
            for check in (
                Check(name=f"step, {way} / apart: time", measured=ratio(way, "apart", "wall_s"), target=EXCHANGE),
                Check(name=f"step, {way} / apart: CPU", measured=ratio(way, "apart", "cpu_s")),
            )
        ),
        *(
            Check(name=f"step, {way} / alone: time", measured=ratio(way, "alone", "wall_s"))
            for way in ("apart", "summed", "fsdp")
        ),
    ]


def checks_of_rings(rings: dict[RingCase, list[RingTimes]]) -> list[Check]:
    """Of each case over one rank and one replica, medians of the ratios within rounds."""
    base, *others = rings
    checks = []
    for case in others:
        for side in ("trainer_cpu_s", "teacher_cpu_s"):
            pairs = zip(rings[case], rings[base], strict=True)
            checks.append(
                Check(
                    name=f"{case.name}: CPU of a fill, {side.partition('_')[0]}",
                    measured=Spread.of([getattr(ours, side) / getattr(theirs, side) for ours, theirs in pairs]).median,
                    unit="x",
                    target=FLAT,
                    limit=NOT_FLAT,
                )
            )
    return checks


def _measured(steps: dict[str, list[Times]], rings: dict[RingCase, list[RingTimes]]) -> dict[str, Spread]:
    found = {}
    for way, times in steps.items():
        found[f"{way}: s"] = Spread.of([one.wall_s for one in times])
        found[f"{way}: cpu_s"] = Spread.of([one.cpu_s for one in times])
    for case, rounds in rings.items():
        for name in ("fills_per_s", "stall_frac", "trainer_cpu_s", "teacher_cpu_s"):
            found[f"{case.name}: {name}"] = Spread.of([getattr(one, name) for one in rounds])
    return found


def _print_rings(out: Console, rings: dict[RingCase, list[RingTimes]]) -> None:
    table = Table(title="rings: ranks x replicas", title_justify="left", title_style="bold")
    table.add_column("case")
    for name in ("fills a second", "of the time waited", "CPU of a fill: trainer", "teacher"):
        table.add_column(name, justify="right")
    for case, rounds in rings.items():

        def median(name: str, rounds: list[RingTimes] = rounds) -> float:
            return Spread.of([getattr(one, name) for one in rounds]).median

        table.add_row(
            case.name,
            f"{median('fills_per_s'):,.0f}",
            figure(median("stall_frac"), "frac"),
            figure(median("trainer_cpu_s"), "s"),
            figure(median("teacher_cpu_s"), "s"),
        )
    out.print(table)


if __name__ == "__main__":
    sys.exit(main())
