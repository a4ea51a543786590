"""KDLoss: distillation of a student's head from a teacher's over the whole vocabulary, without the logits in memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch

from planner.loss_costs import LossPlan
from student.loss.call import DistillationLoss, LossCall
from student.loss.epilogue import Epilogue
from student.loss.fused import FusedLoss
from student.loss.options import KDOutput
from student.loss.plan import Planner
from student.loss.rows import Rows


class KDLoss(DistillationLoss):
    """Distillation plus cross entropy, equal to the loss over full logits, with neither logits matrix in memory.

        loss = kd_weight * kd + ce_weight * ce
        kd   = T^2 * sum_i w_i D_i(p_t, p_s) / num_rows    at temperature T; the T^2 (Hinton's) only with scale_t2
        ce   = sum_i w_i CE_i(label_i) / num_rows          at temperature 1

    divergence, with b = teacher_weight and a = skew_alpha:
        forward_kl       KL(p_t || p_s)
        reverse_kl       KL(p_s || p_t)
        jsd              b KL(p_t || m) + (1 - b) KL(p_s || m),  m = b p_t + (1 - b) p_s
        skew_forward_kl  KL(p_t || a p_t + (1 - a) p_s)
        skew_reverse_kl  KL(p_s || a p_s + (1 - a) p_t)
        tvd              sum |p_s - p_t| / 2

    precision: "fp32" makes float32-grade logits from 16-bit states (on a CPU with matrix units for 16 bits at the cost
    of a second product); "fast" rounds them to the states' dtype, which loses a third of the gradient where the models
    are nearly equal. A CPU without matrix units gains nothing from that and makes float32 logits either way.
    workspace_bytes: what a call may allocate beside statistics and gradients. Logits of a full-rate window of rows are
    kept where that fits (None: where it takes at most 5 % of the free memory), else they are recomputed tile by tile.

    Called with
        student_hidden [N, Hs] and its Head; gradients reach the states, the weight and the bias.
        teacher_hidden [N, Ht], or [R, Ht]: just the counted rows, in their order (with as many rows as count it is
            always read so), and its Head. With kd_weight 0 both may be None.
        labels [N] int64, shifted: labels[i] is the token that row i predicts, ignore_index where the row does not
            count. With ce_weight 0 and named rows it may be None.
        row_index [R] int64, distinct, or all_rows=True: name the counted rows, so that no device is waited for.
            Without either they are read from the labels, with one wait. A row named here whose label is ignore_index
            counts for kd alone.
        row_weights [N]: the factors w, constants to autograd; they don't change the divisor.
        teacher_row_scale [N] or [R], as teacher_hidden: factor of a teacher row, for states that travelled in 8 bits.
        num_rows: the divisor, a number or a tensor of one: counted rows over all microbatches and ranks of the step, or
            the sum of their weights. 0 divides by 1. None = this call's own count.
        vocab_group: a process group over which the columns of both heads are sharded alike; all other inputs are the
            same on its ranks. Every rank gets the whole loss, the whole dX, and the gradient of its own columns.
        group_rows: counted rows of each rank of the vocab_group, in its order: each rank passes rows of its own, and
            the group's are handled together. Every rank gets the loss of the group's rows, the dX of its own rows, and
            the gradient of its own columns.

    Returns KDOutput. Rows that don't count never enter a product. No counted row: loss 0, zero gradients, a warning
    the first time; num_empty_calls counts.

    Products run in the states' dtype; a weight of another dtype is cast tile by tile. Safe under autocast (which is off
    inside) and activation checkpointing. Not twice differentiable: RuntimeError in a backward with create_graph=True.

    Lifetime: teacher_hidden must stay as it is until backward is done. (The mode that keeps logits reads it in forward
    only; the one that recomputes them reads it again, and raises if torch has written into it since.)

    Raises ValueError or TypeError: inputs that don't fit each other or lie on different devices; nothing was computed.
    ValueError (on CUDA a device assertion): a label outside of the vocabulary; an infinite KL; a divisor in a tensor
    that is below 0 or not finite.
    """

    @cached_property
    def _planner(self) -> Planner:
        return Planner()

    def _plan(self, call: LossCall) -> tuple[LossPlan, Epilogue]:
        return self._planner.plan(call)

    def _compute(self, call: LossCall) -> KDOutput:
        plan, epilogue = self._plan(_as_planned(call))
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


def _as_planned(call: LossCall) -> LossCall:
    """What the plan is for: where rows are spread over a group, its windows hold all ranks' rows."""
    if call.group_rows is None:
        return call
    return replace(call, rows=Rows(index=None, count=sum(call.group_rows), teacher_compact=True))
