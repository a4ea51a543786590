"""One life of a replica: the shell of `ring.core.teacher` as `teacher.service` is, in virtual time; it may lie."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from zlib import crc32

from ring.core.config import TeacherConfig
from ring.core.messages import (
    Cancel,
    FillHeader,
    FillId,
    Goodbye,
    HeadInfo,
    HeadRequest,
    Hello,
    Message,
    Offer,
    Ping,
    Pong,
    Ready,
    Refused,
    Request,
    Welcome,
    WireDtype,
)
from ring.core.teacher import DropStudent, Put, Refuse, TeacherAction, TeacherMachine, Work
from tests.simulation.clock import Process, Violation
from tests.simulation.connection import Connection
from tests.simulation.data_plane import UNREADABLE_S, Payload, Sender
from tests.simulation.invariants import Fairness
from tests.simulation.memory import ROW_BYTES, states

if TYPE_CHECKING:
    from tests.simulation.world import World

PASS_S = 0.01
#: As teacher.service: a student with so many bytes unsent is passed over.
MAX_UNSENT_PASSES = 2


class Lie(enum.Enum):
    """How an answer may be wrong; its header and its bytes agree with each other, but for CRC."""

    ROWS = "row count"
    DTYPE = "dtype"
    HASH = "input hash"
    FINGERPRINT = "fingerprint"
    STUDENT_EPOCH = "student epoch"
    TEACHER_EPOCH = "teacher epoch"
    FILL = "fill"
    BYTES = "bytes"
    SIZE = "size"
    CRC = "a flipped bit"


@dataclass(kw_only=True, eq=False)
class Guest:
    """One student as this replica knows it, in one session."""

    connection: Connection
    epoch: str
    offer: Offer | None = None


class ReplicaLife(Process):
    def __init__(self, world: World, *, host: str, number: int, fingerprint: str, seconds_per_token: float) -> None:
        super().__init__(world.clock, f"{host}.{number}")
        scenario = world.scenario
        self.world = world
        self.epoch = self.name
        self.fingerprint = fingerprint
        self.seconds_per_token = seconds_per_token
        self.slowness = 1.0
        self.lies = False
        self.fails = False
        self.breaks = False
        self.machine = TeacherMachine(
            TeacherConfig(
                max_batch_tokens=scenario.max_batch_tokens,
                max_rows=1000,
                max_tokens=1000,
                max_students=8,
                student_timeout_s=scenario.student_timeout_s,
            )
        )
        self.guests: dict[str, Guest] = {}
        self._closing: list[Sender] = []
        self.answered: set[tuple[str, FillId]] = set()
        self.fairness = Fairness(self.machine, max_batch_tokens=scenario.max_batch_tokens)
        self._rng = world.rng(f"replica {self.name}")
        self._actions: list[TeacherAction] = []
        self._computing = False
        self._draining = False
        self._num_lies = self._rng.randrange(len(Lie))
        self._only_lie = self._rng.choice(tuple(Lie)) if self._rng.random() < 0.4 else None

    # ---- events --------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        self._carry_out()
        self._compute()
        if self._draining and self.machine.drained:
            self._leave()
        if self.alive:
            self.wake_at(self.machine.next_deadline_s())
            self.world.checks.replica(self)

    def on_timer(self) -> None:
        now_s = self.clock.now_s
        deadline_s = self.machine.next_deadline_s()
        if deadline_s is None or deadline_s > now_s:
            return
        self._actions += self.machine.on_timer(now_s=now_s)
        after_s = self.machine.next_deadline_s()
        if after_s is not None and after_s <= now_s:
            raise Violation(f"{self.name}: the timer was called at {now_s}, and something is due at {after_s} still")

    def hear(self, connection: Connection, message: Message) -> None:
        name, now_s = connection.name, self.clock.now_s
        guest = self.guests.get(name)
        if guest is not None:
            self.machine.heard(name, now_s=now_s)
        match message:
            case Hello(epoch=epoch) if guest is None:
                self._greet(connection, epoch)
            case Ping(token=token):
                connection.tell_student(Pong(token=token))
            case Pong():
                pass
            case Goodbye(reason=reason):
                self._drop(name, reason, say=False)
            case Offer() if guest is not None and guest.offer is None:
                guest.offer = message
                self.later(0.001, lambda: self._join(guest), source="opener")
            case Request() if guest is not None and guest.offer is not None and self.breaks:
                self.later(self.world.scenario.breaks_after_s, lambda: self._break(guest), source="breaking")
            case Request() if guest is not None and guest.offer is not None:
                self._actions += self.machine.request(name, message, now_s=now_s)
            case Cancel() if guest is not None and guest.offer is not None:
                self._actions += self.machine.cancel(name, message.fill, now_s=now_s)
            case Request() | Cancel() if guest is None:
                connection.tell_student(Goodbye(reason="unknown student"))
            case _:
                self._drop(name, f"{type(message).__name__} is illegal now")

    def connection_ended(self, connection: Connection) -> None:
        self._drop(connection.name, "its connection ended", say=False)

    def drain(self) -> None:
        self._draining = True
        self.machine.drain(now_s=self.clock.now_s)

    def die(self) -> None:
        super().die()
        for guest in self.guests.values():
            guest.connection.replica_closes()
            if guest.connection.sender is not None:
                guest.connection.sender.die()
        for sender in self._closing:
            if sender.busy:
                sender.die()

    # ---- students ------------------------------------------------------------------------------------------------

    def _greet(self, connection: Connection, epoch: str) -> None:
        if self._draining:
            connection.tell_student(Goodbye(reason="going away"))
            return
        self.guests[connection.name] = Guest(connection=connection, epoch=epoch)
        head = HeadInfo(
            hidden_size=4,
            vocab_size=64,
            real_vocab=64,
            has_bias=False,
            logit_softcap=None,
            logit_scale=1.0,
            dtype=WireDtype.BF16,
            num_bytes=512,
            sha256="",
        )
        connection.tell_student(
            Welcome(
                replica=self.name,
                epoch=self.epoch,
                fingerprint=self.fingerprint,
                model="model",
                head=head,
                token_map_hash="",
                wire_dtypes=(WireDtype.BF16,),
                max_rows=1000,
                max_tokens=1000,
                max_document_tokens=1000,
                host_id="host",
                backends=("shm",),
            )
        )

    def _join(self, guest: Guest) -> None:
        name, offer = guest.connection.name, guest.offer
        if self.guests.get(name) is not guest or offer is None:
            return
        objections = self.machine.student_joined(
            name, num_slots=offer.num_slots, slot_bytes=offer.slot_bytes, row_bytes=ROW_BYTES, now_s=self.clock.now_s
        )
        self._actions += objections
        if not objections:
            guest.connection.tell_student(Ready())

    def _drop(self, name: str, reason: str, *, say: bool = True) -> None:
        guest = self.guests.pop(name, None)
        if guest is None:
            return
        self.world.log(f"{self.name}: {name} leaves: {reason}")
        if say:
            guest.connection.tell_student(Goodbye(reason=reason))
        guest.connection.replica_closes()
        if guest.connection.sender is not None:
            guest.connection.sender.close()
            # It may be in the middle of a copy, which ends it, or the death of this process does.
            self._closing = [*(sender for sender in self._closing if sender.busy), guest.connection.sender]
        self._actions += self.machine.student_left(name, now_s=self.clock.now_s)

    def _break(self, guest: Guest) -> None:
        if self.guests.get(guest.connection.name) is guest:
            self._drop(guest.connection.name, "its connection breaks", say=False)

    def _leave(self) -> None:
        self.world.met["replica drained"] += 1
        for name in tuple(self.guests):
            self._drop(name, "drained")
        self.die()

    # ---- computing -----------------------------------------------------------------------------------------------

    def _compute(self) -> None:
        if self._computing:
            return
        most_bytes = MAX_UNSENT_PASSES * self.world.scenario.max_batch_tokens * ROW_BYTES
        avoid = {name for name, guest in self.guests.items() if self._unsent_bytes(guest) >= most_bytes}
        self.fairness.before(avoid)
        batch = self.machine.next_batch(
            now_s=self.clock.now_s,
            max_requests=1 if self.world.scenario.one_request_a_pass else None,
            avoid=avoid,
        )
        self.fairness.after(batch)
        self._actions += batch.actions
        self._carry_out()
        if not batch.work:
            return
        self._computing = True
        tokens = sum(_tokens(work) for work in batch.work)
        duration_s = (PASS_S + tokens * self.seconds_per_token) * self.slowness
        self.later(duration_s * self._rng.uniform(0.8, 1.2), lambda: self._computed(list(batch.work)), source="pass")

    def _computed(self, work: Sequence[Work]) -> None:
        """A pass is over; its answers come one after the other."""
        now_s = self.clock.now_s
        if self.fails:
            self._actions += self.machine.failed(work, "out of memory", now_s=now_s)
            self._computing = False
            return
        self._actions += self.machine.computed(work[:1], now_s=now_s)
        if len(work) == 1:
            self._computing = False
        else:
            self.later(0.001, lambda: self._computed(work[1:]), source="pass")

    def _unsent_bytes(self, guest: Guest) -> int:
        return 0 if guest.connection.sender is None else guest.connection.sender.unsent_bytes

    # ---- actions -------------------------------------------------------------------------------------------------

    def _carry_out(self) -> None:
        while self._actions:
            action = self._actions.pop(0)
            if self.world.traces:
                self.world.log(f"{self.name}: {action}")
            match action:
                case Put():
                    self._answer(action.student, action.request.fill)
                    guest = self.guests.get(action.student)
                    if guest is not None:
                        self._put(guest, action)
                case Refuse(student=name, fill=fill, code=code, message=message):
                    self._answer(name, fill)
                    guest = self.guests.get(name)
                    if guest is not None:
                        guest.connection.tell_student(Refused(fill=fill, code=code, message=message))
                case DropStudent(student=name, reason=reason):
                    self._drop(name, reason)

    def _answer(self, name: str, fill: FillId) -> None:
        """Every request is answered once."""
        if (name, fill) in self.answered:
            raise Violation(f"{self.name}: {fill} of {name} is answered a second time")
        self.answered.add((name, fill))

    def _put(self, guest: Guest, put: Put) -> None:
        sender, fill = guest.connection.sender, put.request.fill
        if sender is None:
            return
        header, data = self._content(guest, put)
        name = guest.connection.name
        sender.put(Payload(fill=fill, header=header, data=data, sent=lambda: self._sent(name, fill)))

    def _sent(self, name: str, fill: FillId) -> None:
        self._actions += self.machine.sent(name, fill, now_s=self.clock.now_s)

    def _content(self, guest: Guest, put: Put) -> tuple[FillHeader, bytes]:
        request = put.request
        payload = request.payload
        num_rows = 0 if isinstance(payload, HeadRequest) else payload.num_rows
        num_bytes = payload.num_bytes if isinstance(payload, HeadRequest) else num_rows * ROW_BYTES
        header = FillHeader(
            student_epoch=guest.epoch,
            teacher_epoch=self.epoch,
            fingerprint=self.fingerprint,
            fill=request.fill,
            num_rows=num_rows,
            dtype=WireDtype.BF16,
            num_bytes=num_bytes,
            input_hash=payload.input_hash,
            forward_s=put.forward_s,
            queue_s=put.queue_s,
            idle_s=put.idle_s,
        )
        crc_is_on = guest.offer is not None and guest.offer.crc
        lie = self._next_lie(crc_is_on=crc_is_on) if self.lies else None
        header = _with_lie(header, lie)
        if lie is Lie.STUDENT_EPOCH and self._num_lies // len(Lie) % 2:  # every other one can't even be read
            header = dataclasses.replace(header, idle_s=UNREADABLE_S)
        data = states(
            student_epoch=header.student_epoch,
            teacher_epoch=header.teacher_epoch,
            fill=header.fill,
            input_hash=header.input_hash,
            num_bytes=num_bytes - ROW_BYTES if lie is Lie.SIZE else num_bytes,
        )
        if lie is Lie.SIZE:
            header = dataclasses.replace(header, num_bytes=len(data))
        crc = crc32(data) if crc_is_on else None
        if lie is Lie.CRC:
            data = bytes([data[0] ^ 1]) + data[1:]
        return dataclasses.replace(header, crc=crc), data

    def _next_lie(self, *, crc_is_on: bool) -> Lie:
        """Always the same, or each in turn. A flipped bit is seen only where CRCs are on."""
        self._num_lies += 1
        lie = self._only_lie or tuple(Lie)[self._num_lies % len(Lie)]
        return Lie.HASH if lie is Lie.CRC and not crc_is_on else lie


def _with_lie(header: FillHeader, lie: Lie | None) -> FillHeader:
    changes: dict[Lie, dict[str, object]] = {
        Lie.ROWS: {"num_rows": header.num_rows + 1},
        Lie.DTYPE: {"dtype": WireDtype.FP16},
        Lie.HASH: {"input_hash": b"other"},
        Lie.FINGERPRINT: {"fingerprint": "other"},
        Lie.STUDENT_EPOCH: {"student_epoch": "other"},
        Lie.TEACHER_EPOCH: {"teacher_epoch": "other"},
        Lie.FILL: {"fill": header.fill._replace(seq=header.fill.seq + 1)},
        Lie.BYTES: {"num_bytes": header.num_bytes + 1},
    }
    return header if lie is None else dataclasses.replace(header, **changes.get(lie, {}))  # type: ignore[arg-type]


def _tokens(work: Work) -> int:
    payload = work.request.payload
    return 12 if isinstance(payload, HeadRequest) else payload.num_tokens
