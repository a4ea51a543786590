"""What a test opened through a helper of its module, and what ends with it also where it fails half-way."""

from __future__ import annotations

from typing import Protocol, TypeVar


class Closable(Protocol):
    def close(self) -> None:
        """Idempotent."""


T = TypeVar("T", bound=Closable)
_opened: list[Closable] = []


def ends_with_its_test(one: T) -> T:
    """tests/conftest.py closes it after the test that is running."""
    _opened.append(one)
    return one


def close_what_was_opened() -> None:
    while _opened:
        _opened.pop().close()
