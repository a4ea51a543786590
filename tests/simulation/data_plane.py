"""The data plane in three styles, after the contract of transport.contract and what each backend does with it.

- `shm`: the replica writes the slot itself, in two halves; its completion comes over a socket of the host. A given-up
  fill can be written until that completion came, the replica gave its word, or its end of the socket closed.
- `tcp`: the student places what arrives, if it is armed then: a given-up fill is fenced at once.
- `rdma`: as tcp, but once the student has taken the announcement, the network adapters move the payload, stopped
  processes or not; a fill given up meanwhile is fenced when it has landed or the channel is closed.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from ring.core.messages import FillHeader, FillId
from tests.simulation.clock import Clock, Do, Process, Violation
from tests.simulation.memory import SlotMemory
from tests.simulation.network import Direction, Pipe

#: The `idle_s` of a header that stands for one that can't be read: the codec refuses it.
UNREADABLE_S = -1.0


class Style(enum.Enum):
    SHM = "shm"
    TCP = "tcp"
    RDMA = "rdma"


@dataclass(frozen=True, kw_only=True)
class Arrival:
    fill: FillId
    num_bytes: int
    header: FillHeader


@dataclass(kw_only=True)
class Payload:
    """One put: what is written, and what to call once its source may be reused."""

    fill: FillId
    header: FillHeader
    data: bytes
    sent: Do
    target: SlotMemory | None = None  # where its bytes go; None: nowhere

    def halves(self) -> tuple[tuple[int, bytes], tuple[int, bytes]]:
        middle = len(self.data) // 2
        return (0, self.data[:middle]), (middle, self.data[middle:])


@dataclass(kw_only=True)
class Unreliable:
    """A transport that breaks its word to report each fill once: shares of arrivals that are lost, repeated or late."""

    rng: Random
    frac: float = 0.0


class Receiver:
    """The student's end. `news` of any kind ends in `deliver` of the student, which then polls."""

    def __init__(self, memory: SlotMemory, student: Process, unreliable: Unreliable) -> None:
        self.memory = memory
        self.armed: dict[int, tuple[FillId, int]] = {}
        self.pending: set[FillId] = set()
        self.closed = False
        self.lost: str | None = None
        self.tell_sender: Callable[[], None] = lambda: None
        self._student = student
        self._unreliable = unreliable
        self._arrivals: list[Arrival] = []
        self._fenced: list[FillId] = []
        self._num_dropped = 0

    # ---- for the student's shell ---------------------------------------------------------------------------------

    def arm(self, fill: FillId, num_bytes: int) -> None:
        if fill.slot in self.armed:
            raise Violation(f"{fill}: its slot is armed for {self.armed[fill.slot][0]}")
        if any(other.slot == fill.slot for other in self.pending):
            raise Violation(f"{fill}: its slot can still be written by a fill that was given up")
        if num_bytes > self.memory.slot_bytes:
            raise Violation(f"{fill}: {num_bytes} bytes; a slot holds {self.memory.slot_bytes}")
        self.armed[fill.slot] = (fill, num_bytes)

    def disarm(self, fill: FillId, *, refused: bool) -> bool:
        """Whether the fill is fenced."""
        raise NotImplementedError

    def poll(self) -> list[Arrival]:
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

    def newly_dropped(self) -> int:
        """Payloads that came whole and that nobody waited for."""
        num_dropped, self._num_dropped = self._num_dropped, 0
        return num_dropped

    def poll_fenced(self) -> list[FillId]:
        fenced, self._fenced = self._fenced, []
        return fenced

    def will_be_fenced(self, fill: FillId) -> bool:
        return fill in self.pending or fill in self._fenced

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._arrivals.clear()
            self._give_up_armed()
            self.tell_sender()

    # ---- for the channel -----------------------------------------------------------------------------------------

    def lose(self, reason: str) -> None:
        """Nothing is written any more."""
        if self.lost is None:
            self.lost = reason
            self._fenced += sorted(self.pending)
            self.pending.clear()

    def whole(self, arrival: Arrival) -> None:
        """An armed fill is whole in its slot; the transport may still fail to say so, or say it twice."""
        self._disarm_slot(arrival.fill)
        rng = self._unreliable.rng
        fate = rng.choice(("lost", "repeated", "late")) if rng.random() < self._unreliable.frac else "told"
        if fate in ("told", "repeated"):
            self._arrivals.append(arrival)
        if fate in ("repeated", "late"):
            delay_s = rng.uniform(0.0, rng.choice((0.3, 8.0)))
            self._student.later(delay_s, lambda: self._tell(arrival), source="transport")

    def expects(self, fill: FillId, num_bytes: int) -> bool:
        return not self.closed and self.armed.get(fill.slot) == (fill, num_bytes)

    def _tell(self, arrival: Arrival) -> None:
        if not self.closed:
            self._arrivals.append(arrival)

    def _disarm_slot(self, fill: FillId) -> bool:
        if self.armed.get(fill.slot, (None, 0))[0] != fill:
            return False
        del self.armed[fill.slot]
        return True

    def _give_up_armed(self) -> None:
        raise NotImplementedError


