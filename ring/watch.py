"""Whom a turn of the pump looks at: replicas with news, so that a turn does not cost the more the more have none."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterable, Sequence

#: A replica that nothing was heard of is looked at this often all the same: some of what ends a link has no descriptor.
LOOK_AT_ALL_S = 1.0
#: Who the descriptors are of that are no replica's.
_OTHERS = ""


class Watch:
    """Waits for descriptors of many owners. Not thread-safe."""

    def __init__(self) -> None:
        self._poller = select.poll()
        self._fds: dict[str, frozenset[int]] = {}
        self._owners: dict[int, str] = {}

    def watch(self, owner: str, fds: Iterable[int]) -> None:
        """What its owner is to be told of from now on. What it had before may have been closed, and its numbers be
        somebody else's by now."""
        wanted, known = frozenset(fds), self._fds.get(owner, frozenset())
        for fd in known - wanted:
            if self._owners.get(fd) == owner:
                del self._owners[fd]
                self._poller.unregister(fd)
        for fd in wanted:
            if self._owners.get(fd) != owner:
                self._owners[fd] = owner
                self._poller.register(fd, select.POLLIN)
        self._fds[owner] = wanted

    def wait(self, *, timeout_s: float) -> set[str]:
        """Who has news, once anybody has any or the time is over. A descriptor that was closed is news of its owner."""
        # Rounded up: a poll that ends a moment before a deadline would only spin.
        ready = self._poller.poll(max(0.0, timeout_s) * 1e3 + 1)
        return {self._owners[fd] for fd, _ in ready}


class Attention:
    """Which replicas may have news. Not thread-safe."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._watch = Watch()
        self._due: set[str] = set()
        self._moved = set(self._names)
        self._look_at_all_s = 0.0

    @property
    def is_needed(self) -> bool:
        """Whether somebody is to be looked at before anybody sleeps."""
        return bool(self._due)

    def call(self, name: str) -> None:
        """To be looked at: it was told something (what wakes a link may go unseen while it is written to), or there may
        be more of what it had."""
        self._due.add(name)

    def take(self, *, now_s: float) -> set[str]:
        """Who is to be looked at now, if nobody calls again."""
        if now_s >= self._look_at_all_s:
            self._look_at_all_s = now_s + LOOK_AT_ALL_S
            self._due.update(self._names)
        due, self._due = self._due, set()
        return due

    def moved(self, name: str) -> None:
        """Its descriptors may be others than before: it was looked at, or ended."""
        self._moved.add(name)

    def sleep(self, *, timeout_s: float, fds_of: Callable[[str], Iterable[int]], others: Sequence[int]) -> None:
        """Until somebody has news, or there is any on `others`, or the time is over; no longer than LOOK_AT_ALL_S.

        fds_of: asked only of those that were `moved`."""
        for name in self._moved:
            self._watch.watch(name, fds_of(name))
        self._moved.clear()
        self._watch.watch(_OTHERS, others)
        self._due |= self._watch.wait(timeout_s=min(timeout_s, LOOK_AT_ALL_S)) & self._names
