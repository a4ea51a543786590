"""The trainer's feed: microbatches in order, each with its teacher states, asked for as far ahead as the ring allows.

Requests run ahead across step and epoch boundaries; what was asked for ahead is not part of any checkpoint, so a
resumed run simply asks again.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ring.core.errors import DeadlineExceeded, DisaggKDError, LocalProtocolError, TeacherLost
from ring.core.messages import TokenRequest
from ring.lease import Event, Lease
from ring.prefetch import Ring
from student.data import MicroBatch, MicroBatchPlan, TokenDataset, build_microbatch
from student.parallel.agreement import Standing, Verdict, agree
from student.parallel.ranks import RankFailed, Ranks

if TYPE_CHECKING:
    from student.train.lockstep import Lockstep

#: Microbatches in host memory that are not trained on yet, at most.
MAX_AHEAD = 64
#: While the feed waits for a teacher, it asks this often whether the run is to stop, and tells the other ranks.
STOP_POLL_S = 0.25


class Stopped(DisaggKDError):
    """The run is to stop, and not all is there that the next microbatch needs."""

    def __init__(self, message: str, *, signal: int) -> None:
        super().__init__(message)
        self.signal = signal


@dataclass(kw_only=True)
class FeedCounts:
    """What the feed handed out so far. `forward_s`: the teachers' forward passes for it, from the fills' headers."""

    microbatches: int = 0
    forward_s: float = 0.0


class Feed:
    """Microbatches of one rank from `position` on. Without a ring (labels only) there are no states."""

    def __init__(
        self,
        plan: MicroBatchPlan,
        dataset: TokenDataset,
        ring: Ring | None,
        *,
        ranks: Ranks,
        lockstep: Lockstep | None = None,
        position: int,
        pad_id: int,
        device: torch.device,
    ) -> None:
        self.counts = FeedCounts()
        self._ring = ring
        self._ranks = ranks
        self._lockstep = lockstep
        self._device = device
        self._planned = (
            build_microbatch(dataset, planned, pad_id=pad_id)
            for step in plan.steps(position)
            for planned in step.microbatches
        )
        self._ahead: deque[MicroBatch] = deque()
        # Of asking ahead. Kept for the next agreement: the other ranks must hear of it before this one leaves.
        self._failure: DisaggKDError | None = None
        # Microbatches without rows are not asked for, so that the ring alone would not bound how many are built ahead.
        self._most_ahead = 1 if ring is None else MAX_AHEAD

    def next(self) -> MicroBatch:
        """The next microbatch of the plan. Raises LocalProtocolError: there is none."""
        self._look_ahead()
        if not self._ahead and self._failure is not None:
            # It is not asked for any more; the failure is what `states` ends with.
            self._ahead.extend(itertools.islice(self._planned, 1))
        if not self._ahead:
            raise LocalProtocolError("the feed is at its end: no microbatch is left in the plan")
        self.counts.microbatches += 1
        return self._ahead.popleft()

    @contextmanager
    def states(self, batch: MicroBatch, *, stop_signal: Callable[[], int]) -> Iterator[torch.Tensor | None]:
        """The teacher's states of the microbatch that `next` gave last: [num_rows, hidden], read in place in the slot.

        None without a ring, and for a microbatch without rows, which was never asked for. The block is entered on all
        ranks or on none. stop_signal: the number of the signal that asked for the end; 0: none did.
        Lifetime: until the block ends; then the slot carries the next request.
        Raises what ended the ring, TeacherLost mostly, here or (as TeacherLost, RankFailed) on another rank; all ranks
        know of it. Raises Stopped: they were waited for, here or on another rank, and a signal came. Raises RankLost.
        """
        lease = self._agreed_lease(batch, stop_signal)
        if lease is None:
            yield None
            return
        assert lease.seq == batch.seq, f"the ring delivered seq {lease.seq} for microbatch {batch.seq}"
        self.counts.forward_s += lease.header.forward_s
        try:
            yield lease.tensor()
        finally:
            lease.release(after=self._device_event())
            self._look_ahead()

    def _agreed_lease(self, batch: MicroBatch, stop_signal: Callable[[], int]) -> Lease | None:
        """The lease of the microbatch, if it needs one, once every rank has its own."""
        ring, lease = self._ring if batch.num_rows else None, None
        if self._lockstep is not None:
            # What could not be asked for never comes to the teacher.
            self._failure = self._lockstep.turn(ring if self._failure is None else None) or self._failure
        while True:
            standing, failure = Standing.READY, self._failure
            if failure is None and ring is not None and lease is None:
                try:
                    lease = ring.next_lease(timeout_s=STOP_POLL_S)
                except DeadlineExceeded:
                    standing = Standing.WAITING
                except DisaggKDError as error:
                    failure = error
            if failure is not None:
                standing = Standing.LOST
            code = 0 if failure is None else failure.exit_code
            verdict = agree(self._ranks, standing, signal=stop_signal(), exit_code=code)
            if verdict.standing == Standing.READY:
                return lease
            if verdict.standing == Standing.WAITING:
                continue
            if lease is not None:
                lease.release()
            if failure is not None:
                raise self._ranks.known_to_all(failure)
            if verdict.standing == Standing.LOST:
                raise self._ranks.known_to_all(_lost_elsewhere(verdict))
            raise Stopped("the run is to stop while it waits for a teacher", signal=verdict.signal)

    def _look_ahead(self) -> None:
        ring = self._ring
        while self._failure is None and len(self._ahead) < self._most_ahead and (ring is None or ring.can_submit):
            batch = next(self._planned, None)
            if batch is None:
                return
            self._ahead.append(batch)
            if ring is not None and batch.num_rows:
                assert batch.seq is not None
                try:
                    ring.submit(batch.seq, token_request(batch))
                except DisaggKDError as error:
                    self._failure = error

    def _device_event(self) -> Event | None:
        if self._device.type != "cuda":
            return None
        event: Event = torch.cuda.current_stream(self._device).record_event()
        return event


def _lost_elsewhere(verdict: Verdict) -> DisaggKDError:
    rank, code = verdict.lost[0]
    message = f"rank {rank} has lost its teacher, and says which"
    return TeacherLost(message) if code == TeacherLost.exit_code else RankFailed(message, exit_code=code)


def token_request(batch: MicroBatch) -> TokenRequest:
    """What the teacher is asked for this microbatch."""
    return TokenRequest(
        token_ids=batch.token_bytes(),
        doc_lengths=batch.doc_lengths,
        row_ranges=batch.row_ranges,
        input_hash=batch.input_hash,
    )
