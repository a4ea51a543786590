"""`python -m bench loss`: time and memory of the fused loss, against its floor, other libraries and the full logits.

One thread. Every round times each way once, in turn, in CPU seconds; figures are medians over rounds of ratios within a
round, so that a machine that slows down for a while slows all of them. Peak memory is that of a fresh process for each
way. Time is linear in rows, and so is the full loss's memory: both are measured on a part of the rows, by default.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.loss_memory import extra_bytes
from bench.loss_plot import plot
from bench.loss_ways import FLOOR, FULL, LIGER, WAYS, Inputs, LossCase, Way, predicted
from bench.outputs import check_outputs
from bench.records import RECORDS_DIR, Check, Record, Setting, Spread, write_record
from bench.report import console, exit_code, print_checks
from ring.command import flag, parse, run, set_up_logging
from ring.core.errors import ConfigError

PROG = "bench.loss"
TIME_MARGIN, MEMORY_MARGIN = 1.15, 1.05


@dataclass(frozen=True, kw_only=True)
class Target:
    """What one of ours is held against at the default sizes: time over the floor's and Liger's, their memory over
    ours."""

    over_floor: float
    over_liger: float
    liger_memory: float
    full_memory: float


TARGETS = {
    "keep, fast, FKL": Target(over_floor=1.20, over_liger=0.85, liger_memory=13, full_memory=80),
    "keep, fast, JSD": Target(over_floor=1.30, over_liger=0.87, liger_memory=13, full_memory=80),
    "keep, fp32 logits, JSD": Target(over_floor=1.8, over_liger=1.2, liger_memory=13, full_memory=80),
    "recompute, fast, FKL": Target(over_floor=1.85, over_liger=1.35, liger_memory=35, full_memory=240),
    "recompute, fast, JSD": Target(over_floor=2.7, over_liger=1.8, liger_memory=35, full_memory=240),
}
#: The sizes that the targets are for.
TARGET_CASE = LossCase(rows=2048, vocab_size=151_936, student_hidden=1024, teacher_hidden=2048, dtype="bf16")
QUICK_CASE = LossCase(rows=64, vocab_size=2000, student_hidden=32, teacher_hidden=48, dtype="bf16")
#: What --all adds: the other vocabularies and row counts, and float32.
OTHER_SIZES = ((512, 32_000), (1024, 151_936), (512, 248_320))
#: In --all only: they take long, and no target is about them.
SLOW_WAYS = ("Liger, eager", "TRL, chunked")
#: Rows at which keep's memory is measured: two windows.
KEEP_ROWS = 256
#: Rows that the full loss is timed on; at 2048 it would hold 14 GB.
FULL_TIMED_ROWS = 512
#: What --quick leaves out: they are the same code as others.
SIMILAR_WAYS = ("keep, fast, FKL", "keep, fp32 logits, JSD", "recompute, fast, FKL")


@dataclass(frozen=True, kw_only=True)
class LossBenchConfig:
    """Raises ConfigError on construction: a value out of its range."""

    rounds: int = flag(5, "rounds; figures are medians over them")
    timed_rows: int = flag(512, "rows that are timed; at most those of the case")
    memory_rows: int = flag(1024, "rows whose memory is measured; at most those of the case")
    peers: bool = flag(True, "measure Liger and TRL too, where they are installed (extra `peers`)")
    all: bool = flag(False, "also other sizes, float32, and the slow ways (hours on one core)")
    quick: bool = flag(False, "a tiny size, to see that it runs; held against no target")
    plot: str = flag("", "also draw the figures into this file (needs the extra `report`)", metavar="FILE")
    out: str = flag(str(RECORDS_DIR), "where the record is written", metavar="DIR")
    debug: bool = flag(False, "log more, and print tracebacks")

    def __post_init__(self) -> None:
        for name in ("rounds", "timed_rows", "memory_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be >= 1, got {getattr(self, name)}")
        if self.quick and self.all:
            raise ConfigError("--quick and --all: got both; allowed: one of them")


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One way in one case. cpu_s: a call, by round. extra_bytes: beside dX and one dW, of the case's rows.
    conversion_bytes: what handing dW to autograd in the weight's dtype adds to the peak."""

    cpu_s: tuple[float, ...]
    extra_bytes: float
    conversion_bytes: float


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 1 if a figure is beyond 1.15 x (time) or 1.05 x (memory) its target, 2 for
    bad usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    code = 0

    def command() -> None:
        nonlocal code
        config = parse(LossBenchConfig, arguments, prog=PROG, description=(__doc__ or "").split("\n")[0])
        if config.debug:
            set_up_logging(debug=True)
        code = bench(config, console())

    return run(command, prog=PROG, debug="--debug" in arguments) or code


