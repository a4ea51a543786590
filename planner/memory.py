"""Memory of one device as terms that live at moments: the peak is the largest moment, not the sum of everything.

A term has a name, bytes, and the formula it came from with its numbers put in, so that a plan can explain itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from planner.architecture import Params


@dataclass(frozen=True)
class Term:
    """One use of memory. Terms of the same name at several moments are the same thing, larger or smaller."""

    name: str
    num_bytes: int
    formula: str


@dataclass(frozen=True)
class Moment:
    """What is there at one time of a step."""

    name: str
    terms: tuple[Term, ...]

    @property
    def num_bytes(self) -> int:
        return sum(term.num_bytes for term in self.terms)


@dataclass(frozen=True)
class DeviceMemory:
    """All moments of a step, on one device."""

    moments: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        """The moment that decides."""
        return max(self.moments, key=lambda moment: moment.num_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.peak.num_bytes

    @property
    def bound(self) -> tuple[Term, ...]:
        """Every term at its largest: an allocator that reused nothing would need their sum."""
        largest: dict[str, Term] = {}
        for moment in self.moments:
            for term in moment.terms:
                if term.name not in largest or term.num_bytes > largest[term.name].num_bytes:
                    largest[term.name] = term
        return tuple(largest.values())

    @property
    def bound_bytes(self) -> int:
        return sum(term.num_bytes for term in self.bound)


def moment(name: str, terms: Iterable[Term]) -> Moment:
    """A moment of the terms that are not empty."""
    return Moment(name, tuple(term for term in terms if term.num_bytes))


def divided(count: int, *, by: int) -> int:
    """A share of `count`, rounded up: the largest of the shares."""
    return -(-count // by)


def slot_bytes(rows: int, hidden_size: int, element_bytes: int) -> int:
    """One slot of the ring: the states of the largest microbatch, in whole pages."""
    return -(-max(rows, 1) * hidden_size * element_bytes // 4096) * 4096


def optimizer_bytes(params: Params, *, element_bytes: int, is_8bit: bool) -> int:
    """AdamW's two moments in the weights' dtype and its count of steps for each tensor; in 8 bits with a float32 scale
    for each 256 elements."""
    if is_8bit:
        return 2 * (params.count + 4 * divided(params.count, by=256)) + 4 * params.tensors
    return 2 * element_bytes * params.count + 4 * params.tensors
