"""The prefetch ring as the trainer sees it: submit requests ahead, lease filled slots in order, release them.

Slots are host memory that the trainer reads in place. The trainer's thread waits for the network nowhere but in
`wait_welcome` and `next_lease`; the pump's thread does the rest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch

from ring.connection import ChannelOptions, LinkOpener
from ring.core.config import Expectation, RingConfig
from ring.core.errors import ConfigError, DeadlineExceeded, LocalProtocolError, TeacherLost
from ring.core.messages import FillHeader, Hello, Payload, TokenRequest, Welcome, WireDtype
from ring.core.stats import RingStats
from ring.core.student import StudentMachine
from ring.dtypes import TORCH_DTYPES
from ring.lease import Event, Lease
from ring.pump import Pump
from ring.session import Needs
from transport.memory import SlotArena

logger = logging.getLogger(__name__)

#: How often a thread that waits looks for idle work.
IDLE_WORK_POLL_S = 0.002


@dataclass(frozen=True, kw_only=True)
class RingSnapshot:
    """What the ring knows of itself at one moment (R9).

    `machine`: counts of slots, fills, retries and drops. `student_stall_s`: how long `next_lease` waited, summed.
    `slots_bytes`: memory of all slots. `backends`: the transport of each connected replica."""

    machine: RingStats
    student_stall_s: float
    slots_bytes: int
    backends: Mapping[str, str]


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
        links: Sequence[tuple[str, LinkOpener]],
        options: ChannelOptions | None = None,
        poison_released: bool = False,
        idle_work: Callable[[], bool] | None = None,
    ) -> None:
        """hello: who we are; links: (name, how to connect) of each replica.

        poison_released: overwrite released slots with NaN (debugging). idle_work: what the thread that waits here can
        do instead of sleeping; returns whether it did something (the colocated teacher's forward pass).
        Raises ConfigError: no replica is named."""
        if not links:
            raise ConfigError("the ring has no replica; allowed: one or more --teacher endpoints")
        self._config = config
        self._hello = hello
        self._poison = poison_released
        self._idle_work = idle_work
        self._student_stall_s = 0.0
        self._slot_of: dict[int, int] = {}
        self._pump = Pump(hello=hello, links=links, options=options or ChannelOptions())

    def __enter__(self) -> Ring:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wait_welcome(self, *, timeout_s: float) -> Welcome:
        """Block until some replica answered the hello, and return what it says of itself.

        Raises TeacherLost: none did in time. Raises ConfigError: every replica refuses this student for good."""
        pump = self._pump
        deadline_s = time.monotonic() + timeout_s
        with pump.changed:
            while pump.welcome is None:
                self._raise_failure()
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise TeacherLost(f"no teacher answered within {timeout_s:g} s: {pump.last_errors()}")
                self._wait(left_s)
            return pump.welcome

    def check_models(self, *, absent_s: float, silent_s: float) -> None:
        """Wait until every replica has answered: for `absent_s` at most for one that nobody can connect to, for
        `silent_s` where somebody is there. What comes later and does not serve the run's model is left out.

        Raises ConfigError: two serve different models, and only chance made one of them the run's. Raises TeacherLost.
        """
        pump, has_told = self._pump, False
        start_s = time.monotonic()
        with pump.changed:
            while any(replica.is_unknown for replica in pump.replicas.values()):
                self._raise_failure()
                silent = [replica.name for replica in pump.replicas.values() if replica.is_silent]
                so_far_s = time.monotonic() - start_s
                if so_far_s >= (silent_s if silent else absent_s):
                    break
                if so_far_s >= absent_s and not has_told:
                    has_told = True
                    logger.info(
                        "%s: somebody is there and has not said yet what it serves; waiting for %g s at most",
                        ", ".join(silent),
                        silent_s,
                    )
                self._wait(0.1)  # nobody wakes us when one is connected to
            found = {r.name: r.welcome for r in pump.replicas.values() if r.welcome is not None}
        if len({welcome.fingerprint for welcome in found.values()}) > 1:
            named = "; ".join(f"{name} serves {said.model} ({said.fingerprint})" for name, said in found.items())
            raise ConfigError(f"the replicas serve different models: {named}; allowed: one model in one dtype")

    def open(self, *, max_rows: int, wire_dtype: WireDtype, max_tokens: int = 0, max_document_tokens: int = 0) -> int:
        """Allocate the slots, `max_rows` states each, and offer them to the replicas; returns the bytes allocated.

        max_rows, max_tokens: of the largest microbatch; max_document_tokens: of the longest document. Replicas whose
        limits are lower are left out.
        Raises ConfigError: the replica does not send that dtype, or the memory is not there."""
        pump = self._pump
        with pump.lock:
            welcome = pump.welcome
            if welcome is None or pump.machine is not None:
                raise LocalProtocolError("open() is allowed once, after wait_welcome()")
            if wire_dtype not in welcome.wire_dtypes:
                allowed = ", ".join(dtype.value for dtype in welcome.wire_dtypes)
                raise ConfigError(f"wire dtype {wire_dtype.value}: the teacher sends {allowed}")
            row_bytes = welcome.head.hidden_size * wire_dtype.itemsize_bytes
            arena = SlotArena(num_slots=self._config.num_slots, slot_bytes=max(max_rows, 1) * row_bytes)
            machine = StudentMachine(
                self._config, epoch=self._hello.epoch, fingerprint=welcome.fingerprint, now_s=time.monotonic()
            )
            self._wire_dtype = wire_dtype
            needs = Needs(
                wire_dtype=wire_dtype,
                # A slot may have room for more than the teacher sends.
                max_rows=min(max_rows, welcome.max_rows),
                max_tokens=max_tokens,
                max_document_tokens=max_document_tokens,
            )
            pump.offer_slots(machine, arena, needs=needs, free=self._free)
            return arena.total_bytes

    @property
    def welcome(self) -> Welcome:
        """What the run's teacher said of itself. Raises LocalProtocolError: before wait_welcome()."""
        if self._pump.welcome is None:
            raise LocalProtocolError("no teacher has answered yet; allowed: after wait_welcome()")
        return self._pump.welcome

    @property
    def slot_bytes(self) -> int:
        """What one slot holds. Raises LocalProtocolError: before open()."""
        return self._arena().slot_bytes

    @property
    def can_submit(self) -> int:
        """How many more requests the ring takes now."""
        with self._pump.lock:
            return self._machine().can_submit

    @property
    def has_failed(self) -> bool:
        """Whether nothing can come any more: `next_lease` raises why."""
        with self._pump.lock:
            return self._pump.failure is not None or self._pump.stopping

    def submit(self, seq: int, request: TokenRequest) -> None:
        """Ask for the states of one microbatch; they come back as the lease of `seq`, in the order of submission.

        seq: greater than any before. Raises ConfigError: the microbatch exceeds a slot or the teacher's limits.
        Raises LocalProtocolError: `can_submit` was 0 or seq does not ascend; nothing changed. Raises TeacherLost."""
        welcome = self.welcome
        num_bytes = request.num_rows * welcome.head.hidden_size * self._wire_dtype.itemsize_bytes
        if num_bytes > self.slot_bytes:
            raise ConfigError(
                f"seq {seq}: {request.num_rows} rows take {num_bytes} bytes; a slot holds {self.slot_bytes}"
            )
        if request.num_tokens > welcome.max_tokens or request.num_rows > welcome.max_rows:
            raise ConfigError(
                f"seq {seq}: a microbatch of {request.num_tokens} tokens; the teacher takes {welcome.max_tokens} in a "
                f"request: lower the batch size, or raise the teacher's --max-batch-tokens"
            )
        expect = Expectation(
            num_rows=request.num_rows,
            dtype=self._wire_dtype,
            num_bytes=num_bytes,
            input_hash=request.input_hash,
            cost_tokens=request.num_tokens,
        )
        self.ask(seq, request, expect)

    def ask(self, seq: int, payload: Payload, expect: Expectation) -> None:
        """Submit any payload with what its answer must look like. Raises as `submit` does."""
        with self._pump.lock:
            self._raise_failure()
            self._pump.post(self._machine().submit(seq, payload, expect, now_s=time.monotonic()))

    def next_lease(self, *, timeout_s: float | None = None) -> Lease:
        """The lease of the next submitted seq; blocks until its slot is filled. The wait counts as student stall.

        Raises TeacherLost: no replica is left. Raises DeadlineExceeded: not filled within timeout_s; nothing changed.
        """
        start_s = time.monotonic()
        with self._pump.lock:
            machine = self._machine()
            try:
                while True:
                    self._raise_failure()
                    leased = machine.next_lease(now_s=time.monotonic())
                    if leased is not None:
                        self._slot_of[leased.seq] = leased.slot
                        return Lease(self, seq=leased.seq, slot=leased.slot, header=leased.header)
                    left_s = float("inf") if timeout_s is None else start_s + timeout_s - time.monotonic()
                    if left_s <= 0:
                        raise DeadlineExceeded(f"waited {timeout_s:g} s for the next fill; it did not come")
                    self._wait(left_s)
            finally:
                self._student_stall_s += time.monotonic() - start_s

    def stats(self) -> RingSnapshot:
        """A frozen snapshot (R9)."""
        pump = self._pump
        with pump.lock:
            sessions = {replica.name: replica.session for replica in pump.replicas.values()}
            return RingSnapshot(
                machine=self._machine().stats(now_s=time.monotonic()),
                student_stall_s=self._student_stall_s,
                slots_bytes=self._arena().total_bytes,
                backends={name: s.backend for name, s in sessions.items() if s is not None and s.backend is not None},
            )

    def close(self) -> None:
        """Say goodbye, stop the pump, give the slots back. Idempotent; leases are invalid afterwards."""
        self._pump.stop()
        with self._pump.lock:
            if self._pump.arena is not None:
                self._pump.arena.close()

    # ---- for Lease -------------------------------------------------------------------------------------------------

    def view(self, slot: int, header: FillHeader) -> torch.Tensor:
        """The states in `slot`, in place: [num_rows, hidden]."""
        shape = (header.num_rows, self.welcome.head.hidden_size)
        return self._arena().view(slot, TORCH_DTYPES[header.dtype], shape)

    def raw(self, slot: int, num_bytes: int) -> memoryview:
        """The first bytes of `slot`, in place."""
        return self._arena().buffer(slot)[:num_bytes]

    def give_back(self, seq: int, slot: int, after: Event | None) -> None:
        """Free the slot of `seq`, now or when `after` has passed."""
        with self._pump.lock:
            if self._pump.stopping:
                return
            if after is None:
                self._free(seq)
            else:
                self._pump.releasing.append((seq, after))
                self._pump.wake()

    # ---- under the lock --------------------------------------------------------------------------------------------

    def _free(self, seq: int) -> None:
        slot = self._slot_of.pop(seq)
        if self._poison:
            self._arena().poison(slot)
        self._pump.post(self._machine().release(seq, now_s=time.monotonic()))

    def _wait(self, left_s: float) -> None:
        """Let this thread do the idle work, without the lock; if there is none, sleep until something changed."""
        if self._idle_work is None:
            self._pump.changed.wait(min(left_s, 1.0))
            return
        self._pump.lock.release()
        try:
            worked = self._idle_work()
        finally:
            self._pump.lock.acquire()
        if not worked:
            self._pump.changed.wait(min(left_s, IDLE_WORK_POLL_S))

    def _raise_failure(self) -> None:
        machine = self._pump.machine
        while machine is not None and machine.has_ended and self._pump.failure is None and not self._pump.stopping:
            self._pump.changed.wait(1.0)  # the pump is about to say why
        if self._pump.failure is not None:
            raise self._pump.failure
        if self._pump.stopping:
            raise LocalProtocolError("the ring is closed")

    def _machine(self) -> StudentMachine:
        if self._pump.machine is None:
            raise LocalProtocolError("the ring is not open; allowed: wait_welcome(), then open()")
        return self._pump.machine

    def _arena(self) -> SlotArena:
        if self._pump.arena is None:
            raise LocalProtocolError("the ring is not open; allowed: wait_welcome(), then open()")
        return self._pump.arena
