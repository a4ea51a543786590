"""Which rows count: named by the caller (no device sync at all) or read from the labels (exactly one)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """The counted rows of a call.

    index [R] names them among the N rows of the student's states, labels and row weights; None = all of them, in order.
    teacher_compact: the teacher's states hold just those R rows, in the order of index.
    """

    index: Tensor | None
    count: int
    teacher_compact: bool

    def pick(self, values: Tensor, start: int, stop: int) -> Tensor:
        """Rows start..stop (counted) of something that has all N rows: a view where every row counts, else a copy."""
        if self.index is None:
            return values[start:stop]
        return values.index_select(0, self.index[start:stop])

    def pick_teacher(self, values: Tensor, start: int, stop: int) -> Tensor:
        """The same of something that comes with the teacher's states."""
        return values[start:stop] if self.teacher_compact else self.pick(values, start, stop)


def resolve_rows(
    *,
    num_rows_given: int,
    num_teacher_rows: int | None,
    labels: Tensor | None,
    row_index: Tensor | None,
    all_rows: bool,
    ignore_index: int,
) -> Rows:
    """Find the counted rows. Reads the device (once) only when neither row_index nor all_rows says which they are.

    Raises ValueError or TypeError: contradicting or missing information, or a teacher with neither N nor R rows.
    """
    if row_index is not None and all_rows:
        raise ValueError("row_index and all_rows: got both; allowed: one of them")
    index: Tensor | None = None
    if row_index is not None:
        if row_index.dtype != torch.int64 or row_index.dim() != 1:
            raise TypeError(f"row_index: got {row_index.dtype} {tuple(row_index.shape)}; allowed: int64 [R]")
        index = row_index
    elif not all_rows:
        if labels is None:
            raise ValueError(
                "labels: got None with neither row_index nor all_rows; allowed: labels, or say which rows count"
            )
        index = (labels != ignore_index).nonzero().squeeze(1)
        if index.shape[0] == num_rows_given:
            index = None
    count = num_rows_given if index is None else index.shape[0]
    if count > num_rows_given:
        raise ValueError(f"row_index: got {count} rows of {num_rows_given}; allowed: distinct rows")
    if num_teacher_rows is not None and num_teacher_rows not in (count, num_rows_given):
        raise ValueError(
            f"teacher_hidden: got {num_teacher_rows} rows; allowed: {num_rows_given}, or {count}: the counted ones, in "
            f"their order"
        )
    return Rows(index=index, count=count, teacher_compact=num_teacher_rows == count)
