"""One life of a student: the shell of `ring.core.student` as `ring.pump` and `ring.session` are, in virtual time."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING
from zlib import crc32

from ring.core.actions import (
    Action,
    Arm,
    CancelFill,
    Deliverable,
    Disarm,
    DropReplica,
    Fatal,
    Lost,
    Note,
    Send,
    SendPing,
)
from ring.core.config import Expectation, RingConfig
from ring.core.messages import (
    Cancel,
    FillId,
    Goodbye,
    Hello,
    Message,
    Offer,
    Payload,
    Ping,
    Pong,
    Ready,
    Refused,
    Welcome,
    WireDtype,
)
from ring.core.student import StudentMachine
from tests.simulation.clock import Process, Violation
from tests.simulation.connection import Connection
from tests.simulation.data_plane import UNREADABLE_S, Receiver
from tests.simulation.memory import FINGERPRINT, SLOT_BYTES, SlotMemory
from tests.simulation.trainer import Trainer

if TYPE_CHECKING:
    from tests.simulation.world import World

RECONNECT_MIN_S, RECONNECT_MAX_S = 0.25, 5.0
HANDSHAKE_TIMEOUT_S = 10.0


class Phase(enum.Enum):
    HELLO_SENT = "hello sent"
    OFFERED = "offered"
    READY = "ready"


@dataclass(kw_only=True, eq=False)
class Session:
    """One session with one replica."""

    replica: str
    connection: Connection | None
    crc: bool
    phase: Phase = Phase.HELLO_SENT
    receiver: Receiver | None = None
    leaving: bool = False
    closed: bool = False

    @property
    def is_up(self) -> bool:
        return self.phase is Phase.READY and not self.closed


@dataclass(kw_only=True)
class Counts:
    """What this shell did, to be held against the machine's own counts (R9)."""

    sends: int = 0
    arrivals: int = 0
    late: int = 0
    refusals: int = 0
    submitted: int = 0
    released: int = 0


