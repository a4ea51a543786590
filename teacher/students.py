"""The students of one service: each one's handshake, from HELLO to READY, and the channel into its slots.

The order is HELLO, WELCOME, OFFER, READY. Opening a channel waits for the student's endpoint, so a thread of its own
does it: a student behind a wall holds up nobody else. One that says hello and then nothing is forgotten.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ring.core.errors import DisaggKDError, RemoteProtocolError, TransportError
from ring.core.messages import Denied, FillId, Goodbye, Hello, Offer, Welcome
from teacher.complaints import Complaints
from teacher.destinations import Destinations
from teacher.forward import TeacherModel
from transport.contract import Sender, Ticket
from transport.host import DESCRIPTORS_A_LINK, check_descriptors
from transport.registry import host_id, load, names

#: How long a student's endpoint may take to answer. Over ucx its address is tried in a process of its own first, which
#: on a busy machine takes seconds to begin.
OPEN_TIMEOUT_S = 10.0
#: No channel is opened with fewer descriptors left.
MIN_FREE_DESCRIPTORS = 64
#: A student that ends says goodbye over one connection and closes another: whichever is noticed first.
LAST_WORD_S = 2.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """replica: the name shown to students. backends: the transports that may be used, best first.

    deterministic: one request a forward pass, so that states do not depend on what else is asked. raises_failures: a
    forward pass that fails raises in `compute_turn`, for a student of the same process; others are told of it.
    destinations: where an OFFER may lead."""

    replica: str
    backends: tuple[str, ...]
    epoch: str
    max_batch_tokens: int = 16384
    max_students: int = 64
    student_timeout_s: float = 60.0
    deterministic: bool = False
    raises_failures: bool = False
    destinations: Destinations = field(default_factory=Destinations)


@dataclass(kw_only=True)
class Student:
    """One connected student: who it is, and where its slots are. `sender`: None until its channel is open, and once it
    has ended. `ending`: how it did; all that is awaited then is what the student says of it."""

    name: str
    hello: Hello
    expires_s: float
    offer: Offer | None = None
    sender: Sender | None = None
    ending: str | None = None
    #: Puts under way: which fill, and how many bytes of states it keeps alive.
    tickets: dict[Ticket, tuple[FillId, int]] = field(default_factory=dict)

    def is_of(self, hello: Hello) -> bool:
        """Whether the very same process says hello again."""
        own = self.hello
        return (own.run, own.rank, own.epoch) == (hello.run, hello.rank, hello.epoch)

    @property
    def shortcoming(self) -> str:
        """What it is dropped for once it is overdue."""
        if self.ending is not None:
            return self.ending
        return f"it said hello, and then {'offered no slots' if self.offer is None else 'its channel did not open'}"


@dataclass(kw_only=True, eq=False)
class Opening:
    """A channel that a thread opens. `result`: there is room for it before the thread begins; None: none yet, or the
    thread ended without one, for which there may have been no memory."""

    student: Student
    result: Sender | BaseException | None = None
    thread: threading.Thread = field(init=False)

    @property
    def has_ended(self) -> bool:
        return self.result is not None or not self.thread.is_alive()


class Students:
    """Not thread-safe: the service's lock guards it. Only the threads that open and close channels run beside it."""

    def __init__(
        self, model: TeacherModel, config: ServiceConfig, *, wake: Callable[[], None], complaints: Complaints
    ) -> None:
        """wake: called from another thread when `opened` has news."""
        self._model = model
        self._config = config
        self._wake = wake
        self._complaints = complaints
        self._students: dict[str, Student] = {}
        self._openings: list[Opening] = []
        self._closings: set[threading.Thread] = set()

    def __iter__(self) -> Iterator[Student]:
        return iter(tuple(self._students.values()))

    def get(self, name: str) -> Student | None:
        return self._students.get(name)

    def greet(self, name: str, hello: Hello, *, draining: bool, now_s: float) -> Welcome | Denied | Goodbye:
        """The answer to a stranger's HELLO. After WELCOME it is a student; it may try again after Goodbye, not after
        Denied."""
        mismatch = self._mismatch(hello)
        if mismatch is not None:
            self._complaints.say(f"refused rank {hello.rank} of run {hello.run}: {mismatch}", now_s=now_s)
            return Denied(reason=mismatch)
        if draining:
            return Goodbye(reason=f"replica {self._config.replica} is going away")
        if self._num_places >= self._config.max_students:
            return Goodbye(reason=f"{self._num_places} students are here; allowed: {self._config.max_students}")
        expires_s = now_s + self._config.student_timeout_s
        self._students[name] = Student(name=name, hello=hello, expires_s=expires_s)
        model = self._model
        return Welcome(
            replica=self._config.replica,
            epoch=self._config.epoch,
            fingerprint=model.fingerprint,
            model=model.name,
            head=model.head_info(),
            token_map_hash=model.token_map_hash,
            wire_dtypes=model.wire_dtypes,
            max_rows=self._config.max_batch_tokens,
            max_tokens=self._config.max_batch_tokens,
            max_document_tokens=min(
                self._config.max_batch_tokens, model.max_positions or self._config.max_batch_tokens
            ),
            host_id=host_id(),
            backends=self._config.backends,
        )

    def in_the_way_of(self, hello: Hello) -> list[Student]:
        """Former sessions of the very process that says hello, where they take the place that it needs. A cut link ends
        a session for one side only; this one would be silent for a long time before it was dropped."""
        if self._num_places < self._config.max_students:
            return []
        return [one for one in self if one.is_of(hello)]

    def done_with(self, hello: Hello) -> list[Student]:
        """Students whose channel has ended and whose last word is awaited no longer, now that somebody says hello: the
        same one in a former session, and all that are more than there are places."""
        ending = [one for one in self if one.ending is not None]
        num_too_many = len(ending) - self._config.max_students
        return [one for place, one in enumerate(ending) if place < num_too_many or one.is_of(hello)]

    @property
    def _num_places(self) -> int:
        """Students, and those that left while their channel was being opened: each has a thread and a socket yet. Of
        one whose channel has ended nothing is left but its name."""
        left_opening = sum(self.get(one.student.name) is not one.student for one in self._openings)
        return left_opening + sum(one.ending is None for one in self)

    def open(self, student: Student, offer: Offer, *, now_s: float) -> None:
        """Begin to open the channel that an OFFER describes; `opened` tells how it ended.

        Raises RemoteProtocolError: the offer is not what WELCOME allowed. Raises TransportError: no descriptors are
        left for it."""
        # WELCOME's list also says which of them have RDMA, by names that are none of a backend.
        backends = [name for name in self._config.backends if name in names(same_process=True)]
        if offer.backend not in backends:
            raise RemoteProtocolError(f"transport {offer.backend!r}; allowed: {', '.join(backends)}")
        if offer.wire_dtype not in self._model.wire_dtypes:
            allowed = ", ".join(dtype.value for dtype in self._model.wire_dtypes)
            raise RemoteProtocolError(f"wire dtype {offer.wire_dtype.value}; allowed: {allowed}")
        if student.hello.host_id != host_id() and load(offer.backend).capabilities().same_host_only:
            # A path or a process id from another machine would mean something else here.
            raise RemoteProtocolError(f"transport {offer.backend!r} between two hosts; allowed: within one")
        needed = MIN_FREE_DESCRIPTORS + DESCRIPTORS_A_LINK * len(self._openings)
        check_descriptors(needed, what="the teacher, for one more channel,")
        self._config.destinations.check(offer)
        student.offer = offer
        # By then the opening has ended by itself, or never will.
        student.expires_s = now_s + 2 * OPEN_TIMEOUT_S
        opening = Opening(student=student)
        opening.thread = threading.Thread(target=self._open, args=(opening, offer), name="teacher-open", daemon=True)
        try:
            opening.thread.start()
        except RuntimeError as error:  # no more threads for this user or container
            raise TransportError(f"the teacher can't open a channel: {error}; raise its limit of threads") from error
        self._openings.append(opening)

    def _open(self, opening: Opening, offer: Offer) -> None:
        try:
            opening.result = load(offer.backend).open_sender(
                offer.description,
                num_slots=offer.num_slots,
                slot_bytes=offer.slot_bytes,
                timeout_s=OPEN_TIMEOUT_S,
            )
        except BaseException as error:  # noqa: BLE001 - it costs this student its channel, not the others their teacher
            opening.result = error
        self._wake()

    def opened(self) -> list[tuple[Student, DisaggKDError | None]]:
        """The students whose channel is open now, or could not be opened and why; each once."""
        news: list[tuple[Student, DisaggKDError | None]] = []
        for opening in [one for one in self._openings if one.has_ended]:
            opening.thread.join()
            self._openings.remove(opening)
            student, result = opening.student, opening.result
            if self._students.get(student.name) is not student:  # it left meanwhile
                if isinstance(result, Sender):
                    result.close()
            elif isinstance(result, Sender):
                student.sender = result
                news.append((student, None))
            elif isinstance(result, DisaggKDError):
                news.append((student, result))
            else:
                why = "ended without a word" if result is None else f"{type(result).__name__}: {result}"
                news.append((student, RemoteProtocolError(f"its channel: {why}")))
        return news

    def overdue(self, now_s: float) -> list[Student]:
        """Those that never offered their slots in time, whose channel did not open in time, or that had a moment to say
        why it ended."""
        return [s for s in self._students.values() if s.sender is None and now_s >= s.expires_s]

    def next_deadline_s(self) -> float | None:
        return min((s.expires_s for s in self._students.values() if s.sender is None), default=None)

    def channel_ended(self, student: Student, error: str, *, now_s: float) -> None:
        """Close it, and give the student a moment to say why."""
        if student.sender is not None:
            self._close(student.sender)
        student.sender, student.ending, student.expires_s = None, error, now_s + LAST_WORD_S
        student.offer = None  # which may be a megabyte long
        student.tickets.clear()

    def remove(self, name: str) -> Student | None:
        """Forget a student and close its channel, if it is one."""
        student = self._students.pop(name, None)
        if student is not None and student.sender is not None:
            self._close(student.sender)
        return student

    def close(self) -> None:
        """Forget all; returns once no opening thread is left, or those that are have had their time."""
        for student in self:
            self.remove(student.name)
        give_up_s = time.monotonic() + 2 * OPEN_TIMEOUT_S
        for thread in self._closings:
            thread.join(max(0.0, give_up_s - time.monotonic()))
            if thread.is_alive():
                logger.warning("the channel of a student is still being closed; left behind")
        for opening in self._openings:
            opening.thread.join(max(0.0, give_up_s - time.monotonic()))
            if opening.thread.is_alive():
                logger.warning("student %s: its channel is still being opened; left behind", opening.student.name)
        self.opened()

    def _close(self, sender: Sender) -> None:
        """Elsewhere: saying goodbye to one that has stopped may take a while, and a rack that is gone has many."""
        self._closings = {thread for thread in self._closings if thread.is_alive()}
        thread = threading.Thread(target=sender.close, name="teacher-close", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads for this user or container
            sender.close()
        else:
            self._closings.add(thread)

    def _mismatch(self, hello: Hello) -> str | None:
        """What makes this student and this teacher no pair, with both values."""
        model = self._model
        if hello.token_map_hash != model.token_map_hash:
            return (
                f"the tokenizers differ: the student's token map hashes to {hello.token_map_hash[:16]}, the "
                f"teacher's to {model.token_map_hash[:16]}; allowed: the same token for every id"
            )
        if hello.vocab_size > model.head_spec.vocab_size:
            return f"the student's vocabulary has {hello.vocab_size} tokens, the teacher's {model.head_spec.vocab_size}"
        return None
