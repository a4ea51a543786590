"""KDLoss: the distillation loss of a student head against a teacher head, over the whole vocabulary, without its logits."""

from __future__ import annotations

from functools import cached_property

import torch

from planner.loss_costs import LossPlan
from student.loss.call import DistillationLoss, LossCall
from student.loss.epilogue import Epilogue
from student.loss.fused import FusedLoss
from student.loss.options import KDOutput
from student.loss.plan import Planner


class KDLoss(DistillationLoss):
    """Knowledge distillation plus cross entropy, equal to the loss over full logits, with neither logits matrix in memory.

        loss = kd_weight * kd + ce_weight * ce
        kd   = T^2 * sum_i w_i D(p_t, p_s)_i / num_rows     at temperature T; T^2 (Hinton) only with scale_t2
        ce   = sum_i w_i CE(label_i)_i / num_rows            at temperature 1

    divergence: forward_kl = KL(teacher || student); reverse_kl = KL(student || teacher); jsd with
    m = teacher_weight * p_t + (1 - teacher_weight) * p_s and value teacher_weight KL(p_t || m) + (1 - teacher_weight)
    KL(p_s || m); skew_forward_kl = KL(p_t || a p_t + (1 - a) p_s) and skew_reverse_kl = KL(p_s || a p_s + (1 - a) p_t) with
    a = skew_alpha; tvd = sum |p_s - p_t| / 2.

    Called with
        student_hidden [N, Hs], its Head; teacher_hidden [N, Ht] or [R, Ht] (just the counted rows, in their order; with as
        many rows as are counted it is always read so), its Head; labels [N] int64, already shifted: labels[i] is the token
        that row i predicts, ignore_index where a row does not count.
        row_index [R] int64 (distinct) or all_rows=True name the counted rows, so that no device is waited for; without
        either they are read from the labels, with one wait. A row named so whose label is ignore_index counts for kd alone.
        row_weights [N]: factor w of each row; it does not change the divisor. teacher_row_scale [N or R]: factor of each
        teacher row's product with the head, for states that travelled in 8 bits.
        num_rows: the divisor: counted rows over all microbatches and ranks of the step; None = this call's own count.

    Returns KDOutput. Rows that don't count never enter a product. No counted row: loss 0, zero gradients, a warning once,
    num_empty_calls grows.

    The products run in the states' dtype; a weight of another dtype is cast tile by tile. Safe under autocast (which it
    turns off inside) and activation checkpointing; not twice differentiable, one backward per call.

    Lifetime: the gradients are made in forward: teacher_hidden may be overwritten once the call returns; do not rely on it
    before backward if you may set workspace_bytes (see docs/loss.md).

    Raises ValueError or TypeError: inputs that don't fit each other; nothing was computed.
    """

    @cached_property
    def _planner(self) -> Planner:
        return Planner()

    def _plan(self, call: LossCall) -> tuple[LossPlan, Epilogue]:
        return self._planner.plan(call)

    def _compute(self, call: LossCall) -> KDOutput:
        plan, epilogue = self._plan(call)
        loss, kd, ce = FusedLoss.apply(  # type: ignore[no-untyped-call]
            call.student_hidden,
            call.student_head.weight,
            call.student_head.bias,
            call,
            plan,
            epilogue,
            torch.is_grad_enabled(),
        )
        return KDOutput(loss=loss, kd=kd, ce=ce, rows=call.rows.count)
