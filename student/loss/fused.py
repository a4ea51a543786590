"""The fused loss's place in autograd: which gradients are made when, scaled by what, and into which memory."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from planner.loss_costs import LossPlan
from student.loss.call import LossCall
from student.loss.epilogue import Epilogue
from student.loss.exchange import GroupRun
from student.loss.run import Gradients, LossRun

# fp16 can't hold gradients of logits below 6e-8: they are multiplied before the cast, and the results divided. The row
# that weighs most comes to between this and twice as much, for fp16 can't hold anything above 65504 either.
FP16_BOOST = 1024.0
# What the exponent of that row's weight is cut to, so that the factor is a float32.
FP16_EXPONENTS = (-60, 100)


class FusedLoss(torch.autograd.Function):
    """keep makes the gradients in forward, and backward multiplies them in place by what arrives; recompute makes them
    in backward, scaled from the start."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        call: LossCall,
        plan: LossPlan,
        epilogue: Epilogue,
        needs_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs = tuple(needs_grad and need for need in ctx.needs_input_grad[:3])
        call = _detached(call)
        run = _run(call, plan, replace(epilogue, student_head=call.student_head))
        grads = Gradients(None, None, None)
        with torch.autocast(device_type=hidden_NH.device.type, enabled=False):
            boost = _fp16_boost(call) if hidden_NH.dtype == torch.float16 and run.num_rows else None
            if run.num_rows:
                if plan.mode == "keep":
                    grads = _empty_gradients(call, epilogue.dtype, needs, main_grad=None)
                    run.keep(grads, 1.0 / call.divisor if boost is None else boost)
                else:
                    run.collect()
            kd, ce = run.sums()
        kd, ce = kd * call.options.kd_scale / call.divisor, ce / call.divisor
        ctx.mark_non_differentiable(kd, ce)
        if any(needs):
            ctx.save_for_backward(hidden_NH, weight_VH, bias_V)
            ctx.run, ctx.grads, ctx.needs, ctx.boost = run, grads, needs, boost
            ctx.teacher_version = _version(call.teacher_hidden)
        return call.options.kd_weight * kd + call.options.ce_weight * ce, kd, ce

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *unused: Any) -> tuple[Tensor | None, ...]:
        # Only under create_graph does autograd record here. What is made is no function of the inputs to it, so a
        # second derivative would lack this loss without a word.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "KDLoss: got a backward with create_graph=True; allowed: first derivatives. FullLogitsLoss is twice "
                "differentiable"
            )
        hidden_NH, weight_VH, bias_V = ctx.saved_tensors
        with torch.autocast(device_type=hidden_NH.device.type, enabled=False):
            grads = _backward(ctx.run, ctx.grads, ctx.needs, ctx.boost, ctx.teacher_version, grad_loss)
        # They are handed over and were scaled in place: a second backward makes its own.
        ctx.grads = None
        main_grad = ctx.run.call.student_head.main_grad
        weight_grad_VH = grads.weight
        if main_grad is not None and weight_grad_VH is not None:
            if weight_grad_VH is not main_grad:
                main_grad.add_(weight_grad_VH)
            weight_grad_VH = None
        given = (grads.hidden, weight_grad_VH, grads.bias)
        wanted = (hidden_NH, weight_VH, bias_V)
        returned = [None if g is None else g.to(w.dtype) for g, w in zip(given, wanted, strict=True)]
        return (*returned, None, None, None, None)


def _run(call: LossCall, plan: LossPlan, epilogue: Epilogue) -> LossRun | GroupRun:
    return (LossRun if call.group_rows is None else GroupRun)(call, plan, epilogue)