class ShmReceiver(Receiver):
    def disarm(self, fill: FillId, *, refused: bool) -> bool:
        if refused:
            self._disarm_slot(fill)
            self.pending.discard(fill)
        if self._disarm_slot(fill) and self.lost is None:
            self.pending.add(fill)
        return fill not in self.pending

    def completed(self, arrival: Arrival) -> None:
        if self.expects(arrival.fill, arrival.num_bytes):
            self.whole(arrival)
            return
        self._num_dropped += 1
        if arrival.fill in self.pending:
            self.pending.discard(arrival.fill)
            self._fenced.append(arrival.fill)

    def _give_up_armed(self) -> None:
        fills = [fill for fill, _ in self.armed.values()]
        self.armed.clear()
        if self.lost is None:
            self.pending.update(fills)
        else:
            self._fenced += fills


class PlacingReceiver(Receiver):
    """tcp and rdma: the student's side decides where bytes go."""

    def __init__(self, memory: SlotMemory, student: Process, unreliable: Unreliable, *, rdma: bool) -> None:
        super().__init__(memory, student, unreliable)
        self._rdma = rdma
        self._moving: dict[FillId, Payload] = {}
        self._given_up: dict[FillId, Payload] = {}  # and still moving

    def announced(self, payload: Payload) -> None:
        if self.expects(payload.fill, len(payload.data)) and payload.fill not in self._moving:
            payload.target = self.memory
            self._moving[payload.fill] = payload

    def disarm(self, fill: FillId, *, refused: bool) -> bool:
        self._disarm_slot(fill)
        payload = self._moving.pop(fill, None)
        if payload is not None:
            if self._rdma:
                self._given_up[fill] = payload
                self.pending.add(fill)
            else:
                payload.target = None
        return fill not in self.pending

    def landed(self, payload: Payload) -> None:
        """All of it came."""
        fill = payload.fill
        if self._moving.get(fill) is payload:
            del self._moving[fill]
            self.whole(Arrival(fill=fill, num_bytes=len(payload.data), header=payload.header))
        else:
            self._num_dropped += 1
            if self._given_up.get(fill) is payload:
                del self._given_up[fill]
                self.pending.discard(fill)
                self._fenced.append(fill)
        payload.target = None

    def lose(self, reason: str) -> None:
        self._stop_moving()
        super().lose(reason)

    def _give_up_armed(self) -> None:
        # Closing takes the registration back: nothing moves any more.
        self._stop_moving()
        self._fenced += sorted(self.pending) + [fill for fill, _ in self.armed.values()]
        self.pending.clear()
        self.armed.clear()

    def _stop_moving(self) -> None:
        for payload in (*self._moving.values(), *self._given_up.values()):
            payload.target = None
        self._moving.clear()
        self._given_up.clear()


