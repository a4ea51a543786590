"""The textbook: the loss written with both full logits matrices, the one place where they exist.

`full_logits_loss` is the baseline (`--loss full`): logits in the inputs' dtype, softmax in float32, gradients by
autograd. `reference_loss` is the oracle: the same formulas with everything in float64. Nothing here shares code with
the fused loss but the option and row checks; the divergences are written from their definitions on purpose.

Legend: N rows given, R rows that count, V columns that count.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from student.loss.call import LABEL_OUTSIDE, DistillationLoss, LossCall, refuse_if, work_dtype
from student.loss.head import Head
from student.loss.options import KDOutput, LossOptions


class FullLogitsLoss(DistillationLoss):
    """The textbook loss, called like KDLoss. Memory grows with rows x vocabulary: a baseline, not for large models.

    precision, workspace_bytes and a head's main_grad mean nothing here; a vocab_group is refused.
    """

    def _compute(self, call: LossCall) -> KDOutput:
        if call.vocab_group is not None:
            raise ValueError("vocab_group: got a group; allowed with full logits: None")
        return _loss_of_logits(call, work_dtype(call.student_hidden))


def full_logits_loss(
    student_hidden: Tensor,
    student_head: Head,
    teacher_hidden: Tensor | None,
    teacher_head: Head | None,
    labels: Tensor | None,
    *,
    options: LossOptions,
    row_index: Tensor | None = None,
    all_rows: bool = False,
    row_weights: Tensor | None = None,
    teacher_row_scale: Tensor | None = None,
    num_rows: int | float | Tensor | None = None,
) -> KDOutput:
    """FullLogitsLoss as a function."""
    return FullLogitsLoss.from_options(options)(
        student_hidden,
        student_head,
        teacher_hidden,
        teacher_head,
        labels,
        row_index=row_index,
        all_rows=all_rows,
        row_weights=row_weights,
        teacher_row_scale=teacher_row_scale,
        num_rows=num_rows,
    )


def reference_loss(
    student_hidden: Tensor,
    student_head: Head,
    teacher_hidden: Tensor | None,
    teacher_head: Head | None,
    labels: Tensor | None,
    *,
    options: LossOptions,
    row_index: Tensor | None = None,
    all_rows: bool = False,
    row_weights: Tensor | None = None,
    teacher_row_scale: Tensor | None = None,
    num_rows: int | float | Tensor | None = None,
) -> KDOutput:
    """The oracle: every input is cast to float64 first. Gradients reach the inputs through the casts, in their own
    dtype."""
    return full_logits_loss(
        student_hidden.double(),
        _in_float64(student_head),
        None if teacher_hidden is None else teacher_hidden.double(),
        None if teacher_head is None else _in_float64(teacher_head),
        labels,
        options=options,
        row_index=row_index,
        all_rows=all_rows,
        row_weights=row_weights,
        teacher_row_scale=teacher_row_scale,
        num_rows=num_rows,
    )


def _in_float64(head: Head) -> Head:
    return replace(head, weight=head.weight.double(), bias=None if head.bias is None else head.bias.double())


def _loss_of_logits(call: LossCall, dtype: torch.dtype) -> KDOutput:
    options, count = call.options, call.rows.count
    student_RV = _logits(call.rows.pick(call.student_hidden, 0, count), call.student_head, dtype)
    weights_R = student_RV.new_ones(count)
    if call.row_weights is not None:
        weights_R = call.rows.pick(call.row_weights, 0, count).to(dtype)
    divisor = call.divisor
    kd = ce = student_RV.new_zeros(())
    if call.teacher_hidden is not None and call.teacher_head is not None and options.kd_weight > 0:
        with torch.no_grad():
            teacher_RH = call.rows.pick_teacher(call.teacher_hidden, 0, count)
            scale_R1 = None
            if call.teacher_row_scale is not None:
                scale_R1 = call.rows.pick_teacher(call.teacher_row_scale, 0, count)[:, None].to(dtype)
            teacher_RV = _logits(teacher_RH, call.teacher_head, dtype, row_scale_R1=scale_R1)
        kd_R = divergence_of_logits(student_RV, teacher_RV, options)
        kd = (weights_R * kd_R).sum() / divisor * options.kd_scale
    if call.labels is not None:
        labels_R = call.rows.pick(call.labels, 0, count)
        counts_R = labels_R != options.ignore_index
        refuse_if(counts_R & ((labels_R < 0) | (labels_R >= student_RV.shape[1])), LABEL_OUTSIDE)
        column_R1 = labels_R.masked_fill(~counts_R, 0)[:, None]
        label_logp_R = torch.log_softmax(student_RV, dim=-1).gather(1, column_R1).squeeze(1)
        ce = -torch.where(counts_R, weights_R * label_logp_R, 0.0).sum() / divisor
    loss = options.kd_weight * kd + options.ce_weight * ce
    if count == 0:
        # Zero, but part of the graph: a step without rows still gives every parameter a (zero) gradient.
        loss = loss + 0.0 * (call.student_hidden[:0].sum() + call.student_head.weight[:0].sum()).to(dtype)
    return KDOutput(loss=loss, kd=kd.detach(), ce=ce.detach(), rows=count)


def _logits(hidden_RH: Tensor, head: Head, dtype: torch.dtype, *, row_scale_R1: Tensor | None = None) -> Tensor:
    """Logits of the real columns in `dtype`, from a product in the states' own dtype (fp8 states: in the weight's)."""
    if hidden_RH.dtype.itemsize == 1:
        hidden_RH = hidden_RH.to(head.weight.dtype)
    num_columns = head.num_real_columns
    logits_RV = (hidden_RH @ head.weight[:num_columns].to(hidden_RH.dtype).T).to(dtype)
    if row_scale_R1 is not None:
        logits_RV = logits_RV * row_scale_R1
    if head.bias is not None:
        logits_RV = logits_RV + head.bias[:num_columns].to(dtype)
    logits_RV = logits_RV * head.logit_scale
    if head.logit_softcap is not None:
        logits_RV = head.logit_softcap * torch.tanh(logits_RV / head.logit_softcap)
    return logits_RV


def divergence_of_logits(student_RV: Tensor, teacher_RV: Tensor, options: LossOptions) -> Tensor:
    """The divergence of each row, without T^2, from its definition."""
    log_s_RV = torch.log_softmax(student_RV / options.temperature, dim=-1)
    log_t_RV = torch.log_softmax(teacher_RV / options.temperature, dim=-1)
    s_RV, t_RV = log_s_RV.exp(), log_t_RV.exp()
    weight, alpha = options.teacher_weight, options.skew_alpha
    match options.divergence:
        case "forward_kl":
            return _kl(t_RV, log_t_RV, log_s_RV)
        case "reverse_kl":
            return _kl(s_RV, log_s_RV, log_t_RV)
        case "jsd":
            log_m_RV = _log_mixture(log_t_RV, log_s_RV, weight)
            return weight * _kl(t_RV, log_t_RV, log_m_RV) + (1 - weight) * _kl(s_RV, log_s_RV, log_m_RV)
        case "skew_forward_kl":
            return _kl(t_RV, log_t_RV, _log_mixture(log_t_RV, log_s_RV, alpha))
        case "skew_reverse_kl":
            return _kl(s_RV, log_s_RV, _log_mixture(log_s_RV, log_t_RV, alpha))
        case "tvd":
            gap_RV = s_RV - t_RV
            # abs() has a gradient of 0 at NaN.
            sign_RV = torch.where(gap_RV.isnan(), gap_RV, gap_RV.sign()).detach()
            return (sign_RV * gap_RV).sum(-1) / 2
    raise ValueError(f"divergence: got {options.divergence!r}, which has no textbook form here")


def _kl(p_RV: Tensor, log_p_RV: Tensor, log_q_RV: Tensor) -> Tensor:
    # A column without mass adds nothing, whatever its logarithms are; masking before the product keeps gradients
    # finite.
    massless_RV = p_RV == 0
    return (p_RV * (log_p_RV.masked_fill(massless_RV, 0.0) - log_q_RV.masked_fill(massless_RV, 0.0))).sum(-1)


def _log_mixture(log_p_RV: Tensor, log_q_RV: Tensor, share_of_p: float) -> Tensor:
    """log(share p + (1 - share) q); a column that neither side allows gets a finite stand-in, its mass being 0."""
    floor = torch.finfo(log_p_RV.dtype).min / 4
    p_RV, q_RV = log_p_RV.clamp(min=floor), log_q_RV.clamp(min=floor)
    one = log_p_RV.new_ones(())
    return torch.logaddexp(p_RV + (one * share_of_p).log(), q_RV + (one * (1 - share_of_p)).log())
