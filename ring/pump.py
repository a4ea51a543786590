"""The pump: the thread that carries out what `ring.core.student.StudentMachine` decides.

It owns every socket and data channel, shakes hands with replicas, and tries again when one is lost. The trainer's
thread (`ring.prefetch.Ring`) touches only what is marked as shared, under `lock`, and never waits for the network.
An error of a replica ends that replica's session; only the machine decides that the run is over.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from ring.connection import RECONNECT_MAX_S, RECONNECT_MIN_S, ChannelOptions, LinkOpener, Replica
from ring.core import codec
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
from ring.core.errors import (
    ConfigError,
    DisaggKDError,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
    TeacherLost,
    TransportError,
)
from ring.core.messages import Goodbye, Hello, Refused, Welcome
from ring.core.student import StudentMachine
from ring.fences import Fences
from ring.lease import Event
from ring.session import Needs, Phase, Session, farewell
from ring.watch import Attention
from transport.contract import Fence
from transport.memory import SlotArena

logger = logging.getLogger(__name__)

#: While a released slot waits for its device event, the pump looks this often.
EVENT_POLL_S = 0.001
#: Messages of one replica in a row; then fills, the other replicas and the timers have their turn.
MESSAGES_A_TURN = 256
#: For the fills that were whole before their session ended: a replica that goes on sending may not hold up the others.
LAST_FILLS_S = 1.0


class Pump:
    """One trainer rank's connections to its replicas. Construction starts the thread, `stop` ends it."""

    def __init__(self, *, hello: Hello, links: Sequence[tuple[str, LinkOpener]], options: ChannelOptions) -> None:
        """hello: who we are; links: (name, how to connect) of each replica."""
        # Shared with the trainer's thread, under the lock; `changed` says that something worth a look happened.
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.replicas = {name: Replica(name=name, open_link=open_link) for name, open_link in links}
        self.welcome: Welcome | None = None
        self.machine: StudentMachine | None = None
        self.arena: SlotArena | None = None
        self.stopping = False
        # Released, but the device may still read: (seq, event).
        self.releasing: list[tuple[int, Event]] = []
        self._free: Callable[[int], None] = self._free_unopened
        self._needs: Needs | None = None
        self._failure: DisaggKDError | None = None
        # What ended the thread. There is room for it before: it may end because no memory is left.
        self._cause: BaseException | None = None
        self._hello = hello
        self._options = options
        self._actions: deque[Action] = deque()
        self._fences = Fences()
        self._attention = Attention(self.replicas)
        self._ever_up = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="ring-pump", daemon=True)
        self._thread.start()

    # ---- for the trainer's thread; all but `stop` under the lock ---------------------------------------------------

    def offer_slots(
        self, machine: StudentMachine, arena: SlotArena, *, needs: Needs, free: Callable[[int], None]
    ) -> None:
        """Offer the slots to every replica from now on that can do what the run needs.

        free: called with a seq whose release event has passed."""
        self.machine, self.arena, self._needs, self._free = machine, arena, needs, free
        for replica in self.replicas.values():
            # So that the machine can name it even if it never comes up.
            self._actions.extend(machine.replica_down(replica.name, error=replica.last_error, now_s=time.monotonic()))
        self.wake()

    @property
    def failure(self) -> DisaggKDError | None:
        """Why nothing can come any more. What ended the pump's thread is put into words here, on the thread that asks:
        that one may not have had the memory."""
        if self._failure is None and self._cause is not None:
            cause = self._cause
            self._failure = LocalProtocolError(f"the ring's pump failed: {type(cause).__name__}: {cause}")
            self._failure.__cause__ = cause
        return self._failure

    def post(self, actions: Iterable[Action]) -> None:
        """Have the machine's actions carried out, after those posted before."""
        self._actions.extend(actions)
        self.wake()

    def wake(self) -> None:
        """Make the thread look at what changed."""
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def last_errors(self) -> str:
        """Each replica and what was last heard of it, for a message to the user."""
        return "; ".join(f"{replica.name}: {replica.last_error}" for replica in self.replicas.values())

    def stop(self) -> None:
        """Say goodbye, close every channel and end the thread. Idempotent; call it without the lock."""
        with self.lock:
            self.stopping = True
            self.changed.notify_all()
            self.wake()
        self._thread.join()
        with self.lock:
            if self._wake_fd >= 0:
                os.close(self._wake_fd)
                self._wake_fd = -1

    def _free_unopened(self, seq: int) -> None:
        raise LocalProtocolError(f"seq {seq} was released before any slot was offered")

    # ---- the pump's thread; it takes the lock for the machine only, never while it reads or writes a channel --------

    def _run(self) -> None:
        try:
            while not self.stopping:
                if not self._turn(time.monotonic()):
                    self._sleep()
        except BaseException as error:  # noqa: BLE001 - `failure` tells the trainer's thread
            self._cause = error
        try:
            self._shut_down()
        except BaseException as error:
            if self._cause is None:  # what it failed over first is the better reason
                self._cause = error
                raise

    def _turn(self, now_s: float) -> bool:
        """One round over everything that may have happened; returns whether anything did."""
        busy = self._carry_out(now_s)
        due = self._attention.take(now_s=now_s)
        served = [replica for name, replica in self.replicas.items() if name in due or not replica.up]
        for replica in served:
            self._attention.moved(replica.name)
            if self._serve(replica, now_s):
                self._attention.call(replica.name)
        busy |= self._collect_fences(served, now_s)
        with self.lock:
            busy |= self._release_passed()
            machine = self.machine
            deadline_s = None if machine is None else machine.next_deadline_s()
            if machine is not None and deadline_s is not None and now_s >= deadline_s:
                self._actions.extend(machine.on_timer(now_s=now_s))
        return busy | self._carry_out(now_s) | self._attention.is_needed

    def _serve(self, replica: Replica, now_s: float) -> bool:
        """Connect, shake hands, take messages and fills; an error of the replica ends its session, not the ring."""
        session = replica.session
        try:
            if session is None:
                if now_s < replica.retry_at_s or self.failure is not None:
                    return False
                replica.session = Session(replica.open_link(), self._hello)
                return True
            if session.ending is not None:
                return self._hear_out(replica, session, now_s)
            busy = self._take_messages(replica, session, now_s)
            try:
                return busy | self._take_fills(replica, session, now_s)
            except TransportError as error:
                self._lose_channel(replica, session, str(error), now_s)
        except ConfigError as error:
            self._take_refusal(replica, error, now_s)
        except (TransportError, RemoteProtocolError) as error:
            self._lose_session(replica, str(error), now_s)
        except TeacherLost as error:  # of an opener that knows that this replica can't come back
            self._fail(TeacherLost(f"{replica.name}: {error}: {replica.last_error}"))
        return True

    def _take_refusal(self, replica: Replica, error: ConfigError, now_s: float) -> None:
        """This replica and this run don't fit. It is tried again all the same: it may be restarted with what fits."""
        is_news = replica.refusal is None or str(replica.refusal) != str(error)
        replica.refusal = error
        self._lose_session(replica, str(error), now_s, backoff_s=RECONNECT_MAX_S)
        refusals = [other.refusal for other in self.replicas.values() if other.refusal is not None]
        if not self._ever_up and len(refusals) == len(self.replicas):
            # A run that has begun waits for its teacher; one that never can begin says why at once.
            self._fail(refusals[0])
        elif is_news:
            logger.warning("%s: %s", replica.name, str(error).removeprefix(f"{replica.name}: "))

    def _take_messages(self, replica: Replica, session: Session, now_s: float) -> bool:
        busy = False
        # A replica that never ends its talk must not keep the timers from ending its session, or the run.
        for _ in range(MESSAGES_A_TURN):
            if (message := session.recv()) is None:
                break
            busy = True
            if isinstance(message, Goodbye):
                raise PeerLost(farewell(message))
            if self.machine is None or not replica.up:
                continue
            with self.lock:
                self.machine.heard(replica.name, now_s=now_s)
                if isinstance(message, Refused):
                    fill, code, text = message.fill, message.code, message.message
                    self._actions.extend(self.machine.refused(replica.name, fill, code, text, now_s=now_s))
        return busy | self._advance(replica, session, now_s)

    def _advance(self, replica: Replica, session: Session, now_s: float) -> bool:
        """Take the next step of the handshake, where one is due."""
        welcome = session.welcome
        if welcome is None:
            return False
        if replica.welcome is not welcome:
            if self.welcome is None:
                self._options.admit(welcome)
            with self.lock:
                replica.welcome = welcome
                self.welcome = self.welcome or welcome
                self.changed.notify_all()
        if session.phase is Phase.WELCOMED and self.arena is not None:
            self._offer(replica, session, welcome)
            return True
        if session.phase is Phase.READY and not replica.up and self.machine is not None:
            replica.up, replica.backoff_s, replica.refusal = True, RECONNECT_MIN_S, None
            self._ever_up = True
            logger.info("replica up: %s (%s)", replica.name, welcome.replica)
            with self.lock:
                self._actions.extend(
                    self.machine.replica_up(
                        replica.name, epoch=welcome.epoch, fingerprint=welcome.fingerprint, now_s=now_s
                    )
                )
            return True
        return False

    def _offer(self, replica: Replica, session: Session, welcome: Welcome) -> None:
        assert self.welcome is not None
        assert self.arena is not None
        assert self._needs is not None
        self._needs.check(replica.name, welcome, self.welcome)
        options = self._options
        reason = session.offer(
            self.arena,
            transport=options.transport,
            wire_dtype=self._needs.wire_dtype,
            crc=options.crc,
            bind_host=options.bind_host,
            encrypt=options.encrypt,
        )
        logger.info("%s: transport %s (%s)", replica.name, session.backend, reason)

    def _take_fills(self, replica: Replica, session: Session, now_s: float) -> bool:
        machine = self.machine
        if machine is None:
            return False
        if not replica.arrived:
            replica.arrived.extend(session.arrivals())
        busy = bool(replica.arrived)
        # One by one from where they are kept: what one of them has us do may end the session, and the rest comes first.
        while replica.arrived:
            if replica.session is not session:
                # A wrong one among them has ended it: the others were given up, whatever they are.
                with self.lock:
                    self._actions.extend(machine.came_late(replica.name, len(replica.arrived), now_s=now_s))
                replica.arrived.clear()
                break
            arrival = replica.arrived.popleft()
            fill = arrival.fill
            try:
                header = codec.decode_header(arrival.header)
            except RemoteProtocolError as error:
                with self.lock:
                    self._actions.extend(machine.garbled(replica.name, fill, str(error), now_s=now_s))
            else:
                crc = session.checksum(arrival)
                with self.lock:
                    self._actions.extend(
                        machine.arrived(replica.name, fill, arrival.num_bytes, header, crc, now_s=now_s)
                    )
            # At once: the trainer may be waiting for this very fill.
            self._carry_out(now_s)
        return self._count_late(replica, session, now_s) or busy

    def _count_late(self, replica: Replica, session: Session, now_s: float) -> bool:
        late = session.newly_dropped()
        if late and self.machine is not None:
            with self.lock:
                self._actions.extend(self.machine.came_late(replica.name, late, now_s=now_s))
        return late > 0

    def _lose_session(self, replica: Replica, error: str, now_s: float, *, backoff_s: float | None = None) -> None:
        """The session is over: take what it had brought before, and end it. A fill that is whole needs no second pass
        of a teacher; and once the machine knows that the replica is down, none of it is accepted any more."""
        session, until_s = replica.session, time.monotonic() + LAST_FILLS_S
        if session is not None and replica.up and self.machine is not None:
            replica.leaving = True
            with self.lock:
                self.machine.leaving(replica.name, now_s=now_s)
            with contextlib.suppress(TransportError):
                # Once at least: time may pass before the first look.
                while self._take_fills(replica, session, now_s) or session.may_have_more():
                    if replica.session is not session or time.monotonic() >= until_s:
                        break
        if replica.session is session:  # a wrong one among them has ended it already
            self._end_session(replica, error, now_s, backoff_s=backoff_s)

    def _lose_channel(self, replica: Replica, session: Session, error: str, now_s: float) -> None:
        """No fill can come any more. Why, the replica may have said over its link: that is heard out."""
        was_up = replica.up
        self._give_up(replica, error, now_s)
        self._fences.add(session.end_channel(error, was_up=was_up, now_s=now_s))

    def _hear_out(self, replica: Replica, session: Session, now_s: float) -> bool:
        error = session.last_word(now_s=now_s)
        if error is not None:
            self._end_session(replica, error, now_s)
        return error is not None

    def _end_session(self, replica: Replica, error: str, now_s: float, *, backoff_s: float | None = None) -> None:
        """Close what is left of the session; its fills go to the others. The replica is tried again later."""
        session, error = replica.session, error.removeprefix(f"{replica.name}: ")
        replica.retry_at_s = now_s + (backoff_s or replica.backoff_s)
        replica.backoff_s = min(replica.backoff_s * 2, RECONNECT_MAX_S)
        if replica.up or (session is not None and session.ending is not None and session.ending.was_up):
            logger.warning("replica lost: %s: %s", replica.name, error)
        self._give_up(replica, error, now_s)
        replica.session = None
        if session is not None:
            self._fences.add(session.close())
        with self.lock:
            self.changed.notify_all()

    def _give_up(self, replica: Replica, error: str, now_s: float) -> None:
        """Its fills go to the others. While its receiver is still there, so that it can say which are fenced."""
        self._attention.moved(replica.name)
        replica.last_error = error
        replica.up = replica.leaving = False
        if replica.session is not None:
            self._count_late(replica, replica.session, now_s)
        if self.machine is not None:
            # Also of one that did not come up: the machine names its last error when the run is lost.
            with self.lock:
                self._actions.extend(self.machine.replica_down(replica.name, error=error, now_s=now_s))
            self._carry_out(now_s)

    def _collect_fences(self, served: Sequence[Replica], now_s: float) -> bool:
        machine = self.machine
        if machine is None:
            return False
        fenced = self._fences.collect()
        fenced += [fill for r in served if r.session is not None for fill in r.session.fenced()]
        with self.lock:
            for fill in fenced:
                self._actions.extend(machine.fenced(fill, now_s=now_s))
        return bool(fenced)

    def _release_passed(self) -> bool:
        passed = [entry for entry in self.releasing if entry[1].query()]
        for entry in passed:
            self.releasing.remove(entry)
            self._free(entry[0])
        return bool(passed)

    def _carry_out(self, now_s: float) -> bool:
        busy = bool(self._actions)
        while self._actions:
            self._act(self._actions.popleft(), now_s)
        return busy

    def _act(self, action: Action, now_s: float) -> None:
        match action:
            case Deliverable():
                with self.lock:
                    self.changed.notify_all()
            case Lost(message=message):
                self._fail(TeacherLost(message))
            case Fatal(message=message):
                self._fail(RemoteProtocolError(message))
            case Note(level=level, text=text):
                logger.log(logging.getLevelNamesMapping()[level.upper()], "%s", text)
            case DropReplica(replica=name, error=error):
                self._end_session(self.replicas[name], error, now_s)
            case Disarm(replica=name, fill=fill, refused=refused):
                session = self.replicas[name].session
                self._attention.call(name)
                if session is None or session.disarm(fill, refused=refused) is Fence.FENCED:
                    assert self.machine is not None
                    with self.lock:
                        self._actions.extend(self.machine.fenced(fill, now_s=now_s))
            case Arm() | Send() | CancelFill() | SendPing():
                self._tell(action, now_s)

    def _tell(self, action: Arm | Send | CancelFill | SendPing, now_s: float) -> None:
        replica = self.replicas[action.replica]
        session = replica.session
        if session is None or not replica.up or replica.leaving:
            return  # It went down after the machine decided this; the machine has been told, or will be.
        self._attention.call(replica.name)
        try:
            session.tell(action)
        except TransportError as error:
            self._lose_session(replica, str(error), now_s)

    def _fail(self, error: DisaggKDError) -> None:
        with self.lock:
            if self._failure is None:
                self._failure = error
            self.changed.notify_all()

    def _sleep(self) -> None:
        now_s = time.monotonic()
        until = [r.retry_at_s for r in self.replicas.values() if r.session is None and self.failure is None]
        until += [r.session.ending.until_s for r in self.replicas.values() if r.session and r.session.ending]
        with self.lock:
            if self.machine is not None and (deadline_s := self.machine.next_deadline_s()) is not None:
                until.append(deadline_s)
            if self.releasing:
                until.append(now_s + EVENT_POLL_S)
        others = [self._wake_fd, *self._fences.wait_fds()]
        timeout_s = min(until, default=now_s + 1.0) - now_s
        self._attention.sleep(timeout_s=timeout_s, fds_of=lambda name: self.replicas[name].wait_fds(), others=others)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def _shut_down(self) -> None:
        for replica in self.replicas.values():
            session, replica.session = replica.session, None
            if session is None:
                continue
            with contextlib.suppress(TransportError):
                session.link.send(Goodbye(reason="the student is done"))
            self._fences.add(session.close())
        self._fences.forget()
        with self.lock:
            self.changed.notify_all()
