"""One claim of the report: what is said, what was found, and the tables, charts and commands that show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

#: `holds` and `fails`: measured against what the claim says. `open`: reported only, because the claim is no yes or
#: no, or could not be tried here.
Verdict = Literal["holds", "fails", "open"]


#: Characters; what is longer is words.
LONGEST_FIGURE = 24


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under columns, as they are printed. The first column names the row."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def is_text(self, column: int) -> bool:
        """Whether it reads from the left: one that holds a sentence, and the first."""
        return column == 0 or any(len(row[column]) > LONGEST_FIGURE for row in self.rows)


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A picture as SVG text, and the sentence below it."""

    svg: str
    caption: str


@dataclass(frozen=True, kw_only=True)
class Bars:
    """What the overview shows of a section: a bar for each entry of `groups`, stacked from its named parts."""

    title: str
    groups: Mapping[str, Mapping[str, float]]
    unit: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """`claim`: one sentence, as the project states it. `number`: the one figure that a reader takes along; `measured`:
    what it is of, in half a line. `finding`: what was found, in one or two sentences. `facts`: the figures behind it,
    for report.json, with units in their names. `commands`: what was run, to run it again."""

    title: str
    claim: str
    number: str
    measured: str
    finding: str
    verdict: Verdict
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()
    commands: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    overview: Bars | None = None


def mebibytes(num_bytes: float) -> str:
    """For people."""
    return f"{num_bytes / 2**20:,.0f} MiB"


def milliseconds(seconds: float) -> str:
    """For people."""
    return f"{seconds * 1e3:,.0f} ms"
