"""The fused loss: values and gradients window by window, without either logits matrix.

Legend: N rows given, R rows of a window, C columns of a tile, V columns that count, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from student.loss.call import LossCall
from student.loss.divergences import DIVERGENCES, Scaled, Terms
from student.loss.head import Head

WINDOW_ROWS = 128
COLUMN_TILE = 4096


@dataclass
class _Sums:
    kd: Tensor
    ce: Tensor


class FusedLoss(torch.autograd.Function):
    """Gradients are computed in forward, unscaled; backward multiplies them in place by grad_output / divisor."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: LossCall, needs_grad: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs = [needs_grad and need for need in ctx.needs_input_grad[:3]]
        with torch.autocast(device_type=hidden.device.type, enabled=False):
            kd, ce, grads = _run(call, needs)
        divisor = call.divisor
        kd = kd * call.options.kd_scale / divisor
        ce = ce / divisor
        ctx.grads = grads
        ctx.divisor = divisor
        ctx.dtypes = [hidden.dtype, weight.dtype, None if bias is None else bias.dtype]
        ctx.mark_non_differentiable(kd, ce)
        return call.options.kd_weight * kd + call.options.ce_weight * ce, kd, ce

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        scale = grad_loss / ctx.divisor
        grads = [None if g is None else g.mul_(scale).to(dtype) for g, dtype in zip(ctx.grads, ctx.dtypes, strict=True)]
        ctx.grads = None
        return (*grads, None, None)


def _product(hidden_RH: Tensor, weight_CH: Tensor, dtype: torch.dtype, precision: str) -> Tensor:
    if hidden_RH.dtype.itemsize == 1:
        hidden_RH = hidden_RH.to(weight_CH.dtype)
    weight_HC = weight_CH.to(hidden_RH.dtype).T
    high_RC = torch.mm(hidden_RH, weight_HC)
    out_RC = high_RC.to(dtype)
    if hidden_RH.dtype.itemsize == 2 and precision == "fp32":
        out_RC += torch.addmm(high_RC, hidden_RH, weight_HC, beta=-1)
    return out_RC


def _logits(hidden_RH: Tensor, head: Head, dtype: torch.dtype, precision: str, row_scale_R: Tensor | None) -> Tensor:
    num = head.num_real_columns
    out_RV = torch.empty(hidden_RH.shape[0], num, dtype=dtype, device=hidden_RH.device)
    for start in range(0, num, COLUMN_TILE):
        stop = min(start + COLUMN_TILE, num)
        out_RV[:, start:stop] = _product(hidden_RH, head.weight[start:stop].detach(), dtype, precision)
    if row_scale_R is not None:
        out_RV *= row_scale_R[:, None].to(dtype)
    if head.bias is not None:
        out_RV += head.bias[:num].detach().to(dtype)
    out_RV *= head.logit_scale
    if head.logit_softcap is not None:
        out_RV.div_(head.logit_softcap).tanh_().mul_(head.logit_softcap)
    return out_RV


def _dot(a: Tensor, b: Scaled | None) -> Tensor | float:
    return 0.0 if b is None else (a * b.tensor_BC).sum(-1) * b.factor