def bench(config: LossBenchConfig, out: Console) -> int:
    """Measure, print, record; returns the exit code. Raises DisaggKDError."""
    check_outputs(out=config.out, plot=config.plot)
    records, drawn = [], _cases(config)[0]
    bars: list[tuple[str, float, float]] = []
    with one_thread():
        for case in _cases(config):
            ways, absent = _ways(config)
            figures = measure(config, case, ways)
            record = _record(config, case, figures, absent)
            records.append(record)
            _print(out, case, figures, record)
            path = write_record(record, directory=Path(config.out))
            out.print(f"record: {path}", highlight=False)
            if case == drawn:
                bars = [(name, _ratio(figures, name, FLOOR), found.extra_bytes) for name, found in figures.items()]
    if config.plot:
        title = f"{drawn.dtype}, {drawn.vocab_size:,} columns, {drawn.rows} rows"
        plot(bars, title=title, path=Path(config.plot))
        out.print(f"plot: {config.plot}", highlight=False)
    return max(exit_code(record.checks) for record in records)


def _cases(config: LossBenchConfig) -> list[LossCase]:
    if config.quick:
        return [QUICK_CASE]
    if not config.all:
        return [TARGET_CASE]
    sizes = [replace(TARGET_CASE, rows=rows, vocab_size=columns) for rows, columns in OTHER_SIZES]
    return [TARGET_CASE, *sizes, *(replace(case, dtype="fp32") for case in (TARGET_CASE, *sizes))]


def _ways(config: LossBenchConfig) -> tuple[list[Way], list[str]]:
    """What is measured, and why the rest is not."""
    left_out = SIMILAR_WAYS if config.quick else () if config.all else SLOW_WAYS
    wanted = [way for way in WAYS.values() if way.name not in left_out]
    absent = []
    for way in list(wanted):
        if way.package is not None and not config.peers:
            absent.append(f"{way.name}: not asked for (--peers false)")
        elif not way.is_installed:
            absent.append(f"{way.name}: not installed; pip install --no-deps {way.package}")
        else:
            continue
        wanted.remove(way)
    return wanted, absent


def measure(config: LossBenchConfig, case: LossCase, ways: Sequence[Way]) -> dict[str, Figures]:
    """Every way's figures. Raises MeasurementFailed."""
    measured = [way for way in ways if way.name != FLOOR]
    rows = min(config.memory_rows, case.rows)
    # Peaks don't mind company, times do.
    with ThreadPoolExecutor(max_workers=2) as pool:
        found = pool.map(lambda way: _memory(way, case, rows), measured)
        memory = {way.name: peak for way, peak in zip(measured, found, strict=True)}
    times = _times(config, replace(case, rows=min(config.timed_rows, case.rows)), ways)
    figures = {}
    for way in ways:
        extra, conversion = memory.get(way.name, (0.0, 0.0))
        cpu_s = tuple(times[way.name])
        figures[way.name] = Figures(cpu_s=cpu_s, extra_bytes=extra, conversion_bytes=conversion)
    return figures


def _times(config: LossBenchConfig, case: LossCase, ways: Sequence[Way]) -> dict[str, list[float]]:
    whole = Inputs(case)
    few_rows = min(case.rows, FULL_TIMED_ROWS)
    few = whole if few_rows == case.rows else Inputs(replace(case, rows=few_rows))
    steps = {way.name: (way.start(inputs), inputs) for way in ways for inputs in [few if way.name == FULL else whole]}
    times: dict[str, list[float]] = {name: [] for name in steps}
    if LIGER in steps:
        _cpu_s(*steps[LIGER])  # compiles
    for _ in range(config.rounds):
        for name, (step, inputs) in steps.items():
            times[name].append(_cpu_s(step, inputs) * case.rows / inputs.case.rows)
    return times


def _cpu_s(step: Callable[[], None], inputs: Inputs) -> float:
    inputs.forget_gradients()
    gc.collect()
    begin_s = time.process_time()
    step()
    took_s = time.process_time() - begin_s
    inputs.forget_gradients()
    return took_s


