"""The teacher as a service: requests in, states out, to many students at once.

Two halves share one `ring.core.teacher.TeacherMachine` under a lock. `io_turn` talks to students and moves fills;
`compute_turn` runs forward passes. `teacher.serve` gives each its own thread, so that sending overlaps computing; the
colocated layout calls both in turn on the trainer's thread. The service keeps nothing about a student but its queue:
whatever it forgets, the student asks for again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from contextlib import suppress

from ring.control import ControlPort
from ring.core import codec
from ring.core.config import TeacherConfig
from ring.core.errors import DisaggKDError, LocalProtocolError, RemoteProtocolError, TransportError
from ring.core.messages import (
    Cancel,
    FillId,
    Goodbye,
    Hello,
    Message,
    Offer,
    Ping,
    Pong,
    Ready,
    RefusalCode,
    Refused,
    Request,
    TokenRequest,
    WireDtype,
)
from ring.core.teacher import DropStudent, Put, Refuse, TeacherAction, TeacherMachine, TeacherStats, Work
from teacher.answers import Parts, compute, fill_header
from teacher.complaints import Complaints
from teacher.forward import TeacherModel
from teacher.students import ServiceConfig, Student, Students

__all__ = ["ServiceConfig", "TeacherService"]

logger = logging.getLogger(__name__)

#: States of so many full forward passes may wait for one student to read them; the next pass is for others then
#: (back-pressure, not memory). A student that has stopped so holds up nobody.
MAX_UNSENT_PASSES = 2
#: A student that floods the service with messages must not keep it from sending, or from its timers.
MAX_MESSAGES_A_TURN = 256


class TeacherService:
    """Serves one model through one control port."""

    def __init__(self, model: TeacherModel, port: ControlPort, config: ServiceConfig) -> None:
        self._model = model
        self._port = port
        self._config = config
        self._lock = threading.RLock()
        self._work_arrived = threading.Condition(self._lock)
        self._head = model.head_info()
        self._machine = TeacherMachine(
            TeacherConfig(
                max_batch_tokens=config.max_batch_tokens,
                max_students=config.max_students,
                max_rows=config.max_batch_tokens,
                max_tokens=config.max_batch_tokens,
                student_timeout_s=config.student_timeout_s,
                head_column_bytes=self._head.num_bytes // self._head.vocab_size,
            )
        )
        row_bytes = self._head.hidden_size * self._head.dtype.itemsize_bytes
        self._max_unsent_bytes = MAX_UNSENT_PASSES * config.max_batch_tokens * row_bytes
        self._draining = False
        self._answers: dict[tuple[str, FillId], Parts] = {}
        self._actions: deque[TeacherAction] = deque()
        self._closed = False
        # Turns of the I/O side that brought something, and how many of them the compute side has taken into account.
        self._news = self._seen_news = 0
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._complaints = Complaints(logger)
        # A whole house may come or leave at once; a student that does both over and over may not fill the disk.
        self._comings = Complaints(logger, level=logging.INFO, burst=2 * config.max_students)
        self._students = Students(model, config, wake=self._wake, complaints=self._complaints)

    # ---- I/O side ------------------------------------------------------------------------------------------------

    def io_turn(self) -> bool:
        """Take what students say, send what is computed; never blocks. Returns whether anything happened."""
        with self._lock:
            if self._closed:
                return False
            now_s = time.monotonic()
            busy = False
            for _ in range(MAX_MESSAGES_A_TURN):
                if (received := self._port.recv()) is None:
                    break
                busy = True
                self._hear(received[0], received[1], now_s)
            busy |= self._collect_opened(now_s)
            for student in self._students:
                busy |= self._collect_sent(student, now_s)
            for student in self._students.overdue(now_s):
                self._drop(student.name, student.shortcoming, now_s)
            deadline_s = self._machine.next_deadline_s()
            if deadline_s is not None and now_s >= deadline_s:
                self._actions.extend(self._machine.on_timer(now_s=now_s))
            carried_out, puts = self._carry_out(now_s)
        # Checksums and copies take their time; meanwhile the compute side needs the lock.
        for put, parts, student in puts:
            self._put(put, parts, student, now_s)
        busy |= carried_out
        if busy:
            with self._work_arrived:
                self._news += 1
                self._work_arrived.notify_all()
        return busy

    def wait_fds(self) -> tuple[int, ...]:
        """Readable when `io_turn` may have something to do, given that it was called until it had nothing."""
        with self._lock:
            senders = [s.sender for s in self._students if s.sender is not None]
            return (self._wake_fd, *self._port.wait_fds(), *(fd for sender in senders for fd in sender.wait_fds()))

    def acknowledge_wake(self) -> None:
        """Reset the descriptor by which the compute side wakes the I/O side."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def next_deadline_s(self) -> float | None:
        with self._lock:
            ends = (self._machine.next_deadline_s(), self._students.next_deadline_s())
            return min((end_s for end_s in ends if end_s is not None), default=None)

    # ---- compute side --------------------------------------------------------------------------------------------

    def wait_for_work(self, *, timeout_s: float) -> None:
        """Block until something happened since the last `compute_turn` looked for work, or timeout_s passed."""
        with self._work_arrived:
            if self._news == self._seen_news:
                self._work_arrived.wait(timeout_s)

    def compute_turn(self) -> bool:
        """Run one forward pass over what is asked, if anything is; returns whether there was work.

        Raises what the model raises, only where `raises_failures` is set."""
        with self._lock:
            if self._closed:
                return False
            self._seen_news = self._news
            batch = self._machine.next_batch(
                now_s=time.monotonic(),
                max_requests=1 if self._config.deterministic else None,
                avoid={s.name for s in self._students if self._unsent_bytes(s) >= self._max_unsent_bytes},
            )
            self._actions.extend(batch.actions)
            if batch.actions:
                self._wake()
            if not batch.work:
                return bool(batch.actions)
        pending = list(batch.work)
        try:
            answers = compute(
                self._model,
                batch,
                wire_dtypes=[self._wire_dtype_of(work.student) for work in batch.work],
                max_batch_tokens=self._config.max_batch_tokens,
                deterministic=self._config.deterministic,
            )
            for work, parts in answers:
                self._hand_over(work, parts)
                pending.remove(work)  # only now: the states of this one may still fail to leave the device
        except Exception as failure:
            if self._config.raises_failures:
                raise
            # Whatever the model raised concerns this pass only: the students hear of it and decide.
            error = f"{type(failure).__name__}: {failure}"
            logger.warning("the forward pass failed: %s", error, exc_info=logger.isEnabledFor(logging.DEBUG))
            with self._lock:
                self._actions.extend(self._machine.failed(pending, error[:512], now_s=time.monotonic()))
                self._wake()
        return True

    def _hand_over(self, work: Work, parts: Parts) -> None:
        """Give one answer to the I/O side, which may send it while the pass's other requests are computed."""
        # Transports read host memory; on the CPU this copies nothing.
        on_host = [part.cpu() for part in parts]
        with self._lock:
            self._answers[work.student, work.request.fill] = on_host
            self._actions.extend(self._machine.computed([work], now_s=time.monotonic()))
            self._forget_unwanted()
            self._wake()

    def stats(self) -> TeacherStats:
        """A frozen snapshot of the queue."""
        with self._lock:
            return self._machine.stats(now_s=time.monotonic())

    # ---- life ----------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Refuse new requests; what is held is still answered."""
        with self._lock:
            self._draining = True
            self._machine.drain(now_s=time.monotonic())
            self._wake()

    @property
    def drained(self) -> bool:
        """Whether everything that was accepted before `drain` is answered and sent."""
        with self._lock:
            return self._machine.drained and not self._actions

    def close(self) -> None:
        """Say goodbye to all students and give everything back. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for student in self._students:
                self._port.send(student.name, Goodbye(reason=f"replica {self._config.replica} is closing"))
            self._students.close()
            self._answers.clear()
            self._port.close()
            os.close(self._wake_fd)
            self._work_arrived.notify_all()

    # ---- messages ------------------------------------------------------------------------------------------------

    def _hear(self, name: str, message: Message | RemoteProtocolError, now_s: float) -> None:
        student = self._students.get(name)
        if student is not None:
            self._machine.heard(name, now_s=now_s)
        try:
            match message:
                case RemoteProtocolError():
                    raise message
                case Hello() if student is None:
                    for former in self._students.done_with(message):
                        self._drop(former.name, former.shortcoming, now_s, say=False)
                    for former in self._students.in_the_way_of(message):
                        self._drop(former.name, "it came back over another connection", now_s)
                    answer = self._students.greet(name, message, draining=self._draining, now_s=now_s)
                    if not self._port.send(name, answer):
                        # Gone already: it must not hold one of the places until it would be overdue.
                        self._students.remove(name)
                case Ping():
                    # Answered to strangers too: a student of a former life learns by the silence on its requests.
                    self._port.send(name, Pong(token=message.token))
                case Pong():
                    pass
                case Goodbye():
                    reason = message.reason
                    if student is not None and student.ending is not None:
                        reason += f" ({student.ending})"
                    self._drop(name, reason, now_s, say=False)
                case _ if student is not None and student.ending is not None:
                    pass  # said before it knew that its channel is gone
                case Offer() if student is not None and student.offer is None:
                    self._students.open(student, message, now_s=now_s)
                case Request() if student is not None and student.sender is not None:
                    self._request(student, message, now_s)
                case Cancel() if student is not None and student.sender is not None:
                    self._actions.extend(self._machine.cancel(name, message.fill, now_s=now_s))
                case Request() | Cancel() if student is None:
                    self._port.send(name, Goodbye(reason="unknown student; say hello first"))
                case _:
                    raise RemoteProtocolError(f"{type(message).__name__} is illegal in this phase of the handshake")
        except LocalProtocolError:
            raise
        except DisaggKDError as error:
            self._complaints.say(f"student {name}: {error}", now_s=now_s)
            self._drop(name, str(error), now_s)

    def _collect_opened(self, now_s: float) -> bool:
        news = self._students.opened()
        for student, error in news:
            if error is None:
                self._join(student, now_s)
            else:
                self._complaints.say(f"student {student.name}: {error}", now_s=now_s)
                self._drop(student.name, str(error), now_s)
        return bool(news)

    def _join(self, student: Student, now_s: float) -> None:
        hello, offer = student.hello, student.offer
        assert offer is not None
        objections = self._machine.student_joined(
            student.name,
            num_slots=offer.num_slots,
            slot_bytes=offer.slot_bytes,
            row_bytes=self._head.hidden_size * offer.wire_dtype.itemsize_bytes,
            now_s=now_s,
        )
        self._actions.extend(objections)
        if not objections:
            self._comings.say(f"rank {hello.rank} of run {hello.run} joined over {offer.backend}", now_s=now_s)
            self._port.send(student.name, Ready())

    def _request(self, student: Student, request: Request, now_s: float) -> None:
        payload = request.payload
        try:
            if isinstance(payload, TokenRequest):
                self._model.check_request(payload, max_batch_tokens=self._config.max_batch_tokens)
            else:
                self._model.check_head_request(payload)
        except RemoteProtocolError as error:
            # Refused alone: the student's other requests are none the worse for it.
            self._actions.append(Refuse(student.name, request.fill, RefusalCode.INVALID, str(error)))
            return
        self._actions.extend(self._machine.request(student.name, request, now_s=now_s))

    def _drop(self, name: str, reason: str, now_s: float, *, say: bool = True) -> None:
        if say:  # before the channel's end: it is the better reason
            self._port.send(name, Goodbye(reason=reason[:512]))
        student = self._students.remove(name)
        if student is None:
            return
        self._comings.say(f"rank {student.hello.rank} of run {student.hello.run} left: {reason}", now_s=now_s)
        self._actions.extend(self._machine.student_left(name, now_s=now_s))
        self._forget_unwanted()

    def _part(self, student: Student, error: str, now_s: float) -> None:
        """Its channel ended, and so its session. It is told at once; why, as it says itself, is awaited for the log."""
        self._port.send(student.name, Goodbye(reason=error[:512]))
        self._students.channel_ended(student, error, now_s=now_s)
        self._actions.extend(self._machine.student_left(student.name, now_s=now_s))
        self._forget_unwanted()

    # ---- fills ---------------------------------------------------------------------------------------------------

    def _wire_dtype_of(self, name: str) -> WireDtype:
        with self._lock:
            student = self._students.get(name)
            # A student that left meanwhile: its answer is thrown away, in whatever dtype.
            return self._head.dtype if student is None or student.offer is None else student.offer.wire_dtype

    def _put(self, put: Put, parts: Parts, student: Student, now_s: float) -> None:
        """Begin to send one answer. Without the lock: only this side opens, uses and closes senders."""
        request = put.request
        if student.sender is None or student.offer is None:
            return
        header = fill_header(
            put,
            parts,
            self._model,
            student_epoch=student.hello.epoch,
            teacher_epoch=self._config.epoch,
            wire_dtype=student.offer.wire_dtype,
            with_crc=student.offer.crc,
        )
        try:
            ticket = student.sender.put(request.fill, header=codec.encode_header(header), parts=parts)
        except TransportError as error:
            with self._lock:
                if self._students.get(put.student) is student:
                    self._part(student, str(error), now_s)
            return
        with self._lock:
            student.tickets[ticket] = (request.fill, header.num_bytes)

    def _collect_sent(self, student: Student, now_s: float) -> bool:
        if student.sender is None:
            return False
        busy = False
        try:
            while tickets := student.sender.poll():
                busy = True
                for ticket in tickets:
                    fill, _ = student.tickets.pop(ticket)
                    self._actions.extend(self._machine.sent(student.name, fill, now_s=now_s))
        except TransportError as error:
            self._part(student, str(error), now_s)
        return busy

    def _unsent_bytes(self, student: Student) -> int:
        """Bytes of states for this student that wait for their turn to be sent, or are being sent."""
        waiting = (parts for (name, _), parts in self._answers.items() if name == student.name)
        return sum(part.nbytes for parts in waiting for part in parts) + sum(
            num_bytes for _, num_bytes in student.tickets.values()
        )

    def _forget_unwanted(self) -> None:
        """Drop answers that nobody waits for: the student left, or it cancelled during the pass."""
        wanted = {(a.student, a.request.fill) for a in self._actions if isinstance(a, Put)}
        self._answers = {key: answer for key, answer in self._answers.items() if key in wanted}

    def _carry_out(self, now_s: float) -> tuple[bool, list[tuple[Put, Parts, Student]]]:
        """Do all that waits to be done but the puts, which are returned; and whether there was anything."""
        busy, puts = bool(self._actions), []
        while self._actions:
            match self._actions.popleft():
                case Put() as put:
                    parts = self._answers.pop((put.student, put.request.fill))
                    student = self._students.get(put.student)
                    if student is not None:
                        puts.append((put, parts, student))
                case Refuse(student=name, fill=fill, code=code, message=message):
                    self._port.send(name, Refused(fill=fill, code=code, message=message[:512]))
                case DropStudent(student=name, reason=reason):
                    self._drop(name, reason, now_s)
        return busy, puts

    def _wake(self) -> None:
        if not self._closed:
            os.eventfd_write(self._wake_fd, 1)
