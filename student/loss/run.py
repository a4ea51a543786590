"""One call of the fused loss under way: windows and tiles, in either mode.

keep: for each window of rows both models' logits of the whole vocabulary (of this rank's shard) are made, turned into
the gradient in place, and multiplied into dX and dW. recompute: tiles of columns outside, windows of rows inside;
`collect` makes the statistics, `differentiate` makes the logits again for the gradient.

Legend: N rows given, R counted rows (of the call or of a window), V columns, C columns of a tile, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from planner.loss_costs import LossPlan, aligned
from student.loss.call import LABEL_OUTSIDE, LossCall, refuse_if
from student.loss.epilogue import Epilogue, Window
from student.loss.head import Head
from student.loss.plan import logit_planes
from student.loss.products import Arena, add_hidden_gradient, add_weight_gradient, product_dtype, write_logits
from student.loss.statistics import INFINITE_DIVERGENCE, Field, RowStatistics


@dataclass
class Gradients:
    """What is summed up, None where nobody asked: hidden [N, H] in the states' dtype, the rest in the working dtype."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    # Whether weight [V, H] holds a sum to add to; a fresh one is overwritten by its first product, not zeroed before.
    has_weight: bool = False

    @property
    def wanted(self) -> bool:
        return self.hidden is not None or self.weight is not None or self.bias is not None


