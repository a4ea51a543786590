"""Before each microbatch the ranks agree: ready, lost or stop. So none ever waits in a collective for one that left.

A rank that still waits for its teacher says so, several times a second: the others then wait with it, instead of in a
collective whose time-out would have to be as long as a teacher may take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from student.parallel.ranks import Ranks


class Standing(IntEnum):
    """How a rank stands before a microbatch; of several ranks the highest decides."""

    READY = 0
    WAITING = 1
    STOPPING = 2
    LOST = 3


@dataclass(frozen=True)
class Verdict:
    """What the ranks agreed on. `signal`: the number that asked for the end, where one did. `lost`: ranks without a
    teacher, and the exit code that each of them ends with."""

    standing: Standing
    signal: int
    lost: tuple[tuple[int, int], ...]


def agree(ranks: Ranks, standing: Standing, *, signal: int = 0, exit_code: int = 0) -> Verdict:
    """One round of words among all ranks. exit_code: of what was lost. Raises RankLost."""
    return decide(ranks.gather([int(standing), signal, exit_code]))


def decide(rows: Sequence[Sequence[int]]) -> Verdict:
    """What follows from each rank's standing, signal and exit code.

    STOPPING counts only while some rank waits: when all are ready, the step is finished first."""
    standings = [Standing(row[0]) for row in rows]
    signals = [row[1] for row in rows if row[1]]
    highest = max(standings)
    if highest == Standing.WAITING and signals:
        highest = Standing.STOPPING
    lost = tuple((rank, row[2]) for rank, row in enumerate(rows) if row[0] == Standing.LOST)
    return Verdict(highest, signals[0] if signals else 0, lost)
