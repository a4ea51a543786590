"""What the teacher's machine asks its shell to do, and the work that it hands out."""

from __future__ import annotations

from dataclasses import dataclass

from ring.core.jobs import Work, WorkKind
from ring.core.messages import FillId, RefusalCode, Request


@dataclass(frozen=True)
class Put:
    """Write the answer to `request` into its slot; then call `sent`. The times go into the fill's header: the
    forward pass and the idle time before it, each as far as no earlier answer was charged for it, so that sums over
    fills count it once; and the request's wait for its pass."""

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


@dataclass(frozen=True)
class Batch:
    """What to compute together, all of one kind; empty `work`: nothing to do now. `actions` must be carried out."""

    kind: WorkKind
    work: tuple[Work, ...]
    actions: tuple[TeacherAction, ...]