class LossRun:
    """The state of one call: statistics of its counted rows and how to go over its logits. All tensors are detached."""

    def __init__(
        self,
        call: LossCall,
        plan: LossPlan,
        epilogue: Epilogue,
        *,
        arena: Arena | None = None,
        sums_hidden: bool = True,
    ) -> None:
        """arena: memory to work in, where the caller has some; None: its own. sums_hidden: dX is summed over the group;
        else each rank is left with its own columns' part of it."""
        self.call, self.plan, self.epilogue = call, plan, epilogue
        self._given_arena, self._sums_hidden = arena, sums_hidden
        hidden, count = call.student_hidden, call.rows.count
        self.num_columns = call.student_head.num_real_columns
        self.stats = RowStatistics.empty(
            count,
            entry=epilogue.entry,
            temperature=epilogue.temperature,
            label_sum=epilogue.has_label_sum,
            dtype=epilogue.dtype,
            device=hidden.device,
        )
        self.seconds_2R = torch.zeros(2, count, dtype=epilogue.dtype, device=hidden.device)
        self.weights_R = self.seconds_2R.new_ones(count)
        if call.row_weights is not None:
            self.weights_R = call.rows.pick(call.row_weights, 0, count).to(epilogue.dtype)
        self.labels_R, self.has_label_R = None, None
        if call.labels is not None:
            self.labels_R = call.rows.pick(call.labels, 0, count)
            self.has_label_R = self.labels_R != call.options.ignore_index

    @property
    def num_rows(self) -> int:
        """Rows that there is anything to compute for."""
        return self.call.rows.count

    def keep(self, grads: Gradients, scale: float | Tensor) -> None:
        """Statistics and, where wanted, gradients times `scale`, window by window."""
        arena, group, rows_a_block = self._arena(), self.call.vocab_group, self.plan.block_rows
        scales = self._scales(scale)
        for start, stop in self._windows():
            window, hidden_RH = None, self._student_states(arena, start, stop)
            if self.num_columns:
                window = self._window(arena, hidden_RH, (start, stop), (0, self.num_columns), scales, grads)
            room = self._scratch(arena)
            if group is None:
                assert window is not None
                self.epilogue.fused(window, rows_a_block, room, with_gradient=grads.wanted)
            else:
                if window is not None:
                    self.epilogue.statistics(window, rows_a_block, room)
                self.stats.rows(start, stop).merge(group)
                if self._has_second_pass:
                    if window is not None:
                        self.epilogue.second(window, rows_a_block, self._scratch(arena))
                    seconds_2R = self.seconds_2R[:, start:stop].contiguous()
                    dist.all_reduce(seconds_2R, group=group)
                    self.seconds_2R[:, start:stop] = seconds_2R
                if window is not None and grads.wanted:
                    self.epilogue.gradient(window, rows_a_block, self._scratch(arena))
            self._keep_products(arena, window, hidden_RH, start, grads)

    def _keep_products(
        self, arena: Arena, window: Window | None, hidden_RH: Tensor, start: int, grads: Gradients
    ) -> None:
        weight_VH, group, num_columns = self.call.student_head.weight, self.call.vocab_group, self.num_columns
        if grads.hidden is not None:
            stop = start + hidden_RH.shape[0]
            given_dtype = grads.hidden.dtype
            in_one_piece = weight_VH.dtype == hidden_RH.dtype == given_dtype and group is None
            staging = self._staging(arena)
            in_place = self.call.rows.index is None and (in_one_piece or given_dtype == self.epilogue.dtype)
            if in_place:
                total_RH = grads.hidden[start:stop]
            else:
                total_RH = staging.take(hidden_RH.shape, given_dtype if in_one_piece else self.epilogue.dtype)
            if window is None:
                total_RH.zero_()
            else:
                add_hidden_gradient(total_RH, window.grad, weight_VH, 0, num_columns, staging, fresh=True)
            self._store_hidden(grads.hidden, total_RH, start, in_place=in_place)
        if grads.weight is not None and window is not None:
            total_VH, staging = grads.weight[:num_columns], self._staging(arena)
            add_weight_gradient(total_VH, window.grad, hidden_RH, staging, fresh=not grads.has_weight)
            grads.has_weight = True

    def _store_hidden(self, hidden_NH: Tensor, total_RH: Tensor, start: int, *, in_place: bool) -> None:
        """Put the counted rows' dX, summed over the group, where it belongs."""
        if self.call.vocab_group is not None and self._sums_hidden:
            dist.all_reduce(total_RH, group=self.call.vocab_group)
        stop = start + total_RH.shape[0]
        if self.call.rows.index is not None:
            hidden_NH.index_copy_(0, self.call.rows.index[start:stop], total_RH.to(hidden_NH.dtype))
        elif not in_place:
            hidden_NH[start:stop] = total_RH

    def collect(self) -> None:
        """recompute's forward: statistics over all tiles, then the second sums of mixtures."""
        arena, group = self._arena(), self.call.vocab_group
        for window, _, _, _ in self._tiles(arena, self._scales(0.0), None):
            self.epilogue.statistics(window, self.plan.block_rows, self._scratch(arena))
        if group is not None:
            self.stats.merge(group)
        if self._has_second_pass:
            for window, _, _, _ in self._tiles(arena, self._scales(0.0), None):
                self.epilogue.second(window, self.plan.block_rows, self._scratch(arena))
            if group is not None:
                dist.all_reduce(self.seconds_2R, group=group)

    def differentiate(self, grads: Gradients, scale: float | Tensor) -> None:
        """recompute's backward: gradients times `scale`, from the statistics that `collect` left."""
        arena, weight_VH, hidden_NH = self._arena(), self.call.student_head.weight, grads.hidden
        total_RH, in_place = None, False
        if hidden_NH is not None:
            in_place = self.call.rows.index is None and hidden_NH.dtype == self.epilogue.dtype
            shape = (self.call.rows.count, hidden_NH.shape[1])
            total_RH = hidden_NH if in_place else hidden_NH.new_empty(shape, dtype=self.epilogue.dtype)
            if not self.num_columns:
                total_RH.zero_()
        for window, hidden_RH, start, first in self._tiles(arena, self._scales(scale), grads):
            self.epilogue.gradient(window, self.plan.block_rows, self._scratch(arena))
            stop, last = start + hidden_RH.shape[0], first + window.grad.shape[1]
            if total_RH is not None:
                part_RH, staging = total_RH[start:stop], self._staging(arena)
                add_hidden_gradient(part_RH, window.grad, weight_VH, first, last, staging, fresh=first == 0)
            if grads.weight is not None:
                part_CH, staging = grads.weight[first:last], self._staging(arena)
                fresh = start == 0 and not grads.has_weight
                add_weight_gradient(part_CH, window.grad, hidden_RH, staging, fresh=fresh)
        if hidden_NH is not None and total_RH is not None:
            self._store_hidden(hidden_NH, total_RH, 0, in_place=in_place)

    def sums(self) -> tuple[Tensor, Tensor]:
        """Weighted sums over the rows of the divergence (without T^2) and of CE.

        Raises ValueError (on CUDA: a device assertion with the same text): a label outside of the vocabulary, or an
        infinite divergence, where one model gives a column probability and the other's logit is -inf.
        """
        kd = ce = self.weights_R.new_zeros(())
        if self.epilogue.entry is not None:
            kd_R = self._divergences()
            refuse_if(
                kd_R > INFINITE_DIVERGENCE,
                "divergence: infinite, since a column has probability under one model and a logit of -inf under the "
                "other; allowed: -inf on both sides, or jsd, skew_* or tvd, which stay finite",
            )
            kd = (self.weights_R * kd_R.clamp_(min=0)).sum()
        if self.has_label_R is not None:
            refuse_if(
                self.has_label_R & (self.stats[Field.LABEL_HITS] == 0),
                LABEL_OUTSIDE,
            )
            ce_R = self.stats.cross_entropy()
            ce = torch.where(self.has_label_R, self.weights_R * ce_R, 0.0).sum()
        return kd, ce

    def _divergences(self) -> Tensor:
        entry, stats = self.epilogue.entry, self.stats
        assert entry is not None
        if entry.num_passes == 2:
            return self.seconds_2R[0]
        value_R = stats.mean_log_ratio() + stats.lse_gap()
        return value_R if entry.mean_log_ratio == "teacher" else value_R.neg_()

    @property
    def _has_second_pass(self) -> bool:
        return self.epilogue.entry is not None and self.epilogue.entry.num_passes == 2

    def _arena(self) -> Arena:
        if self._given_arena is not None:
            return self._given_arena
        return Arena(self.plan.workspace_bytes, self.call.student_hidden.device)

    def _scratch(self, arena: Arena) -> Arena:
        """The room of block buffers and cast weights."""
        plan = self.plan
        return arena.since(plan.state_cast_bytes + plan.student_plane_bytes + plan.teacher_plane_bytes)

    def _staging(self, arena: Arena) -> Arena:
        """The room of staged products: once the gradient is written, the teacher's logits and the blocks are dead."""
        return arena.since(self.plan.state_cast_bytes + self.plan.student_plane_bytes)

    def _student_states(self, arena: Arena, start: int, stop: int) -> Tensor:
        """Rows start..stop of the student's states in the dtype of the products."""
        call = self.call
        return self._cast(call.rows.pick(call.student_hidden, start, stop), call.student_head, arena.since(0))

    def _cast(self, hidden_RH: Tensor, head: Head, room: Arena) -> Tensor:
        dtype = product_dtype(hidden_RH, head.weight)
        return hidden_RH if hidden_RH.dtype == dtype else room.take(hidden_RH.shape, dtype).copy_(hidden_RH)

    def _windows(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self.call.rows.count, self.plan.window_rows):
            yield start, min(start + self.plan.window_rows, self.call.rows.count)

    def _tiles(
        self, arena: Arena, scales: tuple[Tensor, Tensor], grads: Gradients | None
    ) -> Iterator[tuple[Window, Tensor, int, int]]:
        """Every tile with its logits made: window, states, first row, first column. Columns outside, rows inside."""
        for first in range(0, self.num_columns, self.plan.tile_columns):
            last = min(first + self.plan.tile_columns, self.num_columns)
            for start, stop in self._windows():
                hidden_RH = self._student_states(arena, start, stop)
                yield (
                    self._window(arena, hidden_RH, (start, stop), (first, last), scales, grads),
                    hidden_RH,
                    start,
                    first,
                )

    def _scales(self, scale: float | Tensor) -> tuple[Tensor, Tensor]:
        """What each row's KD and CE gradient in the (uncapped) product with the head is multiplied by."""
        options, head = self.call.options, self.call.student_head
        row_R = self.weights_R * scale
        kd_R = row_R * (options.kd_weight * options.kd_scale / self.epilogue.temperature * head.logit_scale)
        ce_R = row_R * (options.ce_weight * head.logit_scale)
        if self.has_label_R is None:
            return kd_R, torch.zeros_like(ce_R)
        return kd_R, ce_R.masked_fill_(~self.has_label_R, 0.0)

    def _window(
        self,
        arena: Arena,
        hidden_RH: Tensor,
        rows: tuple[int, int],
        columns: tuple[int, int],
        scales: tuple[Tensor, Tensor],
        grads: Gradients | None,
    ) -> Window:
        """A window with its logits made."""
        call, dtype, (start, stop), (first, last) = self.call, self.epilogue.dtype, rows, columns
        shape = (stop - start, last - first)
        room, student_head = arena.since(self.plan.state_cast_bytes), call.student_head
        planes_RC = [room.take(shape, plane) for plane in logit_planes(call, call.student_hidden, student_head)]
        write_logits(hidden_RH, student_head.weight, first, last, planes_RC, self._scratch(arena))
        grad_RC = planes_RC[0]
        if grad_RC.dtype != hidden_RH.dtype:
            # A 16-bit row of the gradient takes the first half of its own float32 row of logits, so that rows may be
            # finished in any order.
            grad_RC = grad_RC.view(hidden_RH.dtype)[:, : shape[1]]
        teacher_planes_RC: list[Tensor] = []
        teacher_scale_R, teacher_bias_C = None, None
        if call.teacher_hidden is not None and call.teacher_head is not None:
            teacher_RH = call.rows.pick_teacher(call.teacher_hidden, start, stop)
            # Behind the room of the student's cast states.
            width = call.student_hidden.shape[1]
            student_bytes = (
                aligned((stop - start) * width * hidden_RH.dtype.itemsize) if self.plan.state_cast_bytes else 0
            )
            teacher_RH = self._cast(teacher_RH, call.teacher_head, arena.since(student_bytes))
            room = arena.since(self.plan.state_cast_bytes + self.plan.student_plane_bytes)
            planes = logit_planes(call, call.teacher_hidden, call.teacher_head)
            teacher_planes_RC = [room.take(shape, plane) for plane in planes]
            write_logits(teacher_RH, call.teacher_head.weight, first, last, teacher_planes_RC, self._scratch(arena))
            if call.teacher_row_scale is not None:
                teacher_scale_R = call.rows.pick_teacher(call.teacher_row_scale, start, stop).to(dtype)
            teacher_bias_C = _bias(call.teacher_head, first, last, dtype)
        label_R1 = label_hit_R1 = None
        if self.labels_R is not None:
            label_R1 = (self.labels_R[start:stop] - (student_head.vocab_start + first)).unsqueeze(1)
            label_hit_R1 = ((label_R1 >= 0) & (label_R1 < last - first)).to(dtype)
            label_R1 = label_R1.clamp_(0, last - first - 1)
        grad_bias_C = None
        if grads is not None and grads.bias is not None:
            grad_bias_C = grads.bias[first:last]
        return Window(
            student_planes=planes_RC,
            teacher_planes=teacher_planes_RC,
            grad=grad_RC,
            stats=self.stats.rows(start, stop),
            seconds=self.seconds_2R[:, start:stop],
            kd_scale=scales[0][start:stop],
            ce_scale=scales[1][start:stop],
            label=label_R1,
            label_hit=label_hit_R1,
            teacher_scale=teacher_scale_R,
            student_bias=_bias(student_head, first, last, dtype),
            teacher_bias=teacher_bias_C,
            grad_bias=grad_bias_C,
        )


def _bias(head: Head, first: int, last: int, dtype: torch.dtype) -> Tensor | None:
    return None if head.bias is None else head.bias[first:last].to(dtype)