@dataclass(kw_only=True)
class Sender:
    """The replica's end: one put after the other. `student_gone`: it has heard that the student closed its end."""

    clock: Clock
    replica: Process
    receiver: Receiver
    to_student: Pipe
    copy_s: float
    closed: bool = False
    student_gone: bool = False
    queue: deque[Payload] = field(default_factory=deque)
    busy: bool = False

    @property
    def unsent_bytes(self) -> int:
        return sum(len(payload.data) for payload in self.queue)

    def put(self, payload: Payload) -> None:
        self.queue.append(payload)
        if not self.busy:
            self._begin()

    def close(self) -> None:
        """Once the copy that is under way has ended, nothing is written any more, and the student is told."""
        if not self.closed:
            self.closed = True
            if not self.busy:
                self._end()

    def die(self) -> None:
        """The replica's process is gone, in the middle of whatever it did."""
        self.closed = True
        self._end()

    def _end(self) -> None:
        self.queue.clear()
        self.to_student.end(lambda: self.receiver.lose("the teacher closed its end"))

    def _begin(self) -> None:
        self.busy = True
        self._start(self.queue[0])

    def _finish(self, payload: Payload) -> None:
        self.busy = False
        if self.closed:
            self._end()
            return
        self.queue.popleft()
        payload.sent()
        if self.queue and not self.busy and not self.closed:
            self._begin()

    def _start(self, payload: Payload) -> None:
        raise NotImplementedError


class ShmSender(Sender):
    def _start(self, payload: Payload) -> None:
        first, second = payload.halves()
        memory = self.receiver.memory
        memory.write(payload.fill, *first)

        def rest() -> None:
            memory.write(payload.fill, *second)
            arrival = Arrival(fill=payload.fill, num_bytes=len(payload.data), header=payload.header)
            receiver = self.receiver
            assert isinstance(receiver, ShmReceiver)
            self.to_student.send(lambda: receiver.completed(arrival))
            self._finish(payload)

        self.replica.later(self.copy_s, rest, source="copy")


class PlacingSender(Sender):
    rdma: bool = False

    def close(self) -> None:
        self.closed = True
        self._end()

    def _start(self, payload: Payload) -> None:
        receiver = self.receiver
        assert isinstance(receiver, PlacingReceiver)

        def announced() -> None:
            receiver.announced(payload)
            if self.rdma:
                self._move(payload)

        self.to_student.send(announced)
        if not self.rdma:
            self._move(payload)

    def _move(self, payload: Payload) -> None:
        receiver = self.receiver
        assert isinstance(receiver, PlacingReceiver)

        def write(begin: int, data: bytes) -> None:
            if payload.target is not None:
                payload.target.write(payload.fill, begin, data)

        def last() -> None:
            receiver.landed(payload)
            # The acknowledgement: a few bytes the other way, as fast as the copy.
            self.replica.later(self.copy_s, lambda: self._acknowledged(payload), source="transport")

        first, second = payload.halves()
        self.to_student.send(lambda: write(*first), unattended=self.rdma)
        self.to_student.send(lambda: write(*second), unattended=self.rdma)
        self.to_student.send(last)

    def _acknowledged(self, payload: Payload) -> None:
        if self.busy and self.queue and self.queue[0] is payload:
            self._finish(payload)


def open_channel(
    style: Style,
    *,
    clock: Clock,
    rng: Random,
    memory: SlotMemory,
    student: Process,
    replica: Process,
    direction: Direction,
    copy_s: float,
    unreliable: Unreliable,
) -> tuple[Receiver, Sender]:
    """Both ends of a new channel. direction: the network's way to the student, which shm does without."""
    receiver: Receiver
    if style is Style.SHM:
        receiver = ShmReceiver(memory, student, unreliable)
        direction = Direction(name=f"socket {direction.name}", min_delay_s=1e-5, max_delay_s=1e-3)
    else:
        receiver = PlacingReceiver(memory, student, unreliable, rdma=style is Style.RDMA)
    pipe = Pipe(clock, rng, direction, student)
    make = ShmSender if style is Style.SHM else PlacingSender
    sender = make(clock=clock, replica=replica, receiver=receiver, to_student=pipe, copy_s=copy_s)
    if isinstance(sender, PlacingSender):
        sender.rdma = style is Style.RDMA
    return receiver, sender
