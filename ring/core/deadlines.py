"""Deadlines in time that others tell: many of one length, and the time for which nobody serves the student."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Deadlines(Generic[K]):
    """Deadlines that all lie `period_s` after their start, so that the order of starting is the order of ending.

    Time never runs backwards here: the machines see to it.
    """

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._deadline_s: OrderedDict[K, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._deadline_s)

    def start(self, key: K, now_s: float) -> None:
        """Set or put off the deadline of `key`."""
        self._deadline_s[key] = now_s + self._period_s
        self._deadline_s.move_to_end(key)

    def put_off(self, by_s: float, now_s: float) -> None:
        """All of them; none further than if it started now."""
        for key, deadline_s in self._deadline_s.items():
            self._deadline_s[key] = min(deadline_s + by_s, now_s + self._period_s)

    def stop(self, key: K) -> None:
        self._deadline_s.pop(key, None)

    def first_s(self) -> float | None:
        return next(iter(self._deadline_s.values()), None)

    def pop_due(self, now_s: float) -> K | None:
        """Take out the key whose deadline passed first, at exactly its time or later; None if none did."""
        for key, deadline_s in self._deadline_s.items():
            if now_s >= deadline_s:
                del self._deadline_s[key]
                return key
            break
        return None


class UnservedClock:
    """Adds up the time for which work waited and no replica served it; an accepted fill sets it back to zero.

    It adds up because replicas that come and go without ever filling a slot must not put the end off for ever. While it
    runs somebody has to look every `look_interval_s`: time in which nobody did is not counted.
    """

    def __init__(self, timeout_s: float, *, look_interval_s: float) -> None:
        self._timeout_s, self._look_interval_s = timeout_s, look_interval_s
        self._look_s = 0.0
        self._before_s = 0.0
        self._since_s: float | None = None

    def set_running(self, running: bool, now_s: float) -> None:
        if running and self._since_s is None:
            self._since_s = now_s
            self.looked(now_s)
        elif not running and self._since_s is not None:
            self._before_s += now_s - self._since_s
            self._since_s = None

    def looked(self, now_s: float) -> None:
        self._look_s = now_s + self._look_interval_s

    def look_s(self) -> float | None:
        """When somebody is to look at the latest; None while the clock stands."""
        return None if self._since_s is None else self._look_s

    def excuse(self, now_s: float, *, tolerance_s: float) -> None:
        """If nobody looked for longer than that beyond its time, the clock stood meanwhile."""
        if self._since_s is not None and now_s - self._look_s >= tolerance_s:
            self._since_s = min(self._since_s + now_s - self._look_s, now_s)
            self._look_s = now_s

    def reset(self) -> None:
        self._before_s = 0.0
        self._since_s = None

    def deadline_s(self) -> float | None:
        """When the time is over if nothing changes; None while the clock stands."""
        return None if self._since_s is None else self._since_s + (self._timeout_s - self._before_s)

    def unserved_s(self, now_s: float) -> float:
        return self._before_s + (0.0 if self._since_s is None else now_s - self._since_s)
