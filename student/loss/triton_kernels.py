# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""The epilogue of a window as three GPU kernels, over logits that the matrix library made: same steps, same contracts.

    statistics   a row's running maxima and sums, joined to what the row's earlier tiles left
    second       mixtures only: the value and the mean slope
    gradient     dL/dlogits, written over the row's own logits

A program takes one row, from its first column to its last, so nothing is exchanged between programs and a result
repeats itself to the bit. A 16-bit gradient lies in the first half of its row of float32 logits: a step reads its
columns, waits for the whole program, and writes to columns that every thread has read. Windows of 512 rows and more
fill a GPU. Kernels are not annotated (their arguments are pointers and compile-time constants), hence the header.

Legend: R rows of a window, C columns of a tile, K statistics.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import torch
import triton
import triton.language as tl
from torch import Tensor

from student.loss.epilogue import Epilogue, Window
from student.loss.head import Head
from student.loss.products import Arena
from student.loss.statistics import Field, RowStatistics

BLOCK, NUM_WARPS = 4096, 8
#: The divergences that the kernels know, by what `_terms` calls them; others run on torch's own operations.
KERNEL_DIVERGENCES = MappingProxyType(
    {"forward_kl": 0, "reverse_kl": 1, "jsd": 2, "skew_forward_kl": 3, "skew_reverse_kl": 4, "tvd": 5}
)

# As student.loss.statistics numbers them.
_STUDENT_MAX: tl.constexpr = tl.constexpr(int(Field.STUDENT_MAX))
_STUDENT_SUM: tl.constexpr = tl.constexpr(int(Field.STUDENT_SUM))
_TEACHER_MAX: tl.constexpr = tl.constexpr(int(Field.TEACHER_MAX))
_TEACHER_SUM: tl.constexpr = tl.constexpr(int(Field.TEACHER_SUM))
_RATIO_SUM: tl.constexpr = tl.constexpr(int(Field.RATIO_SUM))
_LABEL_LOGIT: tl.constexpr = tl.constexpr(int(Field.LABEL_LOGIT))
_LABEL_HITS: tl.constexpr = tl.constexpr(int(Field.LABEL_HITS))
_LABEL_SUM: tl.constexpr = tl.constexpr(int(Field.LABEL_SUM))
_FLOOR: tl.constexpr = tl.constexpr(-1e34)
_RATIO_LIMIT: tl.constexpr = tl.constexpr(80.0)


@triton.jit
def _logits(row_ptr, columns, num_columns, bias_ptr, row_scale, inner, outer):
    """Tempered, capped, finite logits of some columns, and the cap's slope there; -inf past the last column.

    u = inner z without a cap, outer tanh(inner z) with one."""
    mask = columns < num_columns
    z = tl.load(row_ptr + columns, mask=mask, other=0.0).to(tl.float32) * row_scale
    if bias_ptr is not None:
        z += tl.load(bias_ptr + columns, mask=mask, other=0.0)
    u = z * inner
    slope = tl.full(z.shape, 1.0, tl.float32)
    if outer is not None:
        tanh = 1.0 - 2.0 / (tl.exp(2.0 * u) + 1.0)
        slope = 1.0 - tanh * tanh
        u = tanh * outer
    # Not maximum(), here and below: it takes the number and drops the NaN.
    return tl.where(mask, tl.where(u < _FLOOR, _FLOOR, u), float("-inf")), slope


@triton.jit
def _within_limit(rho):
    rho = tl.where(rho > _RATIO_LIMIT, _RATIO_LIMIT, rho)
    return tl.where(rho < -_RATIO_LIMIT, -_RATIO_LIMIT, rho)


