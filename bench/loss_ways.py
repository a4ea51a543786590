"""Ways to one distillation loss and its gradients, on the same tensors: ours, the full one, others', the floor.

Legend: N rows, V columns of the vocabulary, Hs / Ht hidden sizes, R rows of a part.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from planner.loss_costs import LossPlan, LossShape, Mode, loss_flops, make_plan
from student.loss import FullLogitsLoss, Head, KDLoss
from student.loss.call import LossCall
from student.loss.epilogue import Epilogue
from student.loss.options import LossOptions
from student.loss.plan import loss_shape, make_epilogue

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
#: Rows whose products the floor makes at once: enough for full rate.
_FLOOR_ROWS = 512


@dataclass(frozen=True, kw_only=True)
class LossCase:
    """Sizes of a measurement."""

    rows: int
    vocab_size: int
    student_hidden: int
    teacher_hidden: int
    dtype: str

    @property
    def state_bytes(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def hidden_gradient_bytes(self) -> int:
        """dX, in the states' dtype."""
        return self.rows * self.student_hidden * self.state_bytes

    def weight_gradient_bytes(self, num_bytes: int) -> int:
        """dW with `num_bytes` an element."""
        return self.vocab_size * self.student_hidden * num_bytes


class Inputs:
    """States and heads of two models that are unsure of the next token, and nothing else that takes memory."""

    def __init__(self, case: LossCase) -> None:
        dtype = DTYPES[case.dtype]
        generator = torch.Generator().manual_seed(0)

        def normal(rows: int, width: int, scale: float) -> Tensor:
            # In place and in the dtype itself: a float32 draft of a head would be a peak of its own.
            return torch.empty(rows, width, dtype=dtype).normal_(0.0, scale, generator=generator)

        self.case = case
        self.student_NH = normal(case.rows, case.student_hidden, 1.0).requires_grad_()
        self.teacher_NH = normal(case.rows, case.teacher_hidden, 1.0)
        self.student_VH = normal(case.vocab_size, case.student_hidden, 2.0 * case.student_hidden**-0.5).requires_grad_()
        self.teacher_VH = normal(case.vocab_size, case.teacher_hidden, 2.0 * case.teacher_hidden**-0.5)

    def forget_gradients(self) -> None:
        self.student_NH.grad = self.student_VH.grad = None


Step = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way. `package`: the distribution that it needs beside ours. `weight_gradient_bytes`: of an element of dW
    while it is summed. `precision`, `divergence`, `mode`: of ours."""

    name: str
    start: Callable[[Inputs], Step]
    package: str | None = None
    weight_gradient_bytes: int | None = None
    divergence: str = "jsd"
    precision: str = "fast"
    mode: Mode | None = None

    @property
    def is_installed(self) -> bool:
        """Found, but not imported."""
        return self.package is None or importlib.util.find_spec(self.package.replace("-", "_")) is not None

    def summed_bytes(self, case: LossCase) -> int:
        """Of an element of dW while it is summed, in this case."""
        return self.weight_gradient_bytes or case.state_bytes


class FixedModeLoss(KDLoss):
    """KDLoss in a mode that the bench states."""

    mode: Mode = "keep"

    def _plan(self, call: LossCall) -> tuple[LossPlan, Epilogue]:
        epilogue = make_epilogue(call, self.mode)
        device = call.student_hidden.device.type
        self.shape = loss_shape(call, epilogue)
        return make_plan(self.shape, self.mode, device=device), epilogue


def predicted(way: Way, case: LossCase) -> dict[str, float]:
    """What the closed forms say of one of ours: bytes beside the gradients, FLOPs over the floor's."""
    assert way.mode is not None
    loss = _fixed(way)
    inputs = Inputs(
        LossCase(
            rows=1,
            vocab_size=1,
            student_hidden=case.student_hidden,
            teacher_hidden=case.teacher_hidden,
            dtype=case.dtype,
        )
    )
    _call(loss, inputs)
    shape = LossShape(**(vars(loss.shape) | {"num_rows": case.rows, "num_columns": case.vocab_size}))
    floor = LossShape(**(vars(shape) | {"student_logit_products": 1, "teacher_logit_products": 1}))
    return {
        "workspace_bytes": make_plan(shape, way.mode, device="cpu").workspace_bytes,
        "flops_over_floor": loss_flops(shape, way.mode) / loss_flops(floor, "keep"),
    }


