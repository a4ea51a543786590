"""The trainer of one life of a student: asks ahead, takes leases in order, trains, releases, and saves its position.

It sleeps when no lease is there, and only `Deliverable` wakes it, as in a real run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from ring.core.actions import Lease
from ring.core.config import Expectation
from ring.core.messages import HeadRequest, Payload, TokenRequest, WireDtype
from tests.simulation.clock import Violation
from tests.simulation.memory import FINGERPRINT, ROW_BYTES, states
from tests.simulation.scenario import Microbatch

if TYPE_CHECKING:
    from tests.simulation.student_life import StudentLife

HEAD_PIECE_BYTES = 96


def question(seq: int, batch: Microbatch | None) -> tuple[Payload, Expectation]:
    """What is asked for a seq, and what its fill must look like. No microbatch: a piece of the head."""
    input_hash = f"in{seq}".encode()
    if batch is None:
        payload: Payload = HeadRequest(
            vocab_start=0, vocab_end=64, offset=0, num_bytes=HEAD_PIECE_BYTES, input_hash=input_hash
        )
        num_rows, num_bytes, cost_tokens = 0, HEAD_PIECE_BYTES, 0
    else:
        payload = TokenRequest(
            token_ids=bytes(4 * batch.num_tokens),
            doc_lengths=(batch.num_tokens,),
            row_ranges=((0, batch.num_rows),),
            input_hash=input_hash,
        )
        num_rows, num_bytes, cost_tokens = batch.num_rows, batch.num_rows * ROW_BYTES, batch.num_tokens
    return payload, Expectation(
        num_rows=num_rows, dtype=WireDtype.BF16, num_bytes=num_bytes, input_hash=input_hash, cost_tokens=cost_tokens
    )


class Trainer:
    def __init__(
        self,
        life: StudentLife,
        rng: Random,
        *,
        position: int,
        trained: Callable[[int], None],
        durable: Callable[[int], None],
    ) -> None:
        """trained, durable: told of each microbatch trained on, and of each position that a checkpoint holds."""
        self.position = position
        self.held: dict[int, Lease] = {}
        self.step_factor = 1.0
        self.called = True
        self.done = False
        self.lost = False
        self._life = life
        self._rng = rng
        self._trained = trained
        self._durable = durable
        scenario = life.world.scenario
        self._scenario = scenario
        self._batches = scenario.microbatches[life.rank]
        pieces = range(-scenario.num_head_pieces, 0)
        asked = [m for m in range(position, len(self._batches)) if self._batches[m].num_rows]
        self._unasked = deque([*pieces, *asked])
        self._untrained = deque([*pieces, *range(position, len(self._batches))])
        self._busy = False

    @property
    def waits(self) -> bool:
        """It sleeps until a fill can be delivered."""
        return bool(self._untrained) and not self._busy and not self.called

    def advance(self) -> None:
        """Do all that can be done now."""
        self.called = False
        life = self._life
        self._ask_ahead()
        while self._untrained and not self._busy and life.alive:
            seq = self._untrained[0]
            if seq >= 0 and not self._batches[seq].num_rows:
                self._record(self._untrained.popleft())
                continue
            lease = life.machine.next_lease(now_s=life.clock.now_s)
            if lease is None:
                break
            self._untrained.popleft()
            if lease.seq != seq:
                raise Violation(f"{life.name}: seq {lease.seq} was delivered, seq {seq} is next")
            self.held[seq] = lease
            self._check(lease, "is handed out")
            self._busy = True
            step_s = self._scenario.step_s * self.step_factor * self._rng.uniform(0.5, 1.5)
            life.later(step_s if seq >= 0 else 0.001, partial(self._finish, lease))
        self.done = not self._untrained and not self._busy and not self.held

    def _ask_ahead(self) -> None:
        life = self._life
        while self._unasked and life.machine.can_submit:
            seq = self._unasked.popleft()
            payload, expect = question(seq, None if seq < 0 else self._batches[seq])
            life.submit(seq, payload, expect)

    def _finish(self, lease: Lease) -> None:
        """The step is over; its slot is released now, or when the device is through with it."""
        self._check(lease, "was trained on")
        self._busy = False
        if lease.seq >= 0:
            self._record(lease.seq)
        if self._scenario.late_release and self._rng.random() < 0.5:
            wait_s = self._rng.uniform(0.0, 3.0) * self._scenario.step_s
            self._life.later(wait_s, lambda: self._release(lease), source="device")
        else:
            self._release(lease)
        self.called = True

    def _release(self, lease: Lease) -> None:
        self._check(lease, "is released")
        del self.held[lease.seq]
        self._life.release(lease.seq)
        self.called = True

    def _record(self, seq: int) -> None:
        self._trained(seq)
        self.position = seq + 1
        if self.position % self._scenario.steps_a_checkpoint == 0 or self.position == len(self._batches):
            position = self.position
            self._life.later(self._rng.uniform(0.0, 0.5), lambda: self._durable(position), source="disk")

    def _check(self, lease: Lease, when: str) -> None:
        """R1, R3, R4: the lease is of its seq, its header is what was expected, and its bytes answer just this fill."""
        life, header, seq = self._life, lease.header, lease.seq
        expect = question(seq, None if seq < 0 else self._batches[seq])[1]
        found = (header.fill, header.num_rows, header.dtype, header.num_bytes, header.input_hash, header.student_epoch)
        wanted = (lease.fill, expect.num_rows, expect.dtype, expect.num_bytes, expect.input_hash, life.epoch)
        if found != wanted or (lease.fill.seq, lease.fill.slot) != (seq, lease.slot):
            raise Violation(f"{life.name}: the lease of seq {seq} in slot {lease.slot} has {found}, not {wanted}")
        if header.fingerprint != FINGERPRINT or not header.teacher_epoch.startswith(f"{lease.replica}."):
            raise Violation(
                f"{life.name}: seq {seq} from {lease.replica} is by {header.teacher_epoch} with another model"
            )
        content = states(
            student_epoch=life.epoch,
            teacher_epoch=header.teacher_epoch,
            fill=lease.fill,
            input_hash=expect.input_hash,
            num_bytes=header.num_bytes,
        )
        found_bytes = life.memory.read(lease.slot, header.num_bytes)
        if found_bytes != content:
            raise Violation(f"{life.name}: slot {lease.slot} holds {found_bytes!r} when seq {seq} {when}")