@triton.jit
def _terms(rho, mix, DIVERGENCE: tl.constexpr):
    """What a column adds to the value under the student and under the teacher, and its slope: as divergences.py."""
    student = tl.zeros(rho.shape, tl.float32)
    teacher = tl.zeros(rho.shape, tl.float32)
    slope = tl.zeros(rho.shape, tl.float32)
    if DIVERGENCE == 0:
        teacher = rho
    if DIVERGENCE == 1:
        student = -rho
        slope = -rho
    if DIVERGENCE == 2:
        log_mix = tl.log(1.0 + mix * (tl.exp(rho) - 1.0))
        student = (mix - 1.0) * log_mix
        teacher = mix * (rho - log_mix)
        slope = student
    if DIVERGENCE == 3:
        ratio = tl.exp(rho)
        mixture = 1.0 + mix * (ratio - 1.0)
        teacher = rho - tl.log(mixture)
        slope = (mix - 1.0) * (ratio / mixture - 1.0)
    if DIVERGENCE == 4:
        mixture = 1.0 + (1.0 - mix) * (tl.exp(rho) - 1.0)
        student = -tl.log(mixture)
        slope = student - mix * (1.0 / mixture - 1.0)
    if DIVERGENCE == 5:
        # rho itself where it is 0 or NaN.
        sign = tl.where(rho > 0, 1.0, tl.where(rho < 0, -1.0, rho))
        student = -0.5 * sign
        teacher = 0.5 * sign
        slope = student
    return student, teacher, slope


@triton.jit
def _add(place_ptr, value):
    tl.store(place_ptr, tl.load(place_ptr) + value)