def _backward(
    run: LossRun | GroupRun,
    grads: Gradients | None,
    needs: tuple[bool, ...],
    boost: float | Tensor | None,
    teacher_version: int | None,
    grad_loss: Tensor,
) -> Gradients:
    call, dtype = run.call, run.epilogue.dtype
    if not run.num_rows:
        return _zero_gradients(call, dtype, needs)
    factor: Tensor | None = grad_loss
    if (run.plan.mode == "recompute" or grads is None) and _version(call.teacher_hidden) != teacher_version:
        raise RuntimeError(
            "teacher_hidden: overwritten between forward and backward; allowed: unchanged until backward is done"
        )
    if run.plan.mode == "recompute":
        # fp16 sums are scaled at their end, so they can't go straight into a sum that holds other calls' gradients.
        grads = _empty_gradients(call, dtype, needs, main_grad=call.student_head.main_grad if boost is None else None)
        run.differentiate(grads, grad_loss / call.divisor if boost is None else boost)
        factor = None
    elif grads is None:
        grads = _empty_gradients(call, dtype, needs, main_grad=None)
        _run(call, run.plan, run.epilogue).keep(grads, 1.0 / call.divisor if boost is None else boost)
    if boost is not None:
        factor = grad_loss / call.divisor / boost
    if factor is not None:
        for grad in (grads.hidden, grads.weight, grads.bias):
            if grad is not None:
                grad.mul_(factor)
    return grads


def _fp16_boost(call: LossCall) -> float | Tensor:
    """What the gradients of fp16 logits are multiplied by: a power of two, the same for all windows and ranks of the
    call, by the factor of the row that weighs most. No wait: a tensor where there are row weights."""
    options, head = call.options, call.student_head
    most = options.ce_weight if call.labels is not None else 0.0
    if call.teacher_head is not None:
        most += options.kd_weight * options.kd_scale / options.temperature
    most *= abs(head.logit_scale)
    if call.row_weights is None:
        low, high = FP16_EXPONENTS
        return math.ldexp(FP16_BOOST, 1 - min(max(math.frexp(most)[1], low), high))
    weights_R = call.rows.pick(call.row_weights, 0, call.rows.count).float().abs()
    largest = torch.cat([weights_R, weights_R.new_zeros(1)]).amax()
    if call.group_rows is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=call.vocab_group)
    exponent = torch.frexp(largest * most).exponent.clamp(*FP16_EXPONENTS)
    return torch.ldexp(torch.full_like(largest, FP16_BOOST), 1 - exponent)


def _detached(call: LossCall) -> LossCall:
    """The call without its ties to autograd: nothing inside makes a graph, nothing outlives it through one."""
    head, teacher_head = call.student_head, call.teacher_head
    return replace(
        call,
        student_hidden=call.student_hidden.detach(),
        student_head=head.detached(),
        teacher_hidden=None if call.teacher_hidden is None else call.teacher_hidden.detach(),
        teacher_head=None if teacher_head is None else teacher_head.detached(),
    )


def _version(tensor: Tensor | None) -> int | None:
    """How often torch wrote into the tensor; None where it does not count (writes from elsewhere are never seen)."""
    return None if tensor is None or tensor.is_inference() else tensor._version


def _empty_gradients(
    call: LossCall, dtype: torch.dtype, needs: tuple[bool, ...], main_grad: Tensor | None
) -> Gradients:
    hidden, head = call.student_hidden, call.student_head
    grads = Gradients(None, None, None)
    if needs[0]:
        # Rows that don't count are never written.
        grads.hidden = torch.zeros_like(hidden) if call.rows.index is not None else torch.empty_like(hidden)
    if needs[1]:
        if main_grad is not None:
            grads.weight, grads.has_weight = main_grad, True
        else:
            grads.weight = torch.empty(head.weight.shape, dtype=dtype, device=hidden.device)
            grads.weight[head.num_real_columns :].zero_()
    if needs[2] and head.bias is not None:
        grads.bias = torch.zeros(head.bias.shape, dtype=dtype, device=hidden.device)
    return grads


def _zero_gradients(call: LossCall, dtype: torch.dtype, needs: tuple[bool, ...]) -> Gradients:
    grads = _empty_gradients(call, dtype, needs, main_grad=None)
    for grad in (grads.hidden, grads.weight, grads.bias):
        if grad is not None:
            grad.zero_()
    return grads
