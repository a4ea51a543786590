"""The trainer's feed: microbatches in order, each with its teacher states, asked for as far ahead as the ring allows.

Requests run ahead across step and epoch boundaries; what was asked for ahead is not part of any checkpoint, so a
resumed run simply asks again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ring.core.errors import DeadlineExceeded, DisaggKDError, LocalProtocolError
from ring.core.messages import TokenRequest
from ring.lease import Event, Lease
from ring.prefetch import Ring
from student.data import MicroBatch, MicroBatchPlan, TokenDataset, build_microbatch

#: Microbatches in host memory that are not trained on yet, at most.
MAX_AHEAD = 64
#: While the feed waits for a teacher, it asks this often whether the run is to stop.
STOP_POLL_S = 0.25


class Stopped(DisaggKDError):
    """The run is to stop, and the states of the next microbatch are not there yet."""


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
        position: int,
        pad_id: int,
        device: torch.device,
    ) -> None:
        self.counts = FeedCounts()
        self._ring = ring
        self._device = device
        self._planned = (
            build_microbatch(dataset, planned, pad_id=pad_id)
            for step in plan.steps(position)
            for planned in step.microbatches
        )
        self._ahead: deque[MicroBatch] = deque()
        # Microbatches without rows are not asked for, so that the ring alone would not bound how many are built ahead.
        self._most_ahead = 1 if ring is None else MAX_AHEAD

    def next(self) -> MicroBatch:
        """The next microbatch of the plan. Raises LocalProtocolError: there is none. Raises TeacherLost."""
        self._look_ahead()
        if not self._ahead:
            raise LocalProtocolError("the feed is at its end: no microbatch is left in the plan")
        self.counts.microbatches += 1
        return self._ahead.popleft()

    @contextmanager
    def states(self, batch: MicroBatch, *, stopping: Callable[[], bool]) -> Iterator[torch.Tensor | None]:
        """The teacher's states of the microbatch that `next` gave last: [num_rows, hidden], read in place in the slot.

        None without a ring, and for a microbatch without rows, which was never asked for.
        Lifetime: until the block ends; then the slot carries the next request.
        Raises TeacherLost. Raises Stopped: they were waited for, and `stopping()` became true."""
        if self._ring is None or batch.num_rows == 0:
            yield None
            return
        lease = _next_lease(self._ring, stopping)
        assert lease.seq == batch.seq, f"the ring delivered seq {lease.seq} for microbatch {batch.seq}"
        self.counts.forward_s += lease.header.forward_s
        try:
            yield lease.tensor()
        finally:
            lease.release(after=self._device_event())
            self._look_ahead()

    def _look_ahead(self) -> None:
        ring = self._ring
        while len(self._ahead) < self._most_ahead and (ring is None or ring.can_submit):
            batch = next(self._planned, None)
            if batch is None:
                return
            self._ahead.append(batch)
            if ring is not None and batch.num_rows:
                assert batch.seq is not None
                ring.submit(batch.seq, token_request(batch))

    def _device_event(self) -> Event | None:
        if self._device.type != "cuda":
            return None
        event: Event = torch.cuda.current_stream(self._device).record_event()
        return event


def _next_lease(ring: Ring, stopping: Callable[[], bool]) -> Lease:
    while True:
        try:
            return ring.next_lease(timeout_s=STOP_POLL_S)
        except DeadlineExceeded as error:
            if stopping():
                raise Stopped(f"the run is to stop while it waits for a teacher: {error}") from None


def token_request(batch: MicroBatch) -> TokenRequest:
    """What the teacher is asked for this microbatch."""
    return TokenRequest(
        token_ids=batch.token_bytes(),
        doc_lengths=batch.doc_lengths,
        row_ranges=batch.row_ranges,
        input_hash=batch.input_hash,
    )