@triton.jit
def statistics_kernel(
    student_ptr, student_stride, teacher_ptr, teacher_stride, table_ptr, table_stride,
    label_ptr, label_hit_ptr, student_bias_ptr, teacher_bias_ptr, teacher_scale_ptr,
    student_inner, student_outer, teacher_inner, teacher_outer, temperature, num_columns,
    HAS_TEACHER: tl.constexpr, HAS_LABEL: tl.constexpr, HAS_LABEL_SUM: tl.constexpr, RATIO_SIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Join a tile to its rows' statistics. RATIO_SIDE: under which side v - u is summed; 1 student, 2 teacher."""
    row = tl.program_id(0).to(tl.int64)
    student_row = student_ptr + row * student_stride
    teacher_row = teacher_ptr + row * teacher_stride
    stats = table_ptr + row
    s_max = tl.load(stats + _STUDENT_MAX * table_stride)
    s_sum = tl.load(stats + _STUDENT_SUM * table_stride)
    t_max = tl.load(stats + _TEACHER_MAX * table_stride)
    t_sum = tl.load(stats + _TEACHER_SUM * table_stride)
    ratio_sum = tl.load(stats + _RATIO_SUM * table_stride)
    label_sum = 0.0
    if HAS_LABEL_SUM:
        label_sum = tl.load(stats + _LABEL_SUM * table_stride)
    t_scale = 1.0
    if teacher_scale_ptr is not None:
        t_scale = tl.load(teacher_scale_ptr + row)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        u, _ = _logits(student_row, columns, num_columns, student_bias_ptr, 1.0, student_inner, student_outer)
        new_max = tl.maximum(s_max, tl.max(u, 0))
        drop = tl.exp(s_max - new_max)
        s_exp = tl.exp(u - new_max)
        s_sum = s_sum * drop + tl.sum(s_exp, 0)
        if HAS_LABEL_SUM:
            part = tl.sum(tl.exp((u - new_max) * temperature), 0)
            label_sum = label_sum * tl.exp((s_max - new_max) * temperature) + part
        s_max = new_max
        if HAS_TEACHER:
            v, _ = _logits(teacher_row, columns, num_columns, teacher_bias_ptr, t_scale, teacher_inner, teacher_outer)
            new_max = tl.maximum(t_max, tl.max(v, 0))
            t_drop = tl.exp(t_max - new_max)
            t_exp = tl.exp(v - new_max)
            t_sum = t_sum * t_drop + tl.sum(t_exp, 0)
            t_max = new_max
            gap = tl.where(columns < num_columns, v - u, 0.0)
            if RATIO_SIDE == 1:
                ratio_sum = ratio_sum * drop + tl.sum(s_exp * gap, 0)
            if RATIO_SIDE == 2:
                ratio_sum = ratio_sum * t_drop + tl.sum(t_exp * gap, 0)
    if HAS_LABEL:
        hit = tl.load(label_hit_ptr + row)
        column = tl.load(label_ptr + row) + tl.arange(0, 1)
        u, _ = _logits(student_row, column, num_columns, student_bias_ptr, 1.0, student_inner, student_outer)
        _add(stats + _LABEL_LOGIT * table_stride, tl.sum(u, 0) * hit)
        _add(stats + _LABEL_HITS * table_stride, hit)
    tl.store(stats + _STUDENT_MAX * table_stride, s_max)
    tl.store(stats + _STUDENT_SUM * table_stride, s_sum)
    if HAS_LABEL_SUM:
        tl.store(stats + _LABEL_SUM * table_stride, label_sum)
    if HAS_TEACHER:
        tl.store(stats + _TEACHER_MAX * table_stride, t_max)
        tl.store(stats + _TEACHER_SUM * table_stride, t_sum)
        tl.store(stats + _RATIO_SUM * table_stride, ratio_sum)


@triton.jit
def second_kernel(
    student_ptr, student_stride, teacher_ptr, teacher_stride, table_ptr, table_stride,
    gap_ptr, seconds_ptr, seconds_stride, student_bias_ptr, teacher_bias_ptr, teacher_scale_ptr,
    student_inner, student_outer, teacher_inner, teacher_outer, temperature, mix, num_columns,
    DIVERGENCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add a tile to its rows' value and mean slope."""
    row = tl.program_id(0).to(tl.int64)
    student_row = student_ptr + row * student_stride
    teacher_row = teacher_ptr + row * teacher_stride
    stats = table_ptr + row
    s_max = tl.load(stats + _STUDENT_MAX * table_stride)
    s_sum = tl.load(stats + _STUDENT_SUM * table_stride)
    t_max = tl.load(stats + _TEACHER_MAX * table_stride)
    t_sum = tl.load(stats + _TEACHER_SUM * table_stride)
    gap = tl.load(gap_ptr + row)
    t_scale = 1.0
    if teacher_scale_ptr is not None:
        t_scale = tl.load(teacher_scale_ptr + row)
    student_value = 0.0
    teacher_value = 0.0
    mean_slope = 0.0
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        u, _ = _logits(student_row, columns, num_columns, student_bias_ptr, 1.0, student_inner, student_outer)
        v, _ = _logits(teacher_row, columns, num_columns, teacher_bias_ptr, t_scale, teacher_inner, teacher_outer)
        rho = tl.where(columns < num_columns, v - u + gap, 0.0)
        rho = _within_limit(rho)
        of_student, of_teacher, slope = _terms(rho, mix, DIVERGENCE)
        s_exp = tl.exp(u - s_max)
        student_value += tl.sum(s_exp * of_student, 0)
        teacher_value += tl.sum(tl.exp(v - t_max) * of_teacher, 0)
        mean_slope += tl.sum(s_exp * slope, 0)
    value = student_value / s_sum + teacher_value / t_sum
    tl.store(seconds_ptr + row, tl.load(seconds_ptr + row) + value)
    at_slope = seconds_ptr + seconds_stride + row
    tl.store(at_slope, tl.load(at_slope) + mean_slope / s_sum)


@triton.jit
def gradient_kernel(
    student_ptr, student_stride, teacher_ptr, teacher_stride, grad_ptr, grad_stride, table_ptr, table_stride,
    gap_ptr, factor_ptr, factor_stride, label_ptr, label_hit_ptr,
    student_bias_ptr, teacher_bias_ptr, teacher_scale_ptr,
    student_inner, student_outer, teacher_inner, teacher_outer, temperature, mix, num_columns,
    DIVERGENCE: tl.constexpr, HAS_TEACHER: tl.constexpr, HAS_SLOPE: tl.constexpr, HAS_TEACHER_SLOPE: tl.constexpr,
    HAS_CE: tl.constexpr, HAS_LABEL_SUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write dL/dlogits. factor [5, R]: of p_s, of p_s slope, of p_t, of the label's softmax, of the label."""
    row = tl.program_id(0).to(tl.int64)
    student_row = student_ptr + row * student_stride
    teacher_row = teacher_ptr + row * teacher_stride
    grad_row = grad_ptr + row * grad_stride
    s_max = tl.load(table_ptr + row + _STUDENT_MAX * table_stride)
    t_max = tl.load(table_ptr + row + _TEACHER_MAX * table_stride)
    gap = tl.load(gap_ptr + row)
    constant = tl.load(factor_ptr + row)
    slope_factor = tl.load(factor_ptr + factor_stride + row)
    teacher_factor = tl.load(factor_ptr + 2 * factor_stride + row)
    label_factor = tl.load(factor_ptr + 3 * factor_stride + row)
    label = 0
    at_label = 0.0
    if HAS_CE:
        label = tl.load(label_ptr + row)
        at_label = tl.load(factor_ptr + 4 * factor_stride + row) * tl.load(label_hit_ptr + row)
    t_scale = 1.0
    if teacher_scale_ptr is not None:
        t_scale = tl.load(teacher_scale_ptr + row)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < num_columns
        u, cap_slope = _logits(student_row, columns, num_columns, student_bias_ptr, 1.0, student_inner, student_outer)
        weight = tl.full((BLOCK,), 0.0, tl.float32) + constant
        grad = tl.zeros((BLOCK,), tl.float32)
        if HAS_TEACHER:
            v, _ = _logits(teacher_row, columns, num_columns, teacher_bias_ptr, t_scale, teacher_inner, teacher_outer)
            if HAS_SLOPE:
                rho = tl.where(mask, v - u + gap, 0.0)
                rho = _within_limit(rho)
                _of_student, _of_teacher, slope = _terms(rho, mix, DIVERGENCE)
                weight += slope * slope_factor
            if HAS_TEACHER_SLOPE:
                grad += tl.exp(v - t_max) * teacher_factor
        grad += tl.exp(u - s_max) * weight
        if HAS_CE:
            if HAS_LABEL_SUM:
                grad += tl.exp((u - s_max) * temperature) * label_factor
            grad -= tl.where(columns == label, at_label, 0.0)
        # Nobody writes before everybody has read: the gradient lies in the logits' own memory.
        tl.debug_barrier()
        tl.store(grad_row + columns, (grad * cap_slope).to(grad_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True, kw_only=True)
class TritonEpilogue(Epilogue):
    """Epilogue's steps by kernels. It has no blocks: block_rows and room mean nothing to it."""

    @property
    def num_buffers(self) -> int:
        return 0

    def statistics(self, window: Window, block_rows: int, room: Arena) -> None:
        stats, label, entry = window.stats, window.label, self.entry
        student_RC, teacher_RC = self._planes(window)
        side = {None: 0, "student": 1, "teacher": 2}[entry.mean_log_ratio if entry else None]
        has_label = label is not None and window.label_hit is not None
        statistics_kernel[(student_RC.shape[0],)](
            *_strided(student_RC), *_strided(teacher_RC), *_strided(stats.table),
            label if has_label else student_RC, window.label_hit if has_label else student_RC,
            *self._sides(window), student_RC.shape[1],
            HAS_TEACHER=entry is not None, HAS_LABEL=has_label, HAS_LABEL_SUM=stats.has_label_sum, RATIO_SIDE=side,
            BLOCK=_block(student_RC.shape[1]), num_warps=NUM_WARPS,
        )  # fmt: skip

    def second(self, window: Window, block_rows: int, room: Arena) -> None:
        assert self.entry is not None
        student_RC, teacher_RC = self._planes(window)
        second_kernel[(student_RC.shape[0],)](
            *_strided(student_RC), *_strided(teacher_RC), *_strided(window.stats.table),
            window.stats.lse_gap().contiguous(), *_strided(window.seconds),
            *self._sides(window), self.mix, student_RC.shape[1],
            DIVERGENCE=KERNEL_DIVERGENCES[self.entry.name], BLOCK=_block(student_RC.shape[1]), num_warps=NUM_WARPS,
        )  # fmt: skip

    def gradient(self, window: Window, block_rows: int, room: Arena) -> None:
        stats, entry, label = window.stats, self.entry, window.label
        student_RC, teacher_RC = self._planes(window)
        has_ce = self.has_ce_grad and label is not None and window.label_hit is not None
        factor_5R = self._factors(stats, window)
        # KL's slope is the log ratio up to a constant of the row, as its mean is.
        has_gap = entry is not None and entry.num_passes == 2
        gap_R = stats.lse_gap().contiguous() if has_gap else torch.zeros_like(factor_5R[0])
        gradient_kernel[(student_RC.shape[0],)](
            *_strided(student_RC), *_strided(teacher_RC), *_strided(window.grad), *_strided(stats.table),
            gap_R, *_strided(factor_5R), label if has_ce else student_RC, window.label_hit if has_ce else student_RC,
            *self._sides(window), self.mix, student_RC.shape[1],
            DIVERGENCE=KERNEL_DIVERGENCES[entry.name] if entry else 0, HAS_TEACHER=entry is not None,
            HAS_SLOPE=entry is not None and entry.name != "forward_kl",
            HAS_TEACHER_SLOPE=entry is not None and entry.teacher_slope != 0,
            HAS_CE=has_ce, HAS_LABEL_SUM=stats.has_label_sum, BLOCK=_block(student_RC.shape[1]), num_warps=NUM_WARPS,
        )  # fmt: skip

    def fused(self, window: Window, block_rows: int, room: Arena, *, with_gradient: bool) -> None:
        self.statistics(window, block_rows, room)
        if self.entry is not None and self.entry.num_passes == 2:
            self.second(window, block_rows, room)
        if with_gradient:
            self.gradient(window, block_rows, room)

    def _factors(self, stats: RowStatistics, window: Window) -> Tensor:
        kd_R, ce_R, student_sum_R = window.kd_scale, window.ce_scale, stats[Field.STUDENT_SUM]
        none_R = torch.zeros_like(student_sum_R)
        constant_R = -kd_R * self.mean_slope(stats, window.seconds)
        if not stats.has_label_sum:
            constant_R = constant_R + ce_R
        teacher_slope = self.entry.teacher_slope if self.entry else 0.0
        rows = [
            constant_R / student_sum_R,
            kd_R / student_sum_R,
            kd_R * teacher_slope / stats[Field.TEACHER_SUM] if teacher_slope else none_R,
            ce_R / stats[Field.LABEL_SUM] if stats.has_label_sum else none_R,
            ce_R,
        ]
        return torch.stack(rows)

    def _planes(self, window: Window) -> tuple[Tensor, Tensor]:
        student_RC = window.student_planes[0]
        return student_RC, window.teacher_planes[0] if self.entry is not None else student_RC

    def _sides(self, window: Window) -> tuple[Tensor | float | None, ...]:
        """What the kernels read of both heads."""
        pointers = (window.student_bias, window.teacher_bias, window.teacher_scale)
        numbers = (*self._numbers(self.student_head), *self._numbers(self.teacher_head or self.student_head))
        return (*pointers, *numbers, float(self.temperature))

    def _numbers(self, head: Head) -> tuple[float, float | None]:
        """See _logits."""
        if head.logit_softcap is None:
            return head.logit_scale / self.temperature, None
        return head.logit_scale / head.logit_softcap, head.logit_softcap / self.temperature


def _block(num_columns: int) -> int:
    return min(BLOCK, 1 << (num_columns - 1).bit_length())


def _strided(tensor: Tensor) -> tuple[Tensor, int]:
    """A matrix whose rows are contiguous, and how far apart they lie."""
    return tensor, tensor.stride(0)
