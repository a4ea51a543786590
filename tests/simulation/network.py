"""Links between students and replicas: each direction delays, and may lose, repeat, reorder, or be cut.

A pipe is one direction of one connection. By its nature, as of TCP, it keeps the order and loses nothing, and what a
cut holds back comes when the cut heals. A flaky one loses, repeats and reorders single messages as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from tests.simulation.clock import Clock, Do, Process


@dataclass(kw_only=True)
class Direction:
    """One way between two machines; the state of all pipes that go along it. `held`: what a cut holds back."""

    name: str
    min_delay_s: float
    max_delay_s: float
    num_cuts: int = 0
    flaky_frac: float = 0.0
    held: list[Do] = field(default_factory=list)

    def heal(self) -> None:
        """One cut less; after the last one, what was held back arrives."""
        self.num_cuts = max(0, self.num_cuts - 1)
        if self.num_cuts:
            return
        held, self.held = self.held, []
        for do in held:
            do()


class Pipe:
    """One direction of one connection, to one process."""

    def __init__(
        self,
        clock: Clock,
        rng: Random,
        direction: Direction,
        target: Process,
        *,
        flaky: bool = False,
        repeats_late: bool = False,
    ) -> None:
        """flaky: whether single messages suffer where the direction is flaky; where not, it behaves like TCP.
        repeats_late: whether a repeated message comes again out of order, or at once."""
        self._clock = clock
        self._rng = rng
        self._direction = direction
        self._target = target
        self._flaky = flaky
        self._repeats_late = repeats_late
        self._last_s = 0.0
        self._ended = False

    def send(self, do: Do, *, unattended: bool = False) -> None:
        """Have `do` happen at the target when the message gets there. unattended: without the target's process, as a
        network adapter writes memory."""
        if self._ended:
            return
        direction = self._direction
        delay_s = self._rng.uniform(direction.min_delay_s, direction.max_delay_s)
        if self._flaky and self._rng.random() < direction.flaky_frac:
            fate = self._rng.choice(("lost", "repeated", "late", "early"))
            if fate == "lost":
                return
            if fate in ("late", "early"):
                # Out of order: overtaken by what follows, or ahead of what went before.
                self._clock.after(delay_s * (20.0 if fate == "late" else 0.5), lambda: self._arrive(do, unattended))
                return
            if self._repeats_late:
                self._clock.after(delay_s * 20.0, lambda: self._arrive(do, unattended))
            else:
                self._schedule(delay_s, do, unattended)
        self._schedule(delay_s, do, unattended)

    def end(self, do: Do) -> None:
        """The last message: the connection was closed or broke. Never lost, but a cut holds it back too."""
        if not self._ended:
            self._schedule(self._direction.min_delay_s, do, False)
            self._ended = True

    def _schedule(self, delay_s: float, do: Do, unattended: bool) -> None:
        self._last_s = max(self._last_s, self._clock.now_s + delay_s)
        self._clock.at(self._last_s, lambda: self._arrive(do, unattended))

    def _arrive(self, do: Do, unattended: bool) -> None:
        if self._direction.num_cuts:
            self._direction.held.append(lambda: self._arrive(do, unattended))
        elif unattended:
            do()
        else:
            self._target.deliver(do, source=self._direction.name)
