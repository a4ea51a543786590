"""Virtual time: what is to happen, in order; and processes, which may be stopped, go on, or die at any moment."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from random import Random

Do = Callable[[], None]


class Violation(AssertionError):
    """The system broke a promise, or did something that a real shell could not carry out."""


class Clock:
    """Events in order of their time; those of one time in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Do]] = []
        self._num_scheduled = 0

    def at(self, at_s: float, do: Do) -> None:
        self._num_scheduled += 1
        heapq.heappush(self._events, (max(at_s, self.now_s), self._num_scheduled, do))

    def after(self, delay_s: float, do: Do) -> None:
        self.at(self.now_s + delay_s, do)

    def step(self) -> bool:
        """Let the next event happen; False: there is none."""
        if not self._events:
            return False
        self.now_s, _, do = heapq.heappop(self._events)
        do()
        return True


class Process:
    """One life of a process. Whatever concerns it goes through `deliver`; `settle` is called after each such event.

    While it is stopped, as by SIGSTOP, all of that waits, its own timers and work included; when it goes on, everything
    happens at once: in order for each source, in any order among them. A dead one hears nothing any more.
    """

    def __init__(self, clock: Clock, name: str) -> None:
        self.clock = clock
        self.name = name
        self.alive = True
        self.stopped = False
        self._waiting: dict[str, deque[Do]] = {}
        self._timer_s: float | None = None

    def settle(self) -> None:
        """What follows from any event."""
        raise NotImplementedError

    def on_timer(self) -> None:
        """Called when `wake_at` has come."""
        raise NotImplementedError

    def deliver(self, do: Do, *, source: str = "self") -> None:
        if not self.alive:
            return
        if self.stopped:
            self._waiting.setdefault(source, deque()).append(do)
            return
        do()
        if self.alive:
            self.settle()

    def later(self, delay_s: float, do: Do, *, source: str = "self") -> None:
        """Own work that takes that long."""
        self.clock.after(delay_s, lambda: self.deliver(do, source=source))

    def wake_at(self, at_s: float | None) -> None:
        """Have `on_timer` called at `at_s`, or earlier if an earlier time was asked for before."""
        if at_s is None or (self._timer_s is not None and self._timer_s <= at_s):
            return
        self._timer_s = at_s
        self.clock.at(at_s, lambda: self.deliver(lambda: self._ring(at_s), source="timer"))

    def stop(self) -> None:
        self.stopped = True

    def go_on(self, rng: Random) -> None:
        if not self.alive or not self.stopped:
            return
        self.stopped = False
        while self._waiting and not self.stopped:
            source = rng.choice(sorted(self._waiting))
            do = self._waiting[source].popleft()
            if not self._waiting[source]:
                del self._waiting[source]
            self.deliver(do, source=source)

    def die(self) -> None:
        self.alive = False
        self._waiting.clear()

    def _ring(self, at_s: float) -> None:
        if self._timer_s == at_s:
            self._timer_s = None
            self.on_timer()
