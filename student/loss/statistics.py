"""The few numbers that a row needs from its logits, gathered tile by tile and merged over ranks.

For a row's tempered logits u = z / T of the student and v of the teacher: the running maxima, the sums of exponentials
relative to them, the label's logit, and (for KL's two directions) the mean of v - u under one side. They are
associative: a part with another maximum joins after a factor e^(its max - the new max). One gather of 7 numbers a row
(8 where cross entropy runs at another temperature than KD) merges vocabulary shards.

Legend: R rows, K fields, S shards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from student.loss.collectives import all_gather
from student.loss.divergences import Divergence

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Above this a row's divergence can only come from a column that one model forbids (logit -inf) and the other does not:
# logit_floor stands in for such a logit, so that any probability above 1e-26 on the column shows here.
INFINITE_DIVERGENCE = 1e8


def logit_floor(dtype: torch.dtype) -> float:
    """A finite stand-in for a logit of -inf: its exponential is 0 beside any real logit, its differences stay
    finite."""
    return -1e300 if dtype == torch.float64 else -1e34


class Field(IntEnum):
    """What the table of statistics holds of each row."""

    STUDENT_MAX = 0
    STUDENT_SUM = 1
    TEACHER_MAX = 2
    TEACHER_SUM = 3
    RATIO_SUM = 4  # sum of e^(w - max w) (v - u), w = v or u: the side whose mean the divergence needs
    LABEL_LOGIT = 5  # u of the label's column
    LABEL_HITS = 6  # how often the label's column was met: once, or the label is outside of the vocabulary
    LABEL_SUM = 7  # sum of e^(z - max z): cross entropy's, where KD's temperature is not 1


NUM_FIELDS = 7


@dataclass(frozen=True)
class RowStatistics:
    """The table [K, R] of some rows. A row not yet seen has maxima of -inf and sums of 0.

    entry: the divergence, None without a teacher. temperature: KD's.
    """

    table: Tensor
    entry: Divergence | None
    temperature: float

    @classmethod
    def empty(
        cls,
        num_rows: int,
        *,
        entry: Divergence | None,
        temperature: float,
        label_sum: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> RowStatistics:
        table_KR = torch.zeros(NUM_FIELDS + int(label_sum), num_rows, dtype=dtype, device=device)
        table_KR[Field.STUDENT_MAX].fill_(-torch.inf)
        table_KR[Field.TEACHER_MAX].fill_(-torch.inf)
        return cls(table_KR, entry, temperature)

    def rows(self, start: int, stop: int) -> RowStatistics:
        """A view of some rows: what is written there is written here."""
        return replace(self, table=self.table[:, start:stop])

    def __getitem__(self, field: Field) -> Tensor:
        """A field of every row [R]."""
        return self.table[field]

    @property
    def has_label_sum(self) -> bool:
        return self.table.shape[0] > Field.LABEL_SUM

    def raise_maxima(self, student_max_R: Tensor, teacher_max_R: Tensor | None) -> None:
        """Join the maxima of more columns: the sums shrink to the new ones."""
        self._raise(Field.STUDENT_MAX, student_max_R)
        if teacher_max_R is not None:
            self._raise(Field.TEACHER_MAX, teacher_max_R)

    def _raise(self, field: Field, max_R: Tensor) -> None:
        new_R = torch.maximum(self[field], max_R)
        # Where neither has seen a column yet both are -inf: their sums are 0 and stay so.
        drop_R = (self[field] - new_R).nan_to_num_(nan=0.0)
        for sum_field, factor_R in self._factors(field, drop_R).items():
            self[sum_field].mul_(factor_R)
        self[field].copy_(new_R)

    def _factors(self, field: Field, drop_R: Tensor) -> dict[Field, Tensor]:
        """By how much the sums relative to a maximum shrink when it rises by -drop."""
        factor_R = drop_R.exp()
        ratio_side = Field.TEACHER_MAX if self._ratio_under_teacher else Field.STUDENT_MAX
        factors = {Field.STUDENT_SUM if field == Field.STUDENT_MAX else Field.TEACHER_SUM: factor_R}
        if field == ratio_side:
            factors[Field.RATIO_SUM] = factor_R
        if field == Field.STUDENT_MAX and self.has_label_sum:
            factors[Field.LABEL_SUM] = (drop_R * self.temperature).exp_()
        return factors

    @property
    def _ratio_under_teacher(self) -> bool:
        return self.entry is not None and self.entry.mean_log_ratio == "teacher"

    def merge(self, group: ProcessGroup) -> None:
        """Make these the statistics of the whole vocabulary, equal to the bit on every rank of the group."""
        num_shards = dist.get_world_size(group)
        shards_SKR = self.table.new_empty(num_shards, *self.table.shape)
        flat_KR = shards_SKR.view(-1, self.table.shape[1])
        all_gather(flat_KR, self.table.contiguous(), group)
        total = self.rows(0, self.table.shape[1])
        self.table.copy_(shards_SKR[0])
        for shard_KR in shards_SKR[1:]:
            other = replace(self, table=shard_KR)
            # Both sides rise to the common maximum, then the sums add up. A shard without a column rises from -inf.
            teacher_max_R = None if self.entry is None else other[Field.TEACHER_MAX]
            total.raise_maxima(other[Field.STUDENT_MAX], teacher_max_R)
            teacher_max_R = None if self.entry is None else self[Field.TEACHER_MAX]
            other.raise_maxima(self[Field.STUDENT_MAX], teacher_max_R)
            for field in Field:
                if field < self.table.shape[0] and field not in (Field.STUDENT_MAX, Field.TEACHER_MAX):
                    self[field].add_(other[field])

    def lse_gap(self) -> Tensor:
        """log-sum-exp of the student's row minus the teacher's; written so that near-equal rows lose no digits."""
        gap_R = self[Field.STUDENT_MAX] - self[Field.TEACHER_MAX]
        return gap_R + (self[Field.STUDENT_SUM] / self[Field.TEACHER_SUM]).log_()

    def cross_entropy(self) -> Tensor:
        """CE of the label in each row, at temperature 1."""
        sum_R = self[Field.LABEL_SUM] if self.has_label_sum else self[Field.STUDENT_SUM]
        return (self[Field.STUDENT_MAX] - self[Field.LABEL_LOGIT]) * self.temperature + sum_R.log()

    def mean_log_ratio(self) -> Tensor:
        """Mean of v - u under the side that the divergence asks for (the log ratio up to the row's lse gap)."""
        side = Field.TEACHER_SUM if self._ratio_under_teacher else Field.STUDENT_SUM
        return self[Field.RATIO_SUM] / self[side]
