"""The teacher's machine: a fair queue of requests from many students, sans-IO.

Events and `now_s` in, actions out. What a student does can only be refused, or get the student dropped; illegal calls
of our own raise LocalProtocolError and change nothing. A student costs at most two jobs a slot: one to be answered, and
one whose fill is on its way though the student may have it already.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from ring.core.config import TeacherConfig
from ring.core.deadlines import Deadlines
from ring.core.errors import LocalProtocolError
from ring.core.fair_queue import FairQueue
from ring.core.jobs import Job, JobEvent, JobKey, JobState, Student, Work, WorkKind
from ring.core.messages import FillId, HeadRequest, RefusalCode, Request
from ring.core.stats import TeacherStats
from ring.core.teacher_actions import Batch, DropStudent, Put, Refuse, TeacherAction

__all__ = [
    "Batch",
    "DropStudent",
    "Put",
    "Refuse",
    "TeacherAction",
    "TeacherConfig",
    "TeacherMachine",
    "TeacherStats",
    "Work",
    "WorkKind",
]


class TeacherMachine:
    """The queue of one replica. The shell reports what students say, computes what `next_batch` returns, carries
    actions out in order, and calls `on_timer` when `next_deadline_s` has come."""

    def __init__(self, config: TeacherConfig) -> None:
        self._config = config
        self._now_s = -math.inf
        self._students: dict[str, Student] = {}
        self._num_sessions = 0
        self._queue = FairQueue()
        self._computing: dict[JobKey, Job] = {}
        self._silences: Deadlines[str] = Deadlines(config.student_timeout_s)
        self._sends: Deadlines[JobKey] = Deadlines(config.student_timeout_s)
        self._draining = False
        self._idle_since_s: float | None = None
        self._idle_s = 0.0  # before idle_since_s
        self._uncharged_idle_s = 0.0  # goes to the next batch
        self._charged_until_s = -math.inf
        self._counts = dict.fromkeys(("received", "sent", "refused", "repeated", "dropped_students", "batches"), 0)
        self._queue_s = 0.0

    # ---- students ------------------------------------------------------------------------------------------------

    @property
    def can_join(self) -> bool:
        """Whether one more student may join."""
        return not self._draining and len(self._students) < self._config.max_students

    def student_joined(
        self, student: str, *, num_slots: int, slot_bytes: int, row_bytes: int, now_s: float
    ) -> list[TeacherAction]:
        """A student finished its handshake; a former session of the same name is forgotten. Over `max_students`, or
        while draining, the answer is DropStudent.

        Raises LocalProtocolError: sizes that make no sense; nothing changed."""
        now_s = self._time(now_s)
        if num_slots < 1 or slot_bytes < 0 or row_bytes < 1:
            raise LocalProtocolError(
                f"student {student}: {num_slots} slots of {slot_bytes} bytes, {row_bytes} bytes a row; "
                f"allowed: >= 1, >= 0, >= 1"
            )
        self._now_s = now_s
        self._forget(student)
        if not self.can_join:
            why = "the teacher is draining" if self._draining else f"{len(self._students)} students are here already"
            self._update_idle()
            return [DropStudent(student, f"{why}; allowed: {self._config.max_students} students, none while draining")]
        self._num_sessions += 1
        self._students[student] = Student(
            name=student,
            session=self._num_sessions,
            num_slots=num_slots,
            slot_bytes=slot_bytes,
            row_bytes=row_bytes,
        )
        self._silences.start(student, now_s)
        self._update_idle()
        return []

    def student_left(self, student: str, *, now_s: float) -> list[TeacherAction]:
        """Forget a student and all that it asked for. Idempotent."""
        self._now_s = self._time(now_s)
        self._forget(student)
        self._update_idle()
        return []

    def heard(self, student: str, *, now_s: float) -> None:
        """Any message came from the student: it is not silent."""
        self._now_s = self._time(now_s)
        if student in self._students:
            self._silences.start(student, self._now_s)

    # ---- requests ------------------------------------------------------------------------------------------------

    def request(self, student: str, request: Request, *, now_s: float) -> list[TeacherAction]:
        """A student asks for a fill: queued, or refused at once."""
        self._now_s = self._time(now_s)
        asker = self._students.get(student)
        if asker is None:
            return [DropStudent(student, "a request before the handshake")]
        self._silences.start(student, self._now_s)
        fill = request.fill
        if fill in asker.jobs or asker.last_fills.get(fill.slot) == fill:
            self._counts["repeated"] += 1
            return []
        if fill.slot < asker.num_slots:
            # Refused ones too: after the refusal their slot is another's, and a second copy must not be computed.
            asker.last_fills[fill.slot] = fill
        refusal = self._objection(asker, request)
        if refusal is not None:
            return [self._refuse(student, fill, *refusal)]
        work = Work(student, asker.session, request, self._now_s)
        job = Job(work=work, cost_tokens=self._cost_tokens(asker, request), expires_s=self._now_s + request.time_left_s)
        asker.jobs[fill] = job
        self._queue.push(asker, job)
        self._counts["received"] += 1
        self._update_idle()
        return []

    def cancel(self, student: str, fill: FillId, *, now_s: float) -> list[TeacherAction]:
        """Nobody waits for this fill any more. It is refused if nothing of it is written yet: now or when computed."""
        self._now_s = self._time(now_s)
        asker = self._students.get(student)
        job = asker.jobs.get(fill) if asker is not None else None
        if asker is None or job is None:
            return []  # answered already
        self._silences.start(student, self._now_s)
        if job.state is JobState.QUEUED:
            self._queue.discard(asker, job)
        job.move(JobEvent.CANCEL)
        if job.state is not JobState.DONE:
            return []
        del asker.jobs[fill]
        self._update_idle()
        return [self._refuse(student, fill, RefusalCode.CANCELLED, "cancelled while queued")]

    # ---- computing -----------------------------------------------------------------------------------------------

    def next_batch(
        self, *, now_s: float, max_requests: int | None = None, avoid: Collection[str] = frozenset()
    ) -> Batch:
        """Take what to compute next, of one kind, up to `max_batch_tokens`, at least one request if any waits.

        The student that was served the fewest tokens comes first; what is expired is refused. avoid: students that get
        nothing now and keep their turn, because they don't read what they have.
        Raises LocalProtocolError: max_requests below 1; nothing changed."""
        now_s = self._time(now_s)
        if max_requests is not None and max_requests < 1:
            raise LocalProtocolError(f"max_requests is {max_requests}; allowed: >= 1")
        self._now_s = now_s
        actions: list[TeacherAction] = []
        jobs: list[Job] = []
        tokens = 0
        while tokens < self._config.max_batch_tokens and (max_requests is None or len(jobs) < max_requests):
            first = self._queue.first()
            if first is None:
                break
            asker, job = first
            if self._now_s >= job.expires_s:
                actions.append(self._expire(asker, job))
                continue
            fits = tokens + job.cost_tokens <= self._config.max_batch_tokens
            if asker.name in avoid or (jobs and not (fits and job.work.kind is jobs[0].work.kind)):
                self._queue.pass_over(asker)
                continue
            self._queue.take(asker, job)
            job.move(JobEvent.BATCH)
            jobs.append(job)
            tokens += job.cost_tokens
        self._queue.restore()
        self._start(jobs)
        self._update_idle()
        kind = jobs[0].work.kind if jobs else WorkKind.TOKENS
        return Batch(kind, tuple(job.work for job in jobs), tuple(actions))

    def computed(self, work: Sequence[Work], *, now_s: float) -> list[TeacherAction]:
        """Work of `next_batch` is computed: Put what is still wanted, refuse what was cancelled meanwhile.

        Raises LocalProtocolError: something in `work` is not being computed; nothing changed."""
        actions: list[TeacherAction] = []
        for asker, job in self._take_computed(work, now_s):
            job.move(JobEvent.COMPUTED)
            request = job.work.request
            if job.state is JobState.DONE:
                del asker.jobs[request.fill]
                actions.append(
                    self._refuse(asker.name, request.fill, RefusalCode.CANCELLED, "cancelled while computed")
                )
                continue
            asker.num_sending += 1
            self._sends.start(job.work.key, self._now_s)
            # What no earlier answer was charged: over a batch's answers it adds up to the time that the batch took.
            forward_s = self._now_s - max(job.started_s, self._charged_until_s)
            self._charged_until_s = self._now_s
            actions.append(Put(asker.name, request, forward_s, job.started_s - job.work.received_s, job.idle_s))
        return actions

    def failed(self, work: Sequence[Work], message: str, *, now_s: float) -> list[TeacherAction]:
        """Computing raised. Errors as `computed`."""
        actions: list[TeacherAction] = []
        for asker, job in self._take_computed(work, now_s):
            cancelled = job.state is JobState.UNWANTED
            job.move(JobEvent.FAIL)
            fill = job.work.request.fill
            del asker.jobs[fill]
            code = RefusalCode.CANCELLED if cancelled else RefusalCode.FAILED
            actions.append(self._refuse(asker.name, fill, code, message))
        return actions

    def sent(self, student: str, fill: FillId, *, now_s: float) -> list[TeacherAction]:
        """The fill is written; its source may be reused. Unknown fills (the student left) change nothing.

        Raises LocalProtocolError: no Put was asked for; nothing changed."""
        now_s = self._time(now_s)
        asker = self._students.get(student)
        job = asker.jobs.get(fill) if asker is not None else None
        if asker is None or job is None:
            return []
        job.move(JobEvent.SENT)
        self._now_s = now_s
        self._sends.stop(job.work.key)
        asker.num_sending -= 1
        del asker.jobs[fill]
        self._counts["sent"] += 1
        return []

    # ---- life ----------------------------------------------------------------------------------------------------

    def drain(self, *, now_s: float) -> list[TeacherAction]:
        """From now on refuse what is new; finish what is held. Idempotent."""
        self._now_s = self._time(now_s)
        self._draining = True
        return []

    @property
    def drained(self) -> bool:
        """Draining, and nothing is queued, computing or on its way."""
        return self._draining and not self._queue.num_jobs and not self._computing and not len(self._sends)

    def next_deadline_s(self) -> float | None:
        """When `on_timer` has something to do if nothing happens before; None: never."""
        ends = (self._silences.first_s(), self._sends.first_s())
        return min((end_s for end_s in ends if end_s is not None), default=None)

    def on_timer(self, *, now_s: float) -> list[TeacherAction]:
        """Drop the students that are silent, or that don't take their fills, for student_timeout_s."""
        self._now_s = now_s = self._time(now_s)
        actions: list[TeacherAction] = []
        timeout_s = self._config.student_timeout_s
        while (name := self._silences.pop_due(now_s)) is not None:
            self._drop(name, f"not heard from for {timeout_s:g} s", actions)
        while (key := self._sends.pop_due(now_s)) is not None:
            self._drop(key[0], f"did not take the fill of seq {key[2].seq} for {timeout_s:g} s", actions)
        self._update_idle()
        return actions

    def stats(self, *, now_s: float) -> TeacherStats:
        """A frozen snapshot."""
        now_s = self._time(now_s)
        return TeacherStats(
            students=len(self._students),
            queued=self._queue.num_jobs,
            queued_tokens=self._queue.num_tokens,
            computing=len(self._computing),
            sending=len(self._sends),
            idle_s=self._idle_s + (0.0 if self._idle_since_s is None else now_s - self._idle_since_s),
            queue_s=self._queue_s,
            **self._counts,
        )

    # ---- within --------------------------------------------------------------------------------------------------

    def _time(self, now_s: float) -> float:
        """Time as this machine sees it: never backwards. Raises LocalProtocolError: not a time."""
        if not math.isfinite(now_s):
            raise LocalProtocolError(f"now_s is {now_s}; allowed: a finite number of seconds")
        return max(now_s, self._now_s)

    def _objection(self, asker: Student, request: Request) -> tuple[RefusalCode, str] | None:
        """Why a request is refused at once, with what was asked and what is allowed."""
        if self._draining:
            return RefusalCode.DRAINING, "this replica is going away"
        if request.fill.slot >= asker.num_slots:
            return RefusalCode.INVALID, f"slot {request.fill.slot}; {asker.num_slots} slots were offered"
        if isinstance(request.payload, HeadRequest):
            num_bytes = request.payload.num_bytes
        else:
            num_tokens, num_rows = request.payload.num_tokens, request.payload.num_rows
            if not 1 <= num_tokens <= self._config.max_tokens:
                return RefusalCode.INVALID, f"{num_tokens} tokens; allowed: 1 to {self._config.max_tokens}"
            if num_rows > self._config.max_rows:
                return RefusalCode.INVALID, f"{num_rows} rows; allowed: at most {self._config.max_rows}"
            num_bytes = num_rows * asker.row_bytes
        if num_bytes > asker.slot_bytes:
            return RefusalCode.INVALID, f"the answer has {num_bytes} bytes; a slot holds {asker.slot_bytes}"
        # Fills on their way are counted apart: the student may have them, and ask anew, before their tickets are back.
        if asker.num_unsent >= asker.num_slots or len(asker.jobs) >= 2 * asker.num_slots:
            return RefusalCode.OVERLOADED, f"{len(asker.jobs)} requests are held; {asker.num_slots} slots were offered"
        if asker.queued_tokens >= (limit := self._config.max_queued_tokens):
            return RefusalCode.OVERLOADED, f"{asker.queued_tokens} tokens are queued; allowed: fewer than {limit}"
        return None

    def _cost_tokens(self, asker: Student, request: Request) -> int:
        """A head piece counts as the rows that it would take on the wire; one that reaches into the digest as all its
        columns, up to a full pass: they are hashed for it."""
        payload = request.payload
        if not isinstance(payload, HeadRequest):
            return payload.num_tokens
        cost_tokens = max(1, -(-payload.num_bytes // asker.row_bytes))
        columns_bytes = (payload.vocab_end - payload.vocab_start) * self._config.head_column_bytes
        if payload.offset + payload.num_bytes > columns_bytes > 0:
            cost_tokens = max(cost_tokens, min(-(-columns_bytes // asker.row_bytes), self._config.max_batch_tokens))
        return cost_tokens

    def _refuse(self, student: str, fill: FillId, code: RefusalCode, message: str) -> Refuse:
        self._counts["refused"] += 1
        return Refuse(student, fill, code, message)

    def _expire(self, asker: Student, job: Job) -> Refuse:
        self._queue.discard(asker, job)
        job.move(JobEvent.EXPIRE)
        fill = job.work.request.fill
        del asker.jobs[fill]
        waited_s = self._now_s - job.work.received_s
        return self._refuse(
            asker.name, fill, RefusalCode.EXPIRED, f"its time was over after {waited_s:.3g} s in the queue"
        )

    def _start(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            job.started_s = self._now_s
            self._computing[job.work.key] = job
            self._queue_s += self._now_s - job.work.received_s
        if jobs:
            jobs[0].idle_s, self._uncharged_idle_s = self._uncharged_idle_s, 0.0
            self._counts["batches"] += 1

    def _take_computed(self, work: Sequence[Work], now_s: float) -> list[tuple[Student, Job]]:
        """The jobs of `work` whose students are still there. Raises LocalProtocolError; nothing changed."""
        now_s = self._time(now_s)
        keys = [item.key for item in work]
        strange = [key for key in keys if key not in self._computing]
        if strange or len(set(keys)) != len(keys):
            raise LocalProtocolError(
                f"not being computed, or twice in the list: {strange or keys}; allowed: work of next_batch, once"
            )
        self._now_s = now_s
        jobs = [self._computing.pop(key) for key in keys]
        self._update_idle()
        askers = [self._students.get(key[0]) for key in keys]
        return [
            (asker, job)
            for asker, job in zip(askers, jobs, strict=True)
            if asker is not None and asker.session == job.work.session
        ]

    def _forget(self, name: str) -> None:
        asker = self._students.pop(name, None)
        if asker is None:
            return
        self._silences.stop(name)
        self._queue.drop(asker)
        for job in asker.jobs.values():
            self._sends.stop(job.work.key)

    def _drop(self, name: str, reason: str, actions: list[TeacherAction]) -> None:
        self._forget(name)
        self._counts["dropped_students"] += 1
        actions.append(DropStudent(name, reason))

    def _update_idle(self) -> None:
        """Follow whether there is anything to do, from the first student on."""
        idle = not self._queue.num_jobs and not self._computing
        if idle and self._idle_since_s is None:
            self._idle_since_s = self._now_s
        elif not idle and self._idle_since_s is not None:
            passed_s = self._now_s - self._idle_since_s
            self._idle_s += passed_s
            self._uncharged_idle_s += passed_s
            self._idle_since_s = None
