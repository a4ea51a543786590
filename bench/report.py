"""A bench's figures on the terminal, each beside its target."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.records import Check, Spread

_STYLES = {"met": "green", "missed": "yellow", "failed": "bold red", "reported": "dim"}


def console() -> Console:
    """Where benches print. A pipe or a log gets lines of its own width: nothing in a table is cut off or folded.

    What is printed is text and no markup: `pip install 'disaggkd[ucx]'`, a path with brackets in it."""
    out = Console(markup=False, emoji=False)
    return out if out.is_terminal else Console(markup=False, emoji=False, width=120)


def print_checks(out: Console, title: str, checks: Iterable[Check]) -> None:
    """Each figure, its target, and whether it was met."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("figure")
    for name in ("measured", "target", "fails", "verdict"):
        table.add_column(name, justify="right")
    for check in checks:
        sign = "<=" if check.at_most else ">="
        beyond = ">" if check.at_most else "<"
        table.add_row(
            check.name,
            figure(check.measured, check.unit),
            "-" if check.target is None else f"{sign} {figure(check.target, check.unit)}",
            "-" if check.limit is None else f"{beyond} {figure(check.limit, check.unit)}",
            Text(check.verdict, style=_STYLES[check.verdict]),
        )
    out.print(table)


def print_spreads(out: Console, title: str, rows: Sequence[tuple[str, str, Spread]]) -> None:
    """(name, unit, measurements): the median with what lies around it."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("measured")
    for name in ("median", "p10", "p90", "n"):
        table.add_column(name, justify="right")
    for name, unit, spread in rows:
        values = (spread.median, spread.p10, spread.p90)
        table.add_row(name, *(figure(value, unit) for value in values), str(spread.num))
    out.print(table)


def figure(value: float, unit: str) -> str:
    """For people: seconds and fractions in what reads best, everything else with its unit."""
    if unit == "s":
        return f"{value * 1e3:.2f} ms" if value < 1 else f"{value:.2f} s"
    if unit == "frac":
        return f"{value:.1%}"
    return f"{value:.3f} {unit}".rstrip()


def exit_code(checks: Iterable[Check]) -> int:
    """1 if any figure is beyond its limit, else 0."""
    return int(any(check.verdict == "failed" for check in checks))
