"""From a window's logits to its statistics and to the gradient, in place, a few rows at a time.

A block is a few rows, small enough that all of its buffers stay in the caches: that is what makes two dozen elementwise
operations cost a few percent of the products. The same steps serve both modes:

    statistics   one pass: running maxima and sums (then merged over tiles and ranks)
    second       mixtures only: the value and the mean slope need the normalised log ratio
    gradient     the student's logits become dL/dlogits, written over the kept logits
    fused        all three on one load, where a window holds the whole vocabulary

Legend: R rows of a window, B rows of a block, C columns of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from planner.loss_costs import MAX_DOT_ROWS
from student.loss.divergences import Divergence, Scaled, Terms
from student.loss.head import Head
from student.loss.products import Arena
from student.loss.statistics import Field, RowStatistics, logit_floor


@dataclass(frozen=True, kw_only=True)
class Window:
    """Some rows' logits of some columns, and what else their epilogue reads.

    *_planes [R, C]: see products.plane_dtypes. grad [R, C]: where the gradient goes; it may share memory with the
    student's planes. stats, seconds [2, R] (value, mean slope), scales [R]: over the whole vocabulary. label [R, 1]:
    the label's column within the tile, clipped into it; label_hit [R, 1]: 1 where it lies in the tile.
    """

    student_planes: Sequence[Tensor]
    teacher_planes: Sequence[Tensor]
    grad: Tensor
    stats: RowStatistics
    seconds: Tensor
    kd_scale: Tensor
    ce_scale: Tensor
    label: Tensor | None
    label_hit: Tensor | None
    teacher_scale: Tensor | None
    student_bias: Tensor | None
    teacher_bias: Tensor | None
    grad_bias: Tensor | None


@dataclass
class Block:
    """Buffers [B, C]: the logits u of the student and v of the teacher (later their exponentials), v - u, and room."""

    rows: slice
    u: Tensor
    v: Tensor | None
    ratio: Tensor | None
    scratch: tuple[Tensor, ...]
    product: Tensor | None
    label_exp: Tensor | None
    cap_slope: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Epilogue:
    """The steps, with what is the same for every window of a call.

    in_place_*: that side's kept logits are in the working dtype and dead after the fused step: no copy is made of them.
    """

    entry: Divergence | None
    mix: float
    temperature: float
    dtype: torch.dtype
    has_labels: bool
    has_ce_grad: bool
    student_head: Head
    teacher_head: Head | None
    num_planes: int
    in_place_student: bool
    in_place_teacher: bool

    @property
    def has_label_sum(self) -> bool:
        """Whether cross entropy needs exponentials of its own."""
        return self.has_labels and self.temperature != 1.0

    @property
    def num_buffers(self) -> int:
        """Block-sized buffers that `blocks` takes, the one for the products of dots aside."""
        num_copies = int(not self.in_place_student) + int(self.entry is not None and not self.in_place_teacher)
        num_scratch = self.entry.num_scratch if self.entry else 0
        return (
            num_copies
            + int(self._has_ratio_buffer)
            + num_scratch
            + int(self.has_label_sum)
            + int(self.student_head.logit_softcap is not None)
        )

    @property
    def _has_ratio_buffer(self) -> bool:
        return self.entry is not None or self.num_planes > 1

    def blocks(self, window: Window, block_rows: int, room: Arena) -> Iterator[Block]:
        """The window's blocks with their logits loaded: tempered, capped, finite."""
        num_rows, num_columns = window.student_planes[0].shape
        block_rows = min(block_rows, num_rows)

        def take(wanted: bool) -> Tensor | None:
            return room.take((block_rows, num_columns), self.dtype) if wanted else None

        u_BC, v_BC = take(not self.in_place_student), take(self.entry is not None and not self.in_place_teacher)
        ratio_BC, label_exp_BC = take(self._has_ratio_buffer), take(self.has_label_sum)
        cap_slope_BC = take(self.student_head.logit_softcap is not None)
        scratch = [take(True) for _ in range(self.entry.num_scratch if self.entry else 0)]
        product_BC = take(self.entry is not None and block_rows > MAX_DOT_ROWS)
        for start in range(0, num_rows, block_rows):
            rows = slice(start, min(start + block_rows, num_rows))
            num = rows.stop - start

            def cut(buffer_BC: Tensor | None, num: int = num) -> Tensor | None:
                return None if buffer_BC is None else buffer_BC[:num]

            block = Block(
                rows=rows,
                u=window.student_planes[0][rows] if u_BC is None else u_BC[:num],
                v=(window.teacher_planes[0][rows] if v_BC is None else v_BC[:num]) if self.entry else None,
                ratio=cut(ratio_BC),
                scratch=tuple(buffer_BC[:num] for buffer_BC in scratch if buffer_BC is not None),
                product=cut(product_BC),
                label_exp=cut(label_exp_BC),
                cap_slope=cut(cap_slope_BC),
            )
            self._load(window, block)
            yield block

    def _load(self, window: Window, block: Block) -> None:
        self._load_side(
            self.student_head,
            window.student_planes,
            block,
            block.u,
            in_place=self.in_place_student,
            bias_C=window.student_bias,
            cap_slope_BC=block.cap_slope,
        )
        if block.v is not None and self.teacher_head is not None:
            self._load_side(
                self.teacher_head,
                window.teacher_planes,
                block,
                block.v,
                in_place=self.in_place_teacher,
                bias_C=window.teacher_bias,
                row_scale_R=window.teacher_scale,
            )

    def _load_side(
        self,
        head: Head,
        planes_RC: Sequence[Tensor],
        block: Block,
        out_BC: Tensor,
        *,
        in_place: bool,
        bias_C: Tensor | None,
        row_scale_R: Tensor | None = None,
        cap_slope_BC: Tensor | None = None,
    ) -> None:
        if not in_place:
            out_BC.copy_(planes_RC[0][block.rows])
        for low_RC in planes_RC[1:]:
            # Two steps: adding another dtype in place would make a temporary of its own.
            assert block.ratio is not None
            out_BC.add_(block.ratio.copy_(low_RC[block.rows]))
        if row_scale_R is not None:
            out_BC.mul_(row_scale_R[block.rows].unsqueeze(1))
        if bias_C is not None:
            out_BC.add_(bias_C)
        if head.logit_softcap is None:
            if head.logit_scale != self.temperature:
                out_BC.mul_(head.logit_scale / self.temperature)
        else:
            out_BC.mul_(head.logit_scale / head.logit_softcap).tanh_()
            if cap_slope_BC is not None:
                torch.mul(out_BC, out_BC, out=cap_slope_BC).neg_().add_(1.0)
            out_BC.mul_(head.logit_softcap / self.temperature)
        out_BC.clamp_(min=logit_floor(self.dtype))

    def statistics(self, window: Window, block_rows: int, room: Arena) -> None:
        """Join the window's columns to its rows' statistics."""
        for block in self.blocks(window, block_rows, room):
            self._reduce(window, block)

    def second(self, window: Window, block_rows: int, room: Arena) -> None:
        """Add the window's columns to its rows' value and mean slope; the statistics are whole."""
        for block in self.blocks(window, block_rows, room):
            self._normalise(window, block)
            self._add_seconds(window, block, self._terms(window, block))

    def gradient(self, window: Window, block_rows: int, room: Arena) -> None:
        """Write dL/dlogits of the window; statistics and second sums are whole."""
        for block in self.blocks(window, block_rows, room):
            self._normalise(window, block)
            self._write_gradient(window, block, self._terms(window, block))

    def fused(self, window: Window, block_rows: int, room: Arena, *, with_gradient: bool) -> None:
        """Everything on one load: the window holds the whole vocabulary, its rows were not seen before."""
        for block in self.blocks(window, block_rows, room):
            # The block's maxima are the rows' maxima, so the exponentials need no second look at the logits.
            self._reduce(window, block)
            terms = self._terms(window, block)
            if self.entry is not None and self.entry.num_passes == 2:
                self._add_seconds(window, block, terms)
            if with_gradient:
                self._write_gradient(window, block, terms)

    def _reduce(self, window: Window, block: Block) -> None:
        stats = window.stats.rows(block.rows.start, block.rows.stop)
        if window.label is not None and window.label_hit is not None:
            hit_B = window.label_hit[block.rows].squeeze(1)
            label_logit_B = block.u.gather(1, window.label[block.rows]).squeeze(1)
            stats[Field.LABEL_LOGIT].add_(label_logit_B.mul_(hit_B))
            stats[Field.LABEL_HITS].add_(hit_B)
        stats.raise_maxima(block.u.amax(-1), None if block.v is None else block.v.amax(-1))
        self._exponentials(stats, block)
        stats[Field.STUDENT_SUM].add_(block.u.sum(-1))
        if block.label_exp is not None:
            stats[Field.LABEL_SUM].add_(block.label_exp.sum(-1))
        if block.v is not None and block.ratio is not None and self.entry is not None:
            stats[Field.TEACHER_SUM].add_(block.v.sum(-1))
            if self.entry.mean_log_ratio is not None:
                side_BC = block.v if self.entry.mean_log_ratio == "teacher" else block.u
                stats[Field.RATIO_SUM].add_(_row_dots(side_BC, block.ratio, block.product))

    def _normalise(self, window: Window, block: Block) -> None:
        self._exponentials(window.stats.rows(block.rows.start, block.rows.stop), block)

    def _exponentials(self, stats: RowStatistics, block: Block) -> None:
        """Logits become v - u and exponentials relative to the rows' maxima."""
        if block.v is not None and block.ratio is not None:
            torch.sub(block.v, block.u, out=block.ratio)
            block.v.sub_(stats[Field.TEACHER_MAX].unsqueeze(1)).exp_()
        block.u.sub_(stats[Field.STUDENT_MAX].unsqueeze(1))
        if block.label_exp is not None:
            torch.mul(block.u, self.temperature, out=block.label_exp).exp_()
        block.u.exp_()

    def _terms(self, window: Window, block: Block) -> Terms | None:
        if self.entry is None or block.ratio is None:
            return None
        if self.entry.num_passes == 2:
            stats = window.stats.rows(block.rows.start, block.rows.stop)
            block.ratio.add_(stats.lse_gap().unsqueeze(1))
            # Beyond the limit one side's mass is 0 beside the other's, and the exponential stays finite.
            limit = 700.0 if self.dtype == torch.float64 else 80.0
            block.ratio.clamp_(-limit, limit)
        return self.entry.terms(block.ratio, block.scratch, self.mix)

    def _add_seconds(self, window: Window, block: Block, terms: Terms | None) -> None:
        if terms is None or block.v is None:
            return
        stats = window.stats.rows(block.rows.start, block.rows.stop)
        value_B, slope_B = window.seconds[:, block.rows]
        student_sum_B, teacher_sum_B = stats[Field.STUDENT_SUM], stats[Field.TEACHER_SUM]
        if terms.student is not None:
            mean_B = _scaled_dots(block.u, terms.student, block.product).div_(student_sum_B)
            value_B.add_(mean_B)
        if terms.teacher is not None:
            value_B.add_(_scaled_dots(block.v, terms.teacher, block.product).div_(teacher_sum_B))
        if terms.slope is not None:
            if terms.slope is not terms.student:
                mean_B = _scaled_dots(block.u, terms.slope, block.product).div_(student_sum_B)
            slope_B.add_(mean_B)

    def mean_slope(self, stats: RowStatistics, seconds_2R: Tensor) -> Tensor | float:
        """sum p_s a of each row."""
        if self.entry is None:
            return 0.0
        if self.entry.num_passes == 2:
            return seconds_2R[1] + self.entry.teacher_slope
        # KL's own directions: a is the log ratio (or p_t / p_s) up to its sign.
        return self.entry.teacher_slope if self.entry.mean_log_ratio == "teacher" else -stats.mean_log_ratio()

    def _write_gradient(self, window: Window, block: Block, terms: Terms | None) -> None:
        rows, grad_BC = block.rows, block.u
        stats = window.stats.rows(rows.start, rows.stop)
        kd_scale_B, ce_scale_B = window.kd_scale[rows], window.ce_scale[rows]
        student_sum_B = stats[Field.STUDENT_SUM]
        # dL/dz = p_s (kd (a - mean a) + ce) - ce [label] + kd p_t teacher_slope, by rows' scalars and one pass each.
        constant_B = -kd_scale_B * self.mean_slope(stats, window.seconds[:, rows])
        if block.label_exp is None:
            constant_B = constant_B + ce_scale_B
        constant_B1 = (constant_B / student_sum_B).unsqueeze(1)
        if terms is not None and terms.slope is not None:
            factor_B1 = (kd_scale_B / student_sum_B).mul_(terms.slope.factor).unsqueeze(1)
            grad_BC.mul_(terms.slope.tensor.mul_(factor_B1).add_(constant_B1))
        else:
            grad_BC.mul_(constant_B1)
        if self.entry is not None and self.entry.teacher_slope and block.v is not None:
            factor_B = (kd_scale_B / stats[Field.TEACHER_SUM]).mul_(self.entry.teacher_slope)
            grad_BC.add_(block.v.mul_(factor_B.unsqueeze(1)))
        if self.has_ce_grad and window.label is not None and window.label_hit is not None:
            if block.label_exp is not None:
                grad_BC.add_(block.label_exp.mul_((ce_scale_B / stats[Field.LABEL_SUM]).unsqueeze(1)))
            label_B1 = window.label[rows]
            at_label_B1 = grad_BC.gather(1, label_B1).sub_(ce_scale_B.unsqueeze(1) * window.label_hit[rows])
            grad_BC.scatter_(1, label_B1, at_label_B1)
        if block.cap_slope is not None:
            grad_BC.mul_(block.cap_slope)
        if window.grad_bias is not None:
            window.grad_bias.add_(grad_BC.sum(0))
        if not self.in_place_student:
            window.grad[rows].copy_(grad_BC)


def _scaled_dots(weights_BC: Tensor, values: Scaled, product_BC: Tensor | None) -> Tensor:
    return _row_dots(weights_BC, values.tensor, product_BC).mul_(values.factor)


def _row_dots(left_BC: Tensor, right_BC: Tensor, product_BC: Tensor | None) -> Tensor:
    """The dot product of each row with its other."""
    if product_BC is not None:
        return torch.mul(left_BC, right_BC, out=product_BC).sum(-1)
    # A dot reads both operands once and needs no buffer; only worth a call a row where rows are few.
    return torch.stack([torch.dot(left_C, right_C) for left_C, right_C in zip(left_BC, right_BC, strict=True)])