def _run(call: LossCall, needs: list[bool]) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    hidden, head, rows, options = call.student_hidden.detach(), call.student_head, call.rows, call.options
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    num, temperature = head.num_real_columns, options.temperature
    kd, ce = hidden.new_zeros((), dtype=dtype), hidden.new_zeros((), dtype=dtype)
    d_hidden = torch.zeros_like(hidden) if needs[0] else None
    d_weight = torch.zeros_like(head.weight, dtype=dtype) if needs[1] else None
    d_bias = torch.zeros_like(head.bias, dtype=dtype) if needs[2] and head.bias is not None else None
    floor = torch.finfo(dtype).min / 2
    for start in range(0, rows.count, WINDOW_ROWS):
        stop = min(start + WINDOW_ROWS, rows.count)
        x_RH = rows.pick(hidden, start, stop)
        z_RV = _logits(x_RH, head, dtype, options.precision, None).clamp_(min=floor)
        w_R = z_RV.new_ones(stop - start)
        if call.row_weights is not None:
            w_R = rows.pick(call.row_weights, start, stop).to(dtype)
        grad_RV = torch.zeros_like(z_RV)
        if call.teacher_hidden is not None and call.teacher_head is not None:
            scale_R = None
            if call.teacher_row_scale is not None:
                scale_R = rows.pick_teacher(call.teacher_row_scale, start, stop)
            y_RH = rows.pick_teacher(call.teacher_hidden.detach(), start, stop)
            v_RV = _logits(y_RH, call.teacher_head, dtype, options.precision, scale_R).clamp_(min=floor)
            kd_R = _kd_window(z_RV / temperature, v_RV / temperature, grad_RV, call)
            kd += (w_R * kd_R).sum()
            grad_RV *= options.kd_weight * options.kd_scale / temperature
        if call.labels is not None:
            labels_R = rows.pick(call.labels, start, stop)
            valid_R = labels_R != options.ignore_index
            lse_R1 = z_RV.logsumexp(-1, keepdim=True)
            safe_R1 = labels_R.where(valid_R, 0)[:, None]
            ce += ((lse_R1 - z_RV.gather(1, safe_R1)).squeeze(1) * valid_R * w_R).sum()
            p_RV = (z_RV - lse_R1).exp_()
            p_RV.scatter_add_(1, safe_R1, torch.full_like(lse_R1, -1.0))
            grad_RV += p_RV.mul_(valid_R[:, None] * options.ce_weight)
        grad_RV *= w_R[:, None] * head.logit_scale
        if head.logit_softcap is not None:
            grad_RV *= 1 - (z_RV / head.logit_softcap) ** 2
        if d_bias is not None:
            d_bias[:num] += grad_RV.sum(0) / head.logit_scale * head.logit_scale
        _accumulate(grad_RV.to(hidden.dtype), x_RH, call, start, stop, d_hidden, d_weight)
    return kd, ce, [d_hidden, d_weight, d_bias]


def _kd_window(u_RV: Tensor, v_RV: Tensor, grad_RV: Tensor, call: LossCall) -> Tensor:
    """The divergence of each row; grad_RV becomes its gradient in the tempered logits."""
    entry = DIVERGENCES[call.options.divergence]
    u_max_R1, v_max_R1 = u_RV.amax(-1, keepdim=True), v_RV.amax(-1, keepdim=True)
    p_RV, q_RV = (u_RV - u_max_R1).exp_(), (v_RV - v_max_R1).exp_()
    p_sum_R1, q_sum_R1 = p_RV.sum(-1, keepdim=True), q_RV.sum(-1, keepdim=True)
    p_RV /= p_sum_R1
    q_RV /= q_sum_R1
    ratio_RV = v_RV - u_RV + (u_max_R1 - v_max_R1) + (p_sum_R1 / q_sum_R1).log()
    if entry.mean_log_ratio is None:
        limit = 700.0 if ratio_RV.dtype == torch.float64 else 80.0
        ratio_RV.clamp_(-limit, limit)
    scratch = tuple(torch.empty_like(ratio_RV) for _ in range(entry.num_scratch))
    terms: Terms = entry.terms(ratio_RV, scratch, entry.mix(call.options))
    kd_R = _dot(p_RV, terms.student) + _dot(q_RV, terms.teacher)
    slope_mean_R = _dot(p_RV, terms.slope) + terms.teacher_slope + torch.zeros_like(u_max_R1).squeeze(1)
    grad_RV.copy_(-slope_mean_R[:, None].expand_as(grad_RV))
    if terms.slope is not None:
        grad_RV.add_(terms.slope.tensor_BC, alpha=terms.slope.factor)
    grad_RV.mul_(p_RV).add_(q_RV, alpha=terms.teacher_slope)
    assert isinstance(kd_R, Tensor)
    return kd_R.clamp_(min=0)


def _accumulate(
    grad_RV: Tensor,
    x_RH: Tensor,
    call: LossCall,
    start: int,
    stop: int,
    d_hidden: Tensor | None,
    d_weight: Tensor | None,
) -> None:
    head, index, num = call.student_head, call.rows.index, call.student_head.num_real_columns
    dx_RH = torch.zeros(x_RH.shape, dtype=torch.promote_types(torch.float32, x_RH.dtype), device=x_RH.device)
    for c0 in range(0, num, COLUMN_TILE):
        c1 = min(c0 + COLUMN_TILE, num)
        if d_hidden is not None:
            dx_RH += grad_RV[:, c0:c1] @ head.weight[c0:c1].detach().to(x_RH.dtype)
        if d_weight is not None:
            d_weight[c0:c1] += grad_RV[:, c0:c1].T @ x_RH
    if d_hidden is not None:
        if index is None:
            d_hidden[start:stop] = dx_RH.to(d_hidden.dtype)
        else:
            d_hidden.index_copy_(0, index[start:stop], dx_RH.to(d_hidden.dtype))
