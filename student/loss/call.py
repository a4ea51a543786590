"""What one call of a distillation loss is given, checked once: shared by the fused loss and the textbook one."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
import torch.distributed as dist
from torch import Tensor

from student.loss.head import Head, check_pair
from student.loss.options import KDOutput, LossOptions
from student.loss.rows import Rows, resolve_rows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True)
class LossCall:
    """The checked inputs of one call."""

    options: LossOptions
    student_hidden: Tensor
    student_head: Head
    teacher_hidden: Tensor | None
    teacher_head: Head | None
    labels: Tensor | None
    rows: Rows
    row_weights: Tensor | None
    teacher_row_scale: Tensor | None
    divisor: float | Tensor
    vocab_group: ProcessGroup | None
    group_rows: tuple[int, ...] | None = None


class DistillationLoss(ABC):
    """A loss with the signature of KDLoss."""

    options: LossOptions

    def __init__(
        self,
        divergence: str = "forward_kl",
        *,
        temperature: float = 1.0,
        scale_t2: bool = True,
        kd_weight: float = 0.5,
        ce_weight: float = 0.5,
        teacher_weight: float = 0.5,
        skew_alpha: float = 0.1,
        precision: str = "fp32",
        workspace_bytes: int | None = None,
        ignore_index: int = -100,
    ) -> None:
        self.options = LossOptions(
            divergence=divergence,
            temperature=temperature,
            scale_t2=scale_t2,
            kd_weight=kd_weight,
            ce_weight=ce_weight,
            teacher_weight=teacher_weight,
            skew_alpha=skew_alpha,
            precision=precision,
            workspace_bytes=workspace_bytes,
            ignore_index=ignore_index,
        )
        self.num_empty_calls = 0

    @classmethod
    def from_options(cls, options: LossOptions) -> Self:
        """The loss of ready-made options."""
        loss = cls()
        loss.options = options
        return loss

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.options})"

    def __call__(
        self,
        student_hidden: Tensor,
        student_head: Head,
        teacher_hidden: Tensor | None,
        teacher_head: Head | None,
        labels: Tensor | None,
        *,
        row_index: Tensor | None = None,
        all_rows: bool = False,
        row_weights: Tensor | None = None,
        teacher_row_scale: Tensor | None = None,
        num_rows: int | float | Tensor | None = None,
        vocab_group: ProcessGroup | None = None,
        group_rows: Sequence[int] | None = None,
    ) -> KDOutput:
        """The loss of one call; KDLoss says what each argument means."""
        options = self.options
        if options.kd_weight == 0:
            teacher_hidden = teacher_head = teacher_row_scale = None
        elif teacher_hidden is None or teacher_head is None:
            raise ValueError("teacher_hidden and teacher_head: got None; allowed: only with kd_weight=0")
        else:
            _check_teacher(teacher_hidden, teacher_head, teacher_row_scale, student_hidden)
        _check_student(student_hidden, student_head, labels, row_weights, options)
        check_pair(student_head, teacher_head or student_head, sharded=vocab_group is not None)
        rows = resolve_rows(
            num_rows_given=student_hidden.shape[0],
            num_teacher_rows=None if teacher_hidden is None else teacher_hidden.shape[0],
            labels=labels,
            row_index=row_index,
            all_rows=all_rows,
            ignore_index=options.ignore_index,
        )
        counts = _checked_group_rows(group_rows, rows.count, vocab_group)
        if (rows.count if counts is None else sum(counts)) == 0:
            self._count_empty_call()
        return self._compute(
            LossCall(
                options=options,
                student_hidden=student_hidden,
                student_head=student_head,
                teacher_hidden=teacher_hidden,
                teacher_head=teacher_head,
                labels=labels,
                rows=rows,
                row_weights=row_weights,
                teacher_row_scale=teacher_row_scale,
                divisor=_divisor(num_rows, rows.count if counts is None else sum(counts)),
                vocab_group=vocab_group,
                group_rows=counts,
            )
        )

    @abstractmethod
    def _compute(self, call: LossCall) -> KDOutput: ...

    def _count_empty_call(self) -> None:
        if self.num_empty_calls == 0:
            warnings.warn(
                "distillation loss: no row of this call counts (every label is masked): loss 0, zero gradients. "
                "Further such calls are counted in num_empty_calls without a warning",
                RuntimeWarning,
                stacklevel=3,
            )
        self.num_empty_calls += 1


def _checked_group_rows(
    group_rows: Sequence[int] | None, count: int, vocab_group: ProcessGroup | None
) -> tuple[int, ...] | None:
    if group_rows is None:
        return None
    if vocab_group is None:
        raise ValueError("group_rows: got counts without a vocab_group; allowed: both, or neither")
    size, rank = dist.get_world_size(vocab_group), dist.get_rank(vocab_group)
    if len(group_rows) != size or group_rows[rank] != count:
        raise ValueError(
            f"group_rows: got {tuple(group_rows)} on rank {rank} of {size} with {count} counted rows; allowed: each "
            f"rank's count, in the order of the group"
        )
    return tuple(group_rows)


def _divisor(num_rows: int | float | Tensor | None, count: int) -> float | Tensor:
    """What the sums are divided by; never 0, so that a step without rows gives 0 and not NaN."""
    if isinstance(num_rows, Tensor):
        return num_rows.detach().clamp(min=1)
    if num_rows is not None and num_rows < 0:
        raise ValueError(f"num_rows: got {num_rows}; allowed: 0 and more")
    return float(max(count if num_rows is None else num_rows, 1))


def _check_student(
    hidden: Tensor, head: Head, labels: Tensor | None, row_weights: Tensor | None, options: LossOptions
) -> None:
    if hidden.dim() != 2 or not hidden.is_floating_point() or hidden.dtype.itemsize < 2:
        raise ValueError(
            f"student_hidden: got {hidden.dtype} {tuple(hidden.shape)}; allowed: bf16, fp16, fp32 or fp64 [N, Hs]"
        )
    _check_width("student", hidden, head)
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    if head.main_grad is not None and head.main_grad.dtype != wide:
        raise ValueError(f"main_grad: got {head.main_grad.dtype}; allowed with {hidden.dtype} states: {wide}")
    num_rows = hidden.shape[0]
    if labels is None and options.ce_weight > 0:
        raise ValueError("labels: got None; allowed: only with ce_weight=0")
    if labels is not None and (labels.shape != (num_rows,) or labels.dtype != torch.int64):
        raise ValueError(f"labels: got {labels.dtype} {tuple(labels.shape)}; allowed: int64 [{num_rows}]")
    if row_weights is not None and row_weights.shape != (num_rows,):
        raise ValueError(f"row_weights: got {tuple(row_weights.shape)}; allowed: [{num_rows}]")


def _check_teacher(hidden: Tensor, head: Head, row_scale: Tensor | None, student_hidden: Tensor) -> None:
    if hidden.dim() != 2 or not hidden.is_floating_point():
        raise ValueError(
            f"teacher_hidden: got {hidden.dtype} {tuple(hidden.shape)}; allowed: a floating [N, Ht] or [R, Ht]"
        )
    _check_width("teacher", hidden, head)
    if hidden.device != student_hidden.device:
        raise ValueError(
            f"teacher_hidden: on {hidden.device}, the student's states on {student_hidden.device}; allowed: equal"
        )
    if row_scale is not None and row_scale.shape != hidden.shape[:1]:
        raise ValueError(f"teacher_row_scale: got {tuple(row_scale.shape)}; allowed: [{hidden.shape[0]}]")


def _check_width(side: str, hidden: Tensor, head: Head) -> None:
    if hidden.shape[1] != head.weight.shape[1]:
        raise ValueError(
            f"{side} head: hidden size {head.weight.shape[1]}, the states have {hidden.shape[1]}; allowed: equal"
        )
