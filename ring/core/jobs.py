"""The life of a request at the teacher, in one table, and what the teacher's machine keeps of each student."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ring.core.errors import LocalProtocolError
from ring.core.messages import FillId, HeadRequest, Request


class JobState(enum.Enum):
    QUEUED = "queued"
    COMPUTING = "computing"
    UNWANTED = "unwanted"  # cancelled while it was computed; refused when that ends
    SENDING = "sending"
    DONE = "done"  # answered, by its fill or by one refusal; forgotten


class JobEvent(enum.Enum):
    BATCH = "batch"
    CANCEL = "cancel"
    EXPIRE = "expire"
    COMPUTED = "computed"
    FAIL = "fail"
    SENT = "sent"


JOB_TRANSITIONS: Mapping[tuple[JobState, JobEvent], JobState] = MappingProxyType(
    {
        (JobState.QUEUED, JobEvent.BATCH): JobState.COMPUTING,
        (JobState.QUEUED, JobEvent.CANCEL): JobState.DONE,
        (JobState.QUEUED, JobEvent.EXPIRE): JobState.DONE,
        (JobState.COMPUTING, JobEvent.CANCEL): JobState.UNWANTED,
        (JobState.COMPUTING, JobEvent.COMPUTED): JobState.SENDING,
        (JobState.COMPUTING, JobEvent.FAIL): JobState.DONE,
        (JobState.UNWANTED, JobEvent.CANCEL): JobState.UNWANTED,
        (JobState.UNWANTED, JobEvent.COMPUTED): JobState.DONE,
        (JobState.UNWANTED, JobEvent.FAIL): JobState.DONE,
        # Too late to refuse: bytes of it may be written already. Its fill is the answer.
        (JobState.SENDING, JobEvent.CANCEL): JobState.SENDING,
        (JobState.SENDING, JobEvent.SENT): JobState.DONE,
    }
)


class WorkKind(enum.Enum):
    TOKENS = "tokens"
    HEAD = "head"


@dataclass(frozen=True)
class Work:
    """One request to compute. `session` tells lives of a student with the same name apart."""

    student: str
    session: int
    request: Request
    received_s: float

    @property
    def kind(self) -> WorkKind:
        return WorkKind.HEAD if isinstance(self.request.payload, HeadRequest) else WorkKind.TOKENS

    @property
    def key(self) -> JobKey:
        return (self.student, self.session, self.request.fill)


#: (student, session, fill): names a job over all students and their lives.
JobKey = tuple[str, int, FillId]


@dataclass(kw_only=True)
class Job:
    """One accepted request. `cost_tokens`: what it counts for in batches and in fairness."""

    work: Work
    cost_tokens: int
    expires_s: float
    state: JobState = JobState.QUEUED
    started_s: float = 0.0
    idle_s: float = 0.0

    def move(self, event: JobEvent) -> None:
        """Raises LocalProtocolError: `event` is illegal in the present state; nothing changed."""
        after = JOB_TRANSITIONS.get((self.state, event))
        if after is None:
            allowed = [e.name for (state, e) in JOB_TRANSITIONS if state is self.state]
            raise LocalProtocolError(
                f"{self.work.student} {self.work.request.fill}: {event.name} is illegal in {self.state.name}; "
                f"allowed: {allowed}"
            )
        self.state = after


@dataclass(kw_only=True)
class Student:
    """One student in one session. `queue`: its queued jobs in order of receipt. `virtual_tokens`: what it was served,
    on the clock that all students share."""

    name: str
    session: int
    num_slots: int
    slot_bytes: int
    row_bytes: int
    jobs: dict[FillId, Job] = field(default_factory=dict)
    queue: dict[FillId, Job] = field(default_factory=dict)
    queued_tokens: int = 0
    num_sending: int = 0
    last_fills: dict[int, FillId] = field(default_factory=dict)
    virtual_tokens: int = 0
    turn: int = 0

    @property
    def num_unsent(self) -> int:
        return len(self.jobs) - self.num_sending
