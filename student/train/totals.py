"""What a step counted, on one rank and then over all of them, and what metrics.jsonl says of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from ring.prefetch import Ring
from student.data import PlannedStep
from student.metrics import StepMetrics
from student.parallel.ranks import Ranks


@dataclass(frozen=True)
class RingTotals:
    """Running sums of the ring that steps report differences of. Zeros without a ring."""

    student_stall_s: float = 0.0
    teacher_stall_s: float = 0.0
    bytes_received: int = 0
    retries: int = 0
    occupancy: int = 0

    @classmethod
    def of(cls, ring: Ring | None) -> RingTotals:
        if ring is None:
            return cls()
        now = ring.stats()
        machine = now.machine
        occupancy = machine.num_filled + machine.num_leased
        return cls(now.student_stall_s, machine.teacher_stall_s, machine.bytes_received, machine.retries, occupancy)


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """One step of one rank; as in StepMetrics, but for `tokens`. Losses are this rank's share of the step's."""

    loss: float
    kd: float
    lm_loss: float
    tokens: float
    teacher_s: float
    teacher_stall_s: float
    bytes_received: float
    retries: float
    student_stall_s: float
    ring_occupancy: float
    peak_rss_bytes: float


#: Of these the ranks' mean is told, of the memory the most, of all else the sum.
_MEANS = frozenset({"student_stall_s", "ring_occupancy"})
_MOST = frozenset({"peak_rss_bytes"})


def over_ranks(own: StepTotals, ranks: Ranks) -> StepTotals:
    """The step of all ranks. Raises RankLost."""
    if not ranks.are_many:
        return own
    rows = ranks.gather_floats(list(asdict(own).values()))
    joined: dict[str, float] = {}
    for field, values in zip(fields(own), zip(*rows, strict=True), strict=True):
        total = max(values) if field.name in _MOST else sum(values)
        joined[field.name] = total / ranks.world_size if field.name in _MEANS else total
    return StepTotals(**joined)


def step_metrics(
    planned: PlannedStep, total: StepTotals, *, lr: float, norm: float, step_s: float, is_taken: bool
) -> StepMetrics:
    """total: of all ranks."""
    seqs = [batch.seq for batch in planned.microbatches if batch.seq is not None]
    return StepMetrics(
        step=planned.step,
        epoch=planned.epoch,
        position=planned.next_position,
        seq_first=min(seqs, default=-1),
        seq_last=max(seqs, default=-1),
        lm_loss=total.lm_loss,
        kd=total.kd,
        loss=total.loss,
        rows=planned.num_rows,
        samples=len(planned.sample_ids),
        samples_left_out=0 if is_taken else len(planned.sample_ids),
        lr=lr,
        grad_norm=norm,
        tokens_per_s=total.tokens / step_s,
        step_s=step_s,
        teacher_s=total.teacher_s,
        student_stall_s=total.student_stall_s,
        teacher_stall_s=total.teacher_stall_s,
        ring_occupancy=total.ring_occupancy,
        bytes_received=int(total.bytes_received),
        retries=int(total.retries),
        peak_rss_bytes=int(total.peak_rss_bytes),
    )
