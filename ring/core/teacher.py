"""The teacher's machine: a fair queue of requests from many students, sans-IO.

Events and `now_s` in, actions out. What a student does can only ever be refused, or get the student dropped; illegal
calls of our own raise LocalProtocolError and change nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from ring.core.config import TeacherConfig
from ring.core.messages import FillId, RefusalCode, Request


@dataclass(frozen=True)
class Put:
    """Write the answer to `request` into its slot; then call `sent`. The times go into the fill's header."""

    student: str
    request: Request
    forward_s: float
    queue_s: float
    idle_s: float


@dataclass(frozen=True)
class Refuse:
    """Send Refused(fill, code, message)."""

    student: str
    fill: FillId
    code: RefusalCode
    message: str


@dataclass(frozen=True)
class DropStudent:
    """Close the channel to `student` and tell it why; the machine has forgotten it already."""

    student: str
    reason: str


TeacherAction = Put | Refuse | DropStudent


class WorkKind(enum.Enum):
    TOKENS = "tokens"
    HEAD = "head"


@dataclass(frozen=True)
class Work:
    """One request to compute. `session` tells lives of a student with the same name apart."""

    student: str
    session: int
    request: Request


@dataclass(frozen=True)
class Batch:
    """What to compute together: all of one kind. Empty `work`: nothing to do now. `actions` must be carried out."""

    kind: WorkKind
    work: tuple[Work, ...]
    actions: tuple[TeacherAction, ...]


@dataclass(frozen=True, kw_only=True)
class TeacherStats:
    """Counts and sums since the start; `idle_s`: time with nothing queued or computing."""

    students: int
    queued: int
    queued_tokens: int
    computing: int
    sending: int
    received: int
    sent: int
    refused: int
    dropped_students: int
    idle_s: float


class TeacherMachine:
    def __init__(self, config: TeacherConfig, *, now_s: float) -> None:
        raise NotImplementedError

    def student_joined(
        self, student: str, *, num_slots: int, slot_bytes: int, row_bytes: int, now_s: float
    ) -> list[TeacherAction]:
        raise NotImplementedError

    def student_left(self, student: str, *, now_s: float) -> list[TeacherAction]:
        raise NotImplementedError

    def heard(self, student: str, *, now_s: float) -> None:
        raise NotImplementedError

    def request(self, student: str, request: Request, *, now_s: float) -> list[TeacherAction]:
        raise NotImplementedError

    def cancel(self, student: str, fill: FillId, *, now_s: float) -> list[TeacherAction]:
        raise NotImplementedError

    def next_batch(self, *, now_s: float, max_requests: int | None = None) -> Batch:
        raise NotImplementedError

    def computed(self, work: Sequence[Work], *, now_s: float) -> list[TeacherAction]:
        raise NotImplementedError

    def failed(self, work: Sequence[Work], message: str, *, now_s: float) -> list[TeacherAction]:
        raise NotImplementedError

    def sent(self, student: str, fill: FillId, *, now_s: float) -> list[TeacherAction]:
        raise NotImplementedError

    def drain(self, *, now_s: float) -> list[TeacherAction]:
        raise NotImplementedError

    @property
    def drained(self) -> bool:
        raise NotImplementedError

    def on_timer(self, *, now_s: float) -> list[TeacherAction]:
        raise NotImplementedError

    def next_deadline_s(self) -> float | None:
        raise NotImplementedError

    def stats(self, *, now_s: float) -> TeacherStats:
        raise NotImplementedError
