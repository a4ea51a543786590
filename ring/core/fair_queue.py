"""The teacher's queue, fair by tokens: the student that was served the fewest comes first, then the one that waited.

Start-time fair queueing: every student has a clock in tokens that advances by what it is served. One that was away
continues at the queue's present, so that silence earns no credit, and a student that asks for much can't crowd out one
that asks for little.
"""

from __future__ import annotations

import bisect

from ring.core.jobs import Job, Student

#: (virtual tokens, turn, name): a student's place in the order.
_Place = tuple[int, int, str]


class FairQueue:
    """Queued jobs of all students. Costs the logarithm of the number of students that wait."""

    def __init__(self) -> None:
        self._students: dict[str, Student] = {}  # those with queued jobs
        self._order: list[_Place] = []  # sorted
        self._passed_over: dict[str, _Place] = {}
        self._num_turns = 0
        self._virtual_tokens = 0
        self.num_jobs = 0
        self.num_tokens = 0

    def push(self, student: Student, job: Job) -> None:
        if not student.queue:
            student.virtual_tokens = max(student.virtual_tokens, self._virtual_tokens)
            self._students[student.name] = student
            self._take_turn(student)
        student.queue[job.work.request.fill] = job
        self.num_jobs += 1
        self.num_tokens += job.cost_tokens
        student.queued_tokens += job.cost_tokens

    def first(self) -> tuple[Student, Job] | None:
        """The first job of the student whose turn it is, if any waits that was not passed over."""
        if not self._order:
            return None
        student = self._students[self._order[0][2]]
        return student, next(iter(student.queue.values()))

    def pass_over(self, student: Student) -> None:
        """Let others go first until `restore`. The student keeps its place: passing it over can't starve it."""
        place = _place(student)
        self._remove(place)
        self._passed_over[student.name] = place

    def restore(self) -> None:
        for place in self._passed_over.values():
            bisect.insort(self._order, place)
        self._passed_over.clear()

    def take(self, student: Student, job: Job) -> None:
        """Take a job out and charge the student for it; its turn is over."""
        self._virtual_tokens = max(self._virtual_tokens, student.virtual_tokens)
        self._remove(_place(student))
        self._forget(student, job)
        student.virtual_tokens += job.cost_tokens
        if student.queue:
            self._take_turn(student)
        else:
            del self._students[student.name]

    def discard(self, student: Student, job: Job) -> None:
        """Take a job out without charge; the student keeps its place if more of it waits."""
        self._forget(student, job)
        if not student.queue:
            self._remove(_place(student))
            del self._students[student.name]

    def drop(self, student: Student) -> None:
        """Take all jobs of a student out."""
        for job in tuple(student.queue.values()):
            self.discard(student, job)

    def _take_turn(self, student: Student) -> None:
        self._num_turns += 1
        student.turn = self._num_turns
        bisect.insort(self._order, _place(student))

    def _forget(self, student: Student, job: Job) -> None:
        del student.queue[job.work.request.fill]
        self.num_jobs -= 1
        self.num_tokens -= job.cost_tokens
        student.queued_tokens -= job.cost_tokens

    def _remove(self, place: _Place) -> None:
        del self._order[bisect.bisect_left(self._order, place)]


def _place(student: Student) -> _Place:
    return (student.virtual_tokens, student.turn, student.name)