class StudentLife(Process):
    def __init__(self, world: World, *, rank: int, number: int, position: int) -> None:
        super().__init__(world.clock, f"s{rank}.{number}")
        scenario = world.scenario
        self.world = world
        self.rank = rank
        self.epoch = self.name
        self.config = RingConfig(
            depth=scenario.depth,
            num_spares=scenario.num_spares,
            max_pending=scenario.max_pending,
            request_timeout_s=scenario.request_timeout_s,
            peer_timeout_s=scenario.peer_timeout_s,
            ping_interval_s=min(1.0, scenario.peer_timeout_s / 3),
            teacher_timeout_s=scenario.teacher_timeout_s,
        )
        self.machine = StudentMachine(self.config, epoch=self.epoch, fingerprint=FINGERPRINT, now_s=self.clock.now_s)
        self.memory = SlotMemory(self.config.num_slots, SLOT_BYTES, self._guard)
        self.sessions: dict[str, Session] = {}
        self.fencing: list[Receiver] = []
        self.counts = Counts()
        self.ended: str | None = None
        self.num_accepted = 0
        self.last_accepted_s = self.clock.now_s
        self._backoff_s: dict[str, float] = {}
        self._actions: deque[Action] = deque()
        self.trainer = Trainer(
            self,
            world.rng(f"trainer {self.name}"),
            position=position,
            trained=lambda seq: world.trained(rank, seq),
            durable=lambda position: world.durable(rank, position),
        )
        for name in world.hosts:
            self._actions.extend(self.machine.replica_down(name, error="no answer yet", now_s=self.clock.now_s))
            self._connect(name)

    # ---- for the trainer -----------------------------------------------------------------------------------------

    def submit(self, seq: int, payload: Payload, expect: Expectation) -> None:
        self.counts.submitted += 1
        self._actions.extend(self.machine.submit(seq, payload, expect, now_s=self.clock.now_s))

    def release(self, seq: int) -> None:
        self.counts.released += 1
        self._actions.extend(self.machine.release(seq, now_s=self.clock.now_s))

    # ---- events --------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        self._carry_out()
        for session in tuple(self.sessions.values()):
            self._poll(session)
        self._collect_fences()
        while self.alive and (self.trainer.called or self._actions):
            if self.trainer.called and self.ended is None:
                self.trainer.advance()
            self._carry_out()
            if self.ended is not None:
                break
        if self.ended is not None:
            self.world.student_lost(self, self.ended)
        elif self.trainer.done:
            self.world.student_done(self)
        if self.alive:
            self.wake_at(self.machine.next_deadline_s())
            self.world.checks.student(self)

    def on_timer(self) -> None:
        now_s = self.clock.now_s
        deadline_s = self.machine.next_deadline_s()
        if deadline_s is None or deadline_s > now_s:
            return
        self._actions.extend(self.machine.on_timer(now_s=now_s))
        after_s = self.machine.next_deadline_s()
        if after_s is not None and after_s <= now_s:
            raise Violation(f"{self.name}: the timer was called at {now_s}, and something is due at {after_s} still")

    def hear(self, session: Session, message: Message) -> None:
        if session.closed:
            return
        name, now_s = session.replica, self.clock.now_s
        assert session.connection is not None
        if session.phase is Phase.READY:
            self.machine.heard(name, now_s=now_s)
        match message:
            case Pong():
                pass
            case Ping(token=token):
                session.connection.tell_replica(Pong(token=token))
            case Goodbye(reason=reason):
                self._lose_session(session, f"it said goodbye: {reason}")
            case Welcome(fingerprint=fingerprint) if session.phase is Phase.HELLO_SENT:
                if fingerprint != FINGERPRINT:
                    self._end_session(session, f"fingerprint {fingerprint}", backoff_s=RECONNECT_MAX_S)
                else:
                    self._offer(session, message)
            case Ready() if session.phase is Phase.OFFERED:
                session.phase = Phase.READY
                self._backoff_s[name] = RECONNECT_MIN_S
                epoch = session.connection.replica.epoch
                self._actions.extend(self.machine.replica_up(name, epoch=epoch, fingerprint=FINGERPRINT, now_s=now_s))
            case Refused(fill=fill, code=code, message=text) if session.phase is Phase.READY:
                self.counts.refusals += 1
                self._actions.extend(self.machine.refused(name, fill, code, text, now_s=now_s))
            case _:
                self._end_session(session, f"{type(message).__name__} is illegal in the phase {session.phase.value}")

    def connection_ended(self, session: Session) -> None:
        if not session.closed:
            self._lose_session(session, "its connection ended")

    # ---- sessions ------------------------------------------------------------------------------------------------

    def _connect(self, name: str) -> None:
        if self.ended is not None or name in self.sessions:
            return
        session = Session(replica=name, connection=None, crc=self.world.hosts[name].plan.crc)
        self.sessions[name] = session
        session.connection = self.world.connect(self, session)
        if session.connection is None:
            self.later(0.01, lambda: self._give_up_on(session, "connection refused"))
            return
        session.connection.tell_replica(
            Hello(
                run="run",
                rank=self.rank,
                world_size=self.world.scenario.num_students,
                epoch=self.epoch,
                token_map_hash="",
                vocab_size=64,
                host_id="host",
                backends=("shm",),
            )
        )
        self.later(HANDSHAKE_TIMEOUT_S, lambda: self._give_up_on(session, "no handshake in time"))

    def _give_up_on(self, session: Session, error: str) -> None:
        if not session.closed and session.phase is not Phase.READY:
            self._end_session(session, error)

    def _offer(self, session: Session, welcome: Welcome) -> None:
        connection = session.connection
        assert connection is not None
        session.receiver = self.world.open_channel(self, connection)
        session.phase = Phase.OFFERED
        connection.tell_replica(
            Offer(
                backend="shm",
                description={},
                num_slots=self.config.num_slots,
                slot_bytes=SLOT_BYTES,
                wire_dtype=WireDtype.BF16,
                crc=session.crc,
            )
        )

    def _lose_session(self, session: Session, error: str) -> None:
        """As ring.pump: what was whole before the end is taken first, and nothing more is asked meanwhile."""
        if session.phase is Phase.READY and not session.leaving:
            session.leaving = True
            self.machine.leaving(session.replica, now_s=self.clock.now_s)
            self._poll(session)
        if not session.closed:
            self._end_session(session, error)

    def _end_session(self, session: Session, error: str, *, backoff_s: float | None = None) -> None:
        """As ring.pump: the machine is told, its fills are disarmed while the receiver is there, then all is closed."""
        name = session.replica
        session.closed = True
        self.world.log(f"{self.name}: the session with {name} ends: {error}")
        self._actions.extend(self.machine.replica_down(name, error=error, now_s=self.clock.now_s))
        self._carry_out()
        if self.sessions.get(name) is session:
            del self.sessions[name]
        self._close(session)
        wait_s = backoff_s or self._backoff_s.get(name, RECONNECT_MIN_S)
        self._backoff_s[name] = min(2 * wait_s, RECONNECT_MAX_S)
        self.later(wait_s, lambda: self._connect(name))

    def _close(self, session: Session) -> None:
        session.closed = True
        if session.connection is not None:
            session.connection.student_closes()
        if session.receiver is not None:
            session.receiver.close()
            self.fencing.append(session.receiver)

    def finish(self) -> None:
        """Say goodbye, and end."""
        for session in self.sessions.values():
            if session.connection is not None:
                session.connection.tell_replica(Goodbye(reason="the student is done"))
        self.die()

    def die(self) -> None:
        """Whatever it was doing. The kernel closes its sockets; its memory stays mapped where it was handed over."""
        super().die()
        for session in self.sessions.values():
            self._close(session)
        self.sessions.clear()

    # ---- fills ---------------------------------------------------------------------------------------------------

    def _poll(self, session: Session) -> None:
        receiver = session.receiver
        while receiver is not None and not session.closed:
            arrivals = receiver.poll()
            for number, arrival in enumerate(arrivals):
                if session.closed:
                    # A wrong one among them has ended the session: the others were given up, whatever they are.
                    self.counts.late += len(arrivals) - number
                    self._actions.extend(
                        self.machine.came_late(session.replica, len(arrivals) - number, now_s=self.clock.now_s)
                    )
                    break
                data = self.memory.read(arrival.fill.slot, arrival.num_bytes)
                crc = crc32(data) if session.crc else None
                self.counts.arrivals += 1
                self.machine.heard(session.replica, now_s=self.clock.now_s)
                fill, header, now_s = arrival.fill, arrival.header, self.clock.now_s
                if header.idle_s == UNREADABLE_S:
                    self._actions.extend(self.machine.garbled(session.replica, fill, "no header", now_s=now_s))
                else:
                    self._actions.extend(
                        self.machine.arrived(session.replica, fill, arrival.num_bytes, header, crc, now_s=now_s)
                    )
                self._carry_out()
            if not arrivals:
                if late := receiver.newly_dropped():
                    self.counts.late += late
                    self._actions.extend(self.machine.came_late(session.replica, late, now_s=self.clock.now_s))
                    self._carry_out()
                if receiver.lost is not None and not session.closed:
                    self._lose_session(session, receiver.lost)
                return

    def receivers(self) -> list[Receiver]:
        """All that may still write into this life's memory."""
        return [*self.fencing, *(s.receiver for s in self.sessions.values() if s.receiver is not None)]

    def _collect_fences(self) -> None:
        for receiver in self.receivers():
            for fill in receiver.poll_fenced():
                self._actions.extend(self.machine.fenced(fill, now_s=self.clock.now_s))
        self.fencing = [receiver for receiver in self.fencing if receiver.pending]
        self._carry_out()

    def _guard(self, fill: FillId) -> None:
        """A write is about to land in this life's memory."""
        if self.alive:
            self.world.checks.write(self, fill)

    # ---- actions -------------------------------------------------------------------------------------------------

    def _carry_out(self) -> None:
        while self._actions:
            self._act(self._actions.popleft())

    def _act(self, action: Action) -> None:
        if self.ended is not None and isinstance(action, Arm | Send | Lost | Fatal):
            raise Violation(f"{self.name}: {action} after the end of the run")
        if self.world.traces:
            self.world.log(f"{self.name}: {action}")
        match action:
            case Deliverable():
                self.trainer.called = True
            case Lost(message=message):
                self.ended = message
            case Fatal(message=message):
                raise Violation(f"{self.name}: no request was invalid, yet: {message}")
            case Note():
                pass
            case DropReplica(replica=name, error=error):
                session = self.sessions.get(name)
                if session is None or session.closed:
                    raise Violation(f"{self.name}: {name} is dropped without a session")
                self._end_session(session, error)
            case Disarm(replica=name, fill=fill, refused=refused):
                receiver = self._receiver(name)
                if receiver is None or receiver.disarm(fill, refused=refused):
                    self._actions.extend(self.machine.fenced(fill, now_s=self.clock.now_s))
            case Arm() | Send() | CancelFill() | SendPing():
                self._tell(action)

    def _receiver(self, name: str) -> Receiver | None:
        """That of the session which is there, or just ending."""
        session = self.sessions.get(name)
        return None if session is None else session.receiver

    def _tell(self, action: Arm | Send | CancelFill | SendPing) -> None:
        session = self.sessions.get(action.replica)
        if session is None or session.closed or session.leaving:
            return  # it went down after the machine decided this, and the machine has been told, or will be
        if session.phase is not Phase.READY or session.connection is None or session.receiver is None:
            raise Violation(f"{self.name}: {action}, but {action.replica} is not up")
        match action:
            case Arm(fill=fill, num_bytes=num_bytes):
                session.receiver.arm(fill, num_bytes)
            case Send(request=request):
                self.counts.sends += 1
                if session.receiver.armed.get(request.fill.slot, (None, 0))[0] != request.fill:
                    raise Violation(f"{self.name}: {request.fill} is asked for and not armed")
                session.connection.tell_replica(request)
            case CancelFill(fill=fill):
                session.connection.tell_replica(Cancel(fill=fill))
            case SendPing():
                session.connection.tell_replica(Ping(token=0))