def _memory(way: Way, case: LossCase, rows: int) -> tuple[float, float]:
    """(beside dX and one dW, what its conversion adds) for the rows of the case."""
    # What keep holds does not grow with rows once a few windows were filled.
    part = replace(case, rows=min(rows, KEEP_ROWS) if way.mode == "keep" else rows)
    if way.name == FULL:
        # Everything that it holds beside the gradients is rows x columns.
        part = replace(case, rows=max(rows // 2, 1))
    gradients_bytes = part.hidden_gradient_bytes + part.weight_gradient_bytes(way.summed_bytes(case))
    handed_bytes = extra_bytes(way, part, handed_over=True) - gradients_bytes
    if way.name == FULL:
        return handed_bytes * case.rows / part.rows, 0.0
    if way.mode is None:
        return float(handed_bytes), 0.0
    # recompute adds straight into the gradient that was there; keep sums a dW of its own first.
    own_bytes = part.hidden_gradient_bytes if way.mode == "recompute" else gradients_bytes
    kept_bytes = extra_bytes(way, part, handed_over=False) - own_bytes
    return float(kept_bytes), float(max(handed_bytes - kept_bytes, 0))


def _ratio(figures: dict[str, Figures], name: str, base: str) -> float:
    """Median over rounds of the ratio of times within a round."""
    pairs = zip(figures[name].cpu_s, figures[base].cpu_s, strict=True)
    return Spread.of([own / other for own, other in pairs]).median


def _record(config: LossBenchConfig, case: LossCase, figures: dict[str, Figures], absent: Sequence[str]) -> Record:
    settings: dict[str, Setting] = asdict(case)
    settings |= {"timed_rows": min(config.timed_rows, case.rows), "memory_rows": min(config.memory_rows, case.rows)}
    measured: dict[str, Spread] = {}
    forecast: dict[str, float] = {}
    for name, found in figures.items():
        measured[f"{name}: cpu_s"] = Spread.of(found.cpu_s)
        if name != FLOOR:
            measured[f"{name}: extra_bytes"] = Spread.of([found.extra_bytes])
            measured[f"{name}: conversion_bytes"] = Spread.of([found.conversion_bytes])
        if WAYS[name].mode is not None:
            forecast |= {f"{name}: {what}": value for what, value in predicted(WAYS[name], case).items()}
    return Record(
        bench="loss",
        case=f"{case.dtype}, V = {case.vocab_size}, N = {case.rows}",
        settings=settings,
        measured=measured,
        bytes_moved=0,
        predicted=forecast,
        checks=tuple(_checks(case, figures)),
        notes=tuple(absent),
    )


def _checks(case: LossCase, figures: dict[str, Figures]) -> Iterator[Check]:
    for name, target in TARGETS.items():
        if name not in figures:
            continue
        own = figures[name]
        for base, wanted in ((FLOOR, target.over_floor), (LIGER, target.over_liger)):
            if base in figures:
                what = f"{name}: time over {base}"
                yield _check(case, what, _ratio(figures, name, base), wanted, TIME_MARGIN, at_most=True)
        for base, wanted in ((LIGER, target.liger_memory), (FULL, target.full_memory)):
            if base in figures:
                times = figures[base].extra_bytes / max(own.extra_bytes, 1.0)
                yield _check(case, f"{name}: memory of {base} over it", times, wanted, MEMORY_MARGIN, at_most=False)


def _check(case: LossCase, name: str, measured: float, target: float, margin: float, *, at_most: bool) -> Check:
    if case != TARGET_CASE:
        return Check(name=name, measured=measured)
    limit = target * margin if at_most else target / margin
    return Check(name=name, measured=measured, target=target, limit=limit, at_most=at_most)


def _print(out: Console, case: LossCase, figures: dict[str, Figures], record: Record) -> None:
    title = f"{record.case}, Hs = {case.student_hidden}, Ht = {case.teacher_hidden}; one thread"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("way")
    heads = ("CPU s", "x floor", "x Liger", "extra MB", "conversion", "forecast", "x floor")
    for name in heads:
        table.add_column(name, justify="right")
    for name, found in figures.items():
        liger = f"{_ratio(figures, name, LIGER):.2f}" if LIGER in figures else "-"
        memory = ("-", "-") if name == FLOOR else (_megabytes(found.extra_bytes), _megabytes(found.conversion_bytes))
        foretold = ("-", "-")
        if WAYS[name].mode is not None:
            workspace_bytes = record.predicted[f"{name}: workspace_bytes"]
            foretold = (_megabytes(workspace_bytes), f"{record.predicted[f'{name}: flops_over_floor']:.2f}")
        cpu_s = f"{Spread.of(found.cpu_s).median:.3g}"
        table.add_row(name, cpu_s, f"{_ratio(figures, name, FLOOR):.2f}", liger, *memory, *foretold)
    out.print(table)
    for note in record.notes:
        out.print(note, highlight=False)
    print_checks(out, "loss", record.checks)


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.0f}" if num_bytes >= 1e7 else f"{num_bytes / 1e6:.1f}"


@contextmanager
def one_thread() -> Iterator[None]:
    """torch's own threads: one, and what it was afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


if __name__ == "__main__":
    sys.exit(main())
