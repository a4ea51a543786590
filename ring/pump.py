"""The ring as the trainer sees it: submit requests ahead, lease filled slots in order, release them.

A thread, the pump, carries out what `ring.core.student.StudentMachine` decides: it owns every socket and data channel,
shakes hands with replicas, and tries again when one is lost. The trainer's thread only touches the machine, under a
lock, and never waits for the network except in `next_lease`. Slots are host memory that the trainer reads in place.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import crc32c
import torch

from ring.control import ControlLink
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
from ring.core.config import Expectation, RingConfig
from ring.core.errors import (
    ConfigError,
    DeadlineExceeded,
    DisaggKDError,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
    TeacherLost,
    TransportError,
)
from ring.core.messages import (
    FillHeader,
    Goodbye,
    HeadInfo,
    HeadRequest,
    Hello,
    Payload,
    Refused,
    TokenRequest,
    Welcome,
    WireDtype,
)
from ring.core.stats import RingStats
from ring.core.student import StudentMachine
from ring.session import Phase, Session
from transport.contract import Arrival, Fence, Receiver
from transport.memory import SlotArena

logger = logging.getLogger(__name__)

#: A replica that was lost is tried again after this, doubled up to the maximum while it stays away.
RECONNECT_MIN_S = 0.25
RECONNECT_MAX_S = 5.0
#: While a released slot waits for its device event, the pump looks this often.
EVENT_POLL_S = 0.001

TORCH_DTYPES = {
    WireDtype.BF16: torch.bfloat16,
    WireDtype.FP16: torch.float16,
    WireDtype.FP32: torch.float32,
    WireDtype.FP64: torch.float64,
}


class Event(Protocol):
    """What `Lease.release(after=...)` waits for; torch.cuda.Event is one."""

    def query(self) -> bool:
        """Whether everything recorded before the event is done; never blocks."""


@dataclass(kw_only=True)
class Replica:
    """What the pump knows of one replica, between and during sessions."""

    name: str
    open_link: Callable[[], ControlLink]
    session: Session | None = None
    up: bool = False
    retry_at_s: float = 0.0
    backoff_s: float = RECONNECT_MIN_S
    last_error: str = "no answer yet"
    refusal: ConfigError | None = None


@dataclass(frozen=True, kw_only=True)
class RingSnapshot:
    """What the ring knows of itself at one moment (R9).

    `machine`: counts of slots, fills, retries and drops. `student_stall_s`: how long `next_lease` waited, summed.
    `slots_bytes`: memory of all slots. `backends`: the transport of each connected replica."""

    machine: RingStats
    student_stall_s: float
    slots_bytes: int
    backends: Mapping[str, str]


class Lease:
    """The exclusive right to read one filled slot, from `Ring.next_lease` until `release`."""

    def __init__(self, ring: Ring, seq: int, slot: int, header: FillHeader) -> None:
        self._ring: Ring | None = ring
        self.seq = seq
        self.header = header
        self._slot = slot

    def tensor(self) -> torch.Tensor:
        """The states, read in place: shape [num_rows, hidden] in the wire dtype.

        Lifetime: invalid once the lease is released; with `poison_released` it then reads as NaN.
        Raises LocalProtocolError: the lease was released."""
        ring = self._held()
        return ring.view(self._slot, self.header)

    def bytes(self) -> memoryview:
        """The raw payload, in place. Lifetime and errors as `tensor`."""
        return self._held().raw(self._slot, self.header.num_bytes)

    def release(self, after: Event | None = None) -> None:
        """Give the slot back; it may carry the next request once `after` has passed.

        Raises LocalProtocolError: already released; nothing changed.
        Lifetime: tensors viewing this slot are invalid once this returns (with `after`: once that has passed)."""
        ring = self._held()
        self._ring = None
        ring.give_back(self.seq, self._slot, after)

    def _held(self) -> Ring:
        if self._ring is None:
            raise LocalProtocolError(f"seq {self.seq}: the lease was released already; allowed: one release")
        return self._ring


class Ring:
    """The prefetch ring of one trainer rank. `close()` it, or use it as a context manager.

    Life: construct (the pump starts to look for replicas) -> `wait_welcome` -> `open` (slots are allocated and offered)
    -> `submit` / `next_lease` / `Lease.release` -> `close`.
    """

    def __init__(
        self,
        *,
        config: RingConfig,
        hello: Hello,
        links: Sequence[tuple[str, Callable[[], ControlLink]]],
        transport: str = "auto",
        crc: bool | None = None,
        bind_host: str = "127.0.0.1",
        poison_released: bool = False,
        idle_work: Callable[[], bool] | None = None,
    ) -> None:
        """hello: who we are; `links`: (name, how to connect) of each replica.

        crc: check every fill with crc32c; None = where the backend advises it. poison_released: overwrite released
        slots with NaN (debugging). idle_work: what the thread that waits in `next_lease` can do instead of sleeping;
        returns whether it did something (the colocated teacher's forward pass)."""
        if not links:
            raise ConfigError("the ring has no replica; allowed: one or more --teacher endpoints")
        self._config = config
        self._hello = hello
        self._transport = transport
        self._crc = crc
        self._bind_host = bind_host
        self._poison = poison_released
        self._idle_work = idle_work
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._replicas = {name: Replica(name=name, open_link=open_link) for name, open_link in links}
        self._machine: StudentMachine | None = None
        self._arena: SlotArena | None = None
        self._wire_dtype: WireDtype | None = None
        self._welcome: Welcome | None = None
        self._actions: deque[Action] = deque()
        self._releasing: list[tuple[int, int, Event]] = []
        self._fencing: list[Receiver] = []
        self._fatal: DisaggKDError | None = None
        self._closing = False
        self._student_stall_s = 0.0
        self._ping_token = 0
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="ring-pump", daemon=True)
        self._thread.start()

    def __enter__(self) -> Ring:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- the trainer's thread ------------------------------------------------------------------------------------

    def wait_welcome(self, *, timeout_s: float) -> Welcome:
        """Block until some replica answered the hello, and return what it says of itself.

        Raises TeacherLost: none did in time. Raises ConfigError: every replica refuses this student for good."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while self._welcome is None:
                self._raise_if_fatal()
                refusals = [r.refusal for r in self._replicas.values() if r.refusal is not None]
                if len(refusals) == len(self._replicas):
                    raise refusals[0]
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise TeacherLost(f"no teacher answered within {timeout_s:g} s: {self._last_errors()}")
                if not self._work_idly():
                    self._changed.wait(min(left_s, 0.05 if self._idle_work else left_s))
            return self._welcome

    def open(self, *, max_rows: int, wire_dtype: WireDtype) -> int:
        """Allocate the slots, `max_rows` states each, and offer them to the replicas; returns the bytes allocated.

        Raises ConfigError: the replica does not send that dtype, or the memory is not there."""
        with self._changed:
            welcome = self._welcome
            if welcome is None or self._machine is not None:
                raise LocalProtocolError("open() is allowed once, after wait_welcome()")
            if wire_dtype not in welcome.wire_dtypes:
                allowed = ", ".join(dtype.value for dtype in welcome.wire_dtypes)
                raise ConfigError(f"wire dtype {wire_dtype.value}: the teacher sends {allowed}")
            row_bytes = welcome.head.hidden_size * wire_dtype.itemsize_bytes
            arena = SlotArena(
                num_slots=self._config.depth + self._config.num_spares, slot_bytes=max(max_rows, 1) * row_bytes
            )
            self._arena, self._wire_dtype = arena, wire_dtype
            self._machine = StudentMachine(
                self._config, epoch=self._hello.epoch, fingerprint=welcome.fingerprint, now_s=time.monotonic()
            )
            self._wake()
            return arena.total_bytes

    @property
    def can_submit(self) -> int:
        """How many more requests the ring takes now."""
        with self._lock:
            return self._open_machine().can_submit

    def submit(self, seq: int, payload: TokenRequest) -> None:
        """Ask for the states of one microbatch; they come back as the lease of `seq`, in the order of submission.

        seq: greater than any before. Raises ConfigError: the microbatch exceeds a slot or the teacher's limits.
        Raises LocalProtocolError: `can_submit` was 0 or seq does not ascend; nothing changed. Raises TeacherLost."""
        welcome, arena, wire_dtype = self._welcome, self._arena, self._wire_dtype
        if welcome is None or arena is None or wire_dtype is None:
            raise LocalProtocolError("submit() is allowed after open()")
        num_bytes = payload.num_rows * welcome.head.hidden_size * wire_dtype.itemsize_bytes
        if num_bytes > arena.slot_bytes:
            raise ConfigError(
                f"seq {seq}: {payload.num_rows} rows take {num_bytes} bytes; a slot holds {arena.slot_bytes}"
            )
        if payload.num_tokens > welcome.max_tokens or payload.num_rows > welcome.max_rows:
            raise ConfigError(
                f"seq {seq}: a microbatch of {payload.num_tokens} tokens; the teacher takes {welcome.max_tokens} in a "
                f"request: lower the batch size or raise the teacher's --max-batch-tokens"
            )
        expect = Expectation(
            num_rows=payload.num_rows,
            dtype=wire_dtype,
            num_bytes=num_bytes,
            input_hash=payload.input_hash,
            cost_tokens=payload.num_tokens,
        )
        self._submit(seq, payload, expect)

    def next_lease(self, *, timeout_s: float | None = None) -> Lease:
        """The lease of the next submitted seq; blocks until its slot is filled. The wait counts as student stall.

        Raises TeacherLost: no replica is left. Raises DeadlineExceeded: not filled within timeout_s; nothing changed.
        """
        start_s = time.monotonic()
        with self._changed:
            machine = self._open_machine()
            try:
                while True:
                    self._raise_if_fatal()
                    leased = machine.next_lease(now_s=time.monotonic())
                    if leased is not None:
                        return Lease(self, leased.seq, leased.slot, leased.header)
                    left_s = float("inf") if timeout_s is None else start_s + timeout_s - time.monotonic()
                    if left_s <= 0:
                        raise DeadlineExceeded(f"waited {timeout_s:g} s for the next fill; it did not come")
                    if not self._work_idly():
                        # With work to look for, wake often; else the pump notifies.
                        self._changed.wait(min(left_s, 0.002 if self._idle_work else 1.0))
            finally:
                self._student_stall_s += time.monotonic() - start_s

    def fetch_head(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The teacher's head through the slots, in pieces of at most one: weight [vocab, hidden], bias [vocab] or None.

        Call it after `open` and before the first `submit`. Raises RemoteProtocolError: the bytes do not hash to what
        the teacher announced. Raises TeacherLost."""
        welcome, arena = self._welcome, self._arena
        if welcome is None or arena is None:
            raise LocalProtocolError("fetch_head() is allowed after open()")
        head = welcome.head
        raw = torch.empty(head.num_bytes, dtype=torch.uint8)
        target = memoryview(raw.numpy())
        offsets = range(0, head.num_bytes, arena.slot_bytes)
        asked = 0
        for got, offset in enumerate(offsets):
            while asked < len(offsets) and self.can_submit:
                self._request_head_piece(head, offsets[asked], seq=asked - len(offsets), slot_bytes=arena.slot_bytes)
                asked += 1
            lease = self.next_lease()
            assert lease.seq == got - len(offsets)
            target[offset : offset + lease.header.num_bytes] = lease.bytes()
            lease.release()
        digest = hashlib.sha256(target).hexdigest()
        if digest != head.sha256:
            raise RemoteProtocolError(f"the teacher's head hashes to {digest}; announced was {head.sha256}")
        return _split_head(raw, head)

    def stats(self) -> RingSnapshot:
        """A frozen snapshot (R9)."""
        with self._lock:
            return RingSnapshot(
                machine=self._open_machine().stats(now_s=time.monotonic()),
                student_stall_s=self._student_stall_s,
                slots_bytes=self._arena.total_bytes if self._arena is not None else 0,
                backends={
                    replica.name: replica.session.backend
                    for replica in self._replicas.values()
                    if replica.session is not None and replica.session.backend is not None
                },
            )

    def close(self) -> None:
        """Say goodbye, stop the pump, give the slots back. Idempotent; leases are invalid afterwards."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._wake()
        self._thread.join()
        with self._lock:
            if self._wake_fd >= 0:
                os.close(self._wake_fd)
                self._wake_fd = -1
            if self._arena is not None:
                self._arena.close()

    def view(self, slot: int, header: FillHeader) -> torch.Tensor:
        """The states in `slot`, in place; for `Lease`."""
        assert self._arena is not None
        assert self._welcome is not None
        shape = (header.num_rows, self._welcome.head.hidden_size)
        return self._arena.view(slot, TORCH_DTYPES[header.dtype], shape)

    def raw(self, slot: int, num_bytes: int) -> memoryview:
        """The first bytes of `slot`, in place; for `Lease`."""
        assert self._arena is not None
        return self._arena.buffer(slot)[:num_bytes]

    def give_back(self, seq: int, slot: int, after: Event | None) -> None:
        """Release `seq` now, or when `after` has passed; for `Lease`."""
        with self._lock:
            if self._closing:
                return
            if after is None:
                self._free(seq, slot)
            else:
                self._releasing.append((seq, slot, after))
            self._wake()

    # ---- under the lock, either thread ---------------------------------------------------------------------------

    def _submit(self, seq: int, payload: Payload, expect: Expectation) -> None:
        with self._lock:
            self._raise_if_fatal()
            self._actions.extend(self._open_machine().submit(seq, payload, expect, now_s=time.monotonic()))
            self._wake()

    def _request_head_piece(self, head: HeadInfo, offset: int, *, seq: int, slot_bytes: int) -> None:
        num_bytes = min(slot_bytes, head.num_bytes - offset)
        name = f"head 0:{head.vocab_size} bytes {offset}:{offset + num_bytes}".encode()
        input_hash = hashlib.blake2b(name, digest_size=16).digest()
        payload = HeadRequest(
            vocab_start=0, vocab_end=head.vocab_size, offset=offset, num_bytes=num_bytes, input_hash=input_hash
        )
        expect = Expectation(num_rows=0, dtype=head.dtype, num_bytes=num_bytes, input_hash=input_hash, cost_tokens=0)
        self._submit(seq, payload, expect)

    def _free(self, seq: int, slot: int) -> None:
        assert self._arena is not None
        if self._poison:
            self._arena.poison(slot)
        self._actions.extend(self._open_machine().release(seq, now_s=time.monotonic()))

    def _open_machine(self) -> StudentMachine:
        if self._machine is None:
            raise LocalProtocolError("the ring is not open; allowed: wait_welcome(), then open()")
        return self._machine

    def _raise_if_fatal(self) -> None:
        if self._fatal is not None:
            raise self._fatal
        if self._closing:
            raise LocalProtocolError("the ring is closed")

    def _work_idly(self) -> bool:
        """Let the waiting thread do the idle work, without the lock."""
        if self._idle_work is None:
            return False
        self._lock.release()
        try:
            return self._idle_work()
        finally:
            self._lock.acquire()

    def _last_errors(self) -> str:
        return "; ".join(f"{replica.name}: {replica.last_error}" for replica in self._replicas.values())

    def _wake(self) -> None:
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def _fail(self, error: DisaggKDError) -> None:
        if self._fatal is None:
            self._fatal = error
        self._changed.notify_all()

    # ---- the pump's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                with self._lock:
                    busy = self._turn(time.monotonic())
                if not busy:
                    self._sleep()
        except Exception as error:
            logger.debug("the pump failed", exc_info=True)
            with self._lock:
                self._fail(LocalProtocolError(f"the ring's pump failed: {type(error).__name__}: {error}"))
        finally:
            self._shut_down()

    def _turn(self, now_s: float) -> bool:
        """One round over everything that may have happened; returns whether anything did."""
        busy = self._carry_out(now_s)
        for replica in self._replicas.values():
            busy |= self._serve(replica, now_s)
        busy |= self._collect_fences(now_s)
        busy |= self._release_passed()
        machine = self._machine
        if machine is not None:
            deadline_s = machine.next_deadline_s()
            if deadline_s is not None and now_s >= deadline_s:
                self._actions.extend(machine.on_timer(now_s=now_s))
        busy |= self._carry_out(now_s)
        return busy

    def _serve(self, replica: Replica, now_s: float) -> bool:
        """Connect, shake hands, take messages and fills; an error of the replica ends its session, not the ring."""
        try:
            if replica.session is None:
                if now_s < replica.retry_at_s or self._fatal is not None:
                    return False
                replica.session = Session(replica.open_link(), self._hello)
                return True
            busy = self._take_messages(replica, replica.session, now_s)
            if replica.session is not None:
                busy |= self._take_fills(replica, replica.session, now_s)
            return busy
        except ConfigError as error:
            replica.refusal = error
            self._end_session(replica, str(error), now_s, backoff_s=RECONNECT_MAX_S)
        except (TransportError, RemoteProtocolError) as error:
            self._end_session(replica, str(error), now_s)
        return True

    def _take_messages(self, replica: Replica, session: Session, now_s: float) -> bool:
        machine = self._machine
        busy = False
        while (message := session.recv()) is not None:
            busy = True
            if machine is not None and replica.up:
                machine.heard(replica.name, now_s=now_s)
            if isinstance(message, Goodbye):
                raise PeerLost(f"{replica.name} said goodbye: {message.reason}")
            if isinstance(message, Refused) and machine is not None:
                self._actions.extend(
                    machine.refused(replica.name, message.fill, message.code, message.message, now_s=now_s)
                )
        welcome = session.welcome
        if welcome is not None and self._welcome is None:
            self._welcome = welcome
            self._changed.notify_all()
        if session.phase is Phase.WELCOMED and self._arena is not None:
            self._offer(replica, session)
            busy = True
        if session.phase is Phase.READY and not replica.up and machine is not None:
            assert welcome is not None
            replica.up, replica.backoff_s, replica.refusal = True, RECONNECT_MIN_S, None
            self._actions.extend(
                machine.replica_up(replica.name, epoch=welcome.epoch, fingerprint=welcome.fingerprint, now_s=now_s)
            )
            busy = True
        return busy

    def _offer(self, replica: Replica, session: Session) -> None:
        assert self._welcome is not None
        assert self._arena is not None
        assert self._wire_dtype is not None
        assert session.welcome is not None
        if session.welcome.fingerprint != self._welcome.fingerprint:
            raise ConfigError(
                f"{replica.name}: fingerprint {session.welcome.fingerprint} ({session.welcome.model}); the run's "
                f"teacher is {self._welcome.fingerprint} ({self._welcome.model}): all replicas must serve the same"
            )
        reason = session.offer(
            self._arena,
            transport=self._transport,
            wire_dtype=self._wire_dtype,
            crc=self._crc,
            bind_host=self._bind_host,
        )
        logger.info("%s: transport %s (%s)", replica.name, session.backend, reason)

    def _take_fills(self, replica: Replica, session: Session, now_s: float) -> bool:
        machine, busy = self._machine, False
        if machine is None:
            return False
        while arrivals := session.arrivals():
            busy = True
            for arrival in arrivals:
                header = codec.decode_header(arrival.header)
                crc = self._checksum(session, arrival)
                machine.heard(replica.name, now_s=now_s)
                self._actions.extend(
                    machine.arrived(replica.name, arrival.fill, arrival.num_bytes, header, crc, now_s=now_s)
                )
        return busy

    def _checksum(self, session: Session, arrival: Arrival) -> int | None:
        if not session.crc:
            return None
        assert self._arena is not None
        return crc32c.crc32c(self._arena.buffer(arrival.fill.slot)[: arrival.num_bytes])

    def _end_session(self, replica: Replica, error: str, now_s: float, *, backoff_s: float | None = None) -> None:
        """Close what is left of the session; its fills go to the others. The replica is tried again later."""
        replica.last_error = error
        replica.retry_at_s = now_s + (backoff_s or replica.backoff_s)
        replica.backoff_s = min(replica.backoff_s * 2, RECONNECT_MAX_S)
        session = replica.session
        if replica.up and self._machine is not None:
            logger.warning("replica lost: %s", error)
            replica.up = False
            self._actions.extend(self._machine.replica_down(replica.name, error=error, now_s=now_s))
            # While the receiver is still there, so that it can say which fills are fenced.
            self._carry_out(now_s)
        replica.session = None
        if session is not None:
            receiver = session.close()
            if receiver is not None:
                self._fencing.append(receiver)
        self._changed.notify_all()

    def _collect_fences(self, now_s: float) -> bool:
        machine = self._machine
        if machine is None:
            return False
        fenced = [fill for receiver in self._fencing for fill in receiver.poll_fenced()]
        for replica in self._replicas.values():
            if replica.session is not None:
                fenced += replica.session.fenced()
        for receiver in [r for r in self._fencing if not r.wait_fds()]:
            receiver.forget()
            self._fencing.remove(receiver)
        for fill in fenced:
            self._actions.extend(machine.fenced(fill, now_s=now_s))
        return bool(fenced)

    def _release_passed(self) -> bool:
        passed = [entry for entry in self._releasing if entry[2].query()]
        for entry in passed:
            self._releasing.remove(entry)
            self._free(entry[0], entry[1])
        return bool(passed)

    def _carry_out(self, now_s: float) -> bool:
        busy = bool(self._actions)
        while self._actions:
            self._act(self._actions.popleft(), now_s)
        return busy

    def _act(self, action: Action, now_s: float) -> None:
        match action:
            case Deliverable():
                self._changed.notify_all()
            case Lost(message=message):
                self._fail(TeacherLost(message))
            case Fatal(message=message):
                self._fail(RemoteProtocolError(message))
            case Note(level=level, text=text):
                logger.log(logging.getLevelNamesMapping()[level.upper()], "%s", text)
            case DropReplica(replica=name, error=error):
                self._end_session(self._replicas[name], error, now_s)
            case Disarm(replica=name, fill=fill):
                session = self._replicas[name].session
                if session is None or session.disarm(fill) is Fence.FENCED:
                    assert self._machine is not None
                    self._actions.extend(self._machine.fenced(fill, now_s=now_s))
            case Arm() | Send() | CancelFill() | SendPing():
                self._tell(action, now_s)

    def _tell(self, action: Arm | Send | CancelFill | SendPing, now_s: float) -> None:
        replica = self._replicas[action.replica]
        session = replica.session
        if session is None or not replica.up:
            return  # It went down after the machine decided this; the machine has been told.
        try:
            match action:
                case Arm(fill=fill, num_bytes=num_bytes):
                    session.arm(fill, num_bytes=num_bytes)
                case Send(request=request):
                    session.request(request)
                case CancelFill(fill=fill):
                    session.cancel(fill)
                case SendPing():
                    self._ping_token += 1
                    session.ping(self._ping_token)
        except TransportError as error:
            self._end_session(replica, str(error), now_s)

    def _sleep(self) -> None:
        with self._lock:
            now_s = time.monotonic()
            until = [now_s + 1.0]
            until += [r.retry_at_s for r in self._replicas.values() if r.session is None and self._fatal is None]
            if self._machine is not None and (deadline_s := self._machine.next_deadline_s()) is not None:
                until.append(deadline_s)
            if self._releasing:
                until.append(now_s + EVENT_POLL_S)
            fds = [fd for r in self._replicas.values() if r.session is not None for fd in r.session.wait_fds()]
            fds += [fd for receiver in self._fencing for fd in receiver.wait_fds()]
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        for fd in fds:
            poller.register(fd, select.POLLIN)
        # Rounded up: a poll that ends a moment before the deadline would only spin.
        poller.poll(max(0.0, min(until) - now_s) * 1e3 + 1)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def _shut_down(self) -> None:
        with self._lock:
            for replica in self._replicas.values():
                if replica.session is not None:
                    with contextlib.suppress(TransportError):
                        replica.session.link.send(Goodbye(reason="the student is done"))
                    receiver = replica.session.close()
                    replica.session = None
                    if receiver is not None:
                        self._fencing.append(receiver)
            for receiver in self._fencing:
                receiver.forget()
            self._fencing.clear()
            self._changed.notify_all()


def _split_head(raw: torch.Tensor, head: HeadInfo) -> tuple[torch.Tensor, torch.Tensor | None]:
    dtype = TORCH_DTYPES[head.dtype]
    weight_bytes = head.vocab_size * head.hidden_size * head.dtype.itemsize_bytes
    weight = raw[:weight_bytes].view(dtype).view(head.vocab_size, head.hidden_size)
    bias = raw[weight_bytes:].view(dtype) if head.has_bias else None
    return weight, bias