def _fixed(way: Way) -> FixedModeLoss:
    options = LossOptions(divergence=way.divergence, precision=way.precision, kd_weight=1.0, ce_weight=0.0)
    loss = FixedModeLoss.from_options(options)
    assert way.mode is not None
    loss.mode = way.mode
    return loss


def _call(loss: KDLoss | FullLogitsLoss, inputs: Inputs, main_grad: Tensor | None = None) -> None:
    head = Head(weight=inputs.student_VH, main_grad=main_grad)
    out = loss(inputs.student_NH, head, inputs.teacher_NH, Head(weight=inputs.teacher_VH), None, all_rows=True)
    out.loss.backward()  # type: ignore[no-untyped-call]


def ours(way: Way, inputs: Inputs, main_grad: Tensor | None = None) -> Step:
    """With `main_grad` dW stays in the dtype of its sum; without, autograd is handed it in the weight's."""
    loss = _fixed(way)
    return lambda: _call(loss, inputs, main_grad)


def _full(inputs: Inputs) -> Step:
    loss = FullLogitsLoss("jsd", kd_weight=1.0, ce_weight=0.0)
    return lambda: _call(loss, inputs)


def _floor(inputs: Inputs) -> Step:
    """The four products that no way can do without, into memory that is there: nothing else."""
    case, dtype = inputs.case, DTYPES[inputs.case.dtype]
    part_rows = min(case.rows, _FLOOR_ROWS)
    logits_RV = torch.zeros(part_rows, case.vocab_size, dtype=dtype)
    hidden_RH = torch.zeros(part_rows, case.student_hidden, dtype=dtype)
    weight_VH = torch.zeros_like(inputs.student_VH, requires_grad=False)

    @torch.no_grad()
    def step() -> None:
        for start in range(0, case.rows, part_rows):
            student_RH = inputs.student_NH[start : start + part_rows]
            teacher_RH = inputs.teacher_NH[start : start + part_rows]
            num = student_RH.shape[0]
            torch.mm(teacher_RH, inputs.teacher_VH.T, out=logits_RV[:num])
            torch.mm(student_RH, inputs.student_VH.T, out=logits_RV[:num])
            torch.mm(logits_RV[:num], inputs.student_VH, out=hidden_RH[:num])
            torch.mm(logits_RV[:num].T, student_RH, out=weight_VH)

    return step


def _liger(inputs: Inputs, *, compiled: bool) -> Step:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, compiled=compiled)
    labels_N = torch.zeros(inputs.case.rows, dtype=torch.int64)

    def step() -> None:
        arguments = (inputs.student_NH, inputs.student_VH, inputs.teacher_NH, inputs.teacher_VH, labels_N)
        loss(*arguments).backward()

    return step


def _trl(inputs: Inputs) -> Step:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    function: Any = ChunkedDivergenceFunction

    def step() -> None:
        student, teacher = (inputs.student_NH, inputs.student_VH), (inputs.teacher_NH, inputs.teacher_VH)
        divergence_N, _ = function.apply(*student, None, *teacher, None, 0.5)
        divergence_N.mean().backward()

    return step


def _our_way(name: str, divergence: str, precision: str, mode: Mode) -> Way:
    way = Way(
        name=name,
        start=lambda inputs: ours(way, inputs),
        weight_gradient_bytes=4,
        divergence=divergence,
        precision=precision,
        mode=mode,
    )
    return way


FLOOR, LIGER, FULL = "GEMM floor", "Liger, compiled", "full logits"
_WAYS = (
    Way(name=FLOOR, start=_floor),
    _our_way("keep, fast, FKL", "forward_kl", "fast", "keep"),
    _our_way("keep, fast, JSD", "jsd", "fast", "keep"),
    _our_way("keep, fp32 logits, JSD", "jsd", "fp32", "keep"),
    _our_way("recompute, fast, FKL", "forward_kl", "fast", "recompute"),
    _our_way("recompute, fast, JSD", "jsd", "fast", "recompute"),
    Way(name=LIGER, start=lambda inputs: _liger(inputs, compiled=True), package="liger-kernel"),
    Way(name="Liger, eager", start=lambda inputs: _liger(inputs, compiled=False), package="liger-kernel"),
    Way(name="TRL, chunked", start=_trl, package="trl", weight_gradient_bytes=4),
    Way(name=FULL, start=_full),
)
WAYS: Mapping[str, Way] = {way.name: way for way in _WAYS}
