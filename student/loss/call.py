"""What one call of a distillation loss is given, checked once: shared by the fused loss and the textbook one."""

from __future__ import annotations

import math
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

LABEL_OUTSIDE = "labels: one lies outside of the vocabulary's real columns; allowed: a real column or ignore_index"


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
            _check_teacher(teacher_hidden, teacher_head, teacher_row_scale)
        _check_student(student_hidden, student_head, labels, row_weights, options)
        _check_devices(
            student_hidden.device,
            **_tensors_of("student", student_head),
            teacher_hidden=teacher_hidden,
            teacher_row_scale=teacher_row_scale,
            **_tensors_of("teacher", teacher_head),
            labels=labels,
            row_index=row_index,
            row_weights=row_weights,
        )
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
                divisor=_divisor(num_rows, rows.count if counts is None else sum(counts), student_hidden),
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


def refuse_if(bad: Tensor, message: str) -> None:
    """Raise ValueError if any is bad, without a wait: on CUDA the device asserts, as torch's own losses do."""
    try:
        torch._assert_async(~bad.any(), message)
    except RuntimeError as error:
        raise ValueError(message) from error


def _divisor(num_rows: int | float | Tensor | None, count: int, hidden: Tensor) -> float | Tensor:
    """What the sums are divided by; 1 in place of 0, so that a step without rows gives 0 and not NaN. A tensor comes in
    the working dtype: a quotient with a count as it is would be of float32, in float64 as well."""
    if isinstance(num_rows, Tensor):
        if num_rows.numel() != 1 or num_rows.device not in (hidden.device, torch.device("cpu")):
            raise ValueError(
                f"num_rows: got {tuple(num_rows.shape)} on {num_rows.device}; allowed: a number, or a tensor of one on "
                f"{hidden.device} or cpu"
            )
        wide = num_rows.detach().reshape(()).to(work_dtype(hidden))
        refuse_if(~(wide.isfinite() & (wide >= 0)), "num_rows: not a number of 0 or more; allowed: finite, 0 and more")
        return torch.where(wide == 0, 1.0, wide)
    if num_rows is not None and not (math.isfinite(num_rows) and num_rows >= 0):
        raise ValueError(f"num_rows: got {num_rows}; allowed: finite, 0 and more")
    return float((count if num_rows is None else num_rows) or 1)


def work_dtype(hidden: Tensor) -> torch.dtype:
    """What statistics, sums and the gradient of the head are kept in."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _check_student(
    hidden: Tensor, head: Head, labels: Tensor | None, row_weights: Tensor | None, options: LossOptions
) -> None:
    if hidden.dim() != 2 or not hidden.is_floating_point() or hidden.dtype.itemsize < 2:
        raise ValueError(
            f"student_hidden: got {hidden.dtype} {tuple(hidden.shape)}; allowed: bf16, fp16, fp32 or fp64 [N, Hs]"
        )
    _check_width("student", hidden, head)
    wide = work_dtype(hidden)
    if head.main_grad is not None and head.main_grad.dtype != wide:
        raise ValueError(f"main_grad: got {head.main_grad.dtype}; allowed with {hidden.dtype} states: {wide}")
    num_rows = hidden.shape[0]
    if labels is None and options.ce_weight > 0:
        raise ValueError("labels: got None; allowed: only with ce_weight=0")
    if labels is not None and (labels.shape != (num_rows,) or labels.dtype != torch.int64):
        raise ValueError(f"labels: got {labels.dtype} {tuple(labels.shape)}; allowed: int64 [{num_rows}]")
    if row_weights is not None and row_weights.shape != (num_rows,):
        raise ValueError(f"row_weights: got {tuple(row_weights.shape)}; allowed: [{num_rows}]")


def _check_teacher(hidden: Tensor, head: Head, row_scale: Tensor | None) -> None:
    if hidden.dim() != 2 or not hidden.is_floating_point():
        raise ValueError(
            f"teacher_hidden: got {hidden.dtype} {tuple(hidden.shape)}; allowed: a floating [N, Ht] or [R, Ht]"
        )
    _check_width("teacher", hidden, head)
    if row_scale is not None and row_scale.shape != hidden.shape[:1]:
        raise ValueError(f"teacher_row_scale: got {tuple(row_scale.shape)}; allowed: [{hidden.shape[0]}]")


def _tensors_of(side: str, head: Head | None) -> dict[str, Tensor | None]:
    if head is None:
        return {}
    return {f"{side} head {name}": getattr(head, name) for name in ("weight", "bias", "main_grad")}


def _check_devices(device: torch.device, **tensors: Tensor | None) -> None:
    """Refuse what lies elsewhere than the student's states: on `meta` (weights that a loader has put aside) torch would
    compute with whatever the memory of a result happens to hold."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name}: on {tensor.device}, the student's states on {device}; allowed: the same device")


def _check_width(side: str, hidden: Tensor, head: Head) -> None:
    if hidden.shape[1] != head.weight.shape[1]:
        raise ValueError(
            f"{side} head: hidden size {head.weight.shape[1]}, the states have {hidden.shape[1]}; allowed: equal"
        )
