"""Problems for the loss: two random models' states and heads, labels, and the two answers to compare.

Legend: N rows, Hs / Ht hidden sizes, V columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from planner.loss_costs import LossPlan, Mode, plan_window
from student.loss import FullLogitsLoss, Head, KDLoss, KDOutput, LossOptions, reference_loss
from student.loss.call import LossCall
from student.loss.epilogue import Epilogue
from student.loss.plan import loss_shape, make_epilogue

IGNORE = -100


class PlannedLoss(KDLoss):
    """KDLoss with windows, tiles and blocks of a test's choice: every mode runs at tiny sizes."""

    mode: Mode = "keep"
    rows = 3
    columns = 4
    block_elements = 8

    def _plan(self, call: LossCall) -> tuple[LossPlan, Epilogue]:
        epilogue = make_epilogue(call, self.mode)
        shape = loss_shape(call, epilogue)
        columns = shape.num_columns if self.mode == "keep" else min(self.columns, shape.num_columns)
        rows = min(self.rows, shape.num_rows)
        return plan_window(shape, self.mode, rows, columns, self.block_elements), epilogue


def planned_loss(
    options: LossOptions, mode: Mode, *, rows: int = 3, columns: int = 4, block_elements: int = 8
) -> PlannedLoss:
    loss = PlannedLoss.from_options(options)
    loss.mode, loss.rows, loss.columns, loss.block_elements = mode, rows, columns, block_elements
    return loss


def loss_of_kind(kind: str, options: LossOptions) -> KDLoss | FullLogitsLoss:
    """The loss in one of the fused one's modes, or over full logits."""
    if kind == "full":
        return FullLogitsLoss.from_options(options)
    return planned_loss(options, "keep" if kind == "keep" else "recompute")


@dataclass
class Problem:
    """Inputs of a call. The student's tensors are leaves that want gradients."""

    student_hidden: Tensor
    student_weight: Tensor
    teacher_hidden: Tensor | None
    teacher_head: Head | None
    labels: Tensor | None
    student_bias: Tensor | None = None
    head: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)

    def leaves(self) -> list[Tensor]:
        leaves = [self.student_hidden, self.student_weight]
        return leaves if self.student_bias is None else [*leaves, self.student_bias]

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        head = Head(weight=self.student_weight, bias=self.student_bias, **self.head)
        return (self.student_hidden, head, self.teacher_hidden, self.teacher_head, self.labels), self.call

    def solve(self, loss: KDLoss | FullLogitsLoss, *, upstream: float = 1.0) -> Answer:
        arguments, keywords = self.arguments()
        return self._backward(loss(*arguments, **keywords), upstream)

    def solve_exactly(self, options: LossOptions, *, upstream: float = 1.0) -> Answer:
        """The oracle's answer, gradients in float64 whatever the inputs' dtype."""
        exact = replace(
            self,
            student_hidden=_double_leaf(self.student_hidden),
            student_weight=_double_leaf(self.student_weight),
            student_bias=None if self.student_bias is None else _double_leaf(self.student_bias),
        )
        arguments, keywords = exact.arguments()
        return exact._backward(reference_loss(*arguments, options=options, **keywords), upstream)

    def _backward(self, out: KDOutput, upstream: float) -> Answer:
        leaves = [leaf for leaf in self.leaves() if leaf.requires_grad]
        grads = torch.autograd.grad(out.loss * upstream, leaves)
        return Answer(out, [grad.double() for grad in grads])


@dataclass
class Answer:
    out: KDOutput
    grads: list[Tensor]

    def numbers(self) -> list[Tensor]:
        return [self.out.loss.detach().double(), self.out.kd.double(), self.out.ce.double(), *self.grads]


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Of the whole tensor, by norm. What is almost 0 (two models that agree) is measured against 1e-4: there the
    oracle's own float64 sums cancel."""
    found, wanted = found.double(), wanted.double()
    return (found - wanted).norm().item() / max(wanted.norm().item(), 1e-4)


def assert_equal_answers(found: Answer, wanted: Answer, tolerance: float = 1e-10) -> None:
    assert found.out.rows == wanted.out.rows
    names = ["loss", "kd", "ce", "d hidden", "d weight", "d bias"]
    for name, ours, theirs in zip(names, found.numbers(), wanted.numbers(), strict=False):
        error = relative_error(ours, theirs)
        assert error <= tolerance, f"{name}: relative error {error:.3g} (allowed {tolerance:g})"


def random_problem(
    seed: int,
    *,
    num_rows: int = 7,
    student_width: int = 5,
    teacher_width: int = 6,
    num_columns: int = 11,
    dtype: torch.dtype = torch.float64,
    masked_frac: float = 0.3,
    bias: bool = False,
    scale: float = 1.0,
    **head: Any,
) -> Problem:
    """Logits of size about `scale`; each row is masked with probability masked_frac."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    labels = torch.randint(num_columns, (num_rows,), generator=generator)
    masked = torch.rand(num_rows, generator=generator) < masked_frac
    teacher_weight = normal(num_columns, teacher_width) * (scale / teacher_width**0.5)
    student_weight = normal(num_columns, student_width) * (scale / student_width**0.5)
    return Problem(
        student_hidden=normal(num_rows, student_width).to(dtype).requires_grad_(),
        student_weight=student_weight.to(dtype).requires_grad_(),
        teacher_hidden=normal(num_rows, teacher_width).to(dtype),
        teacher_head=Head(weight=teacher_weight.to(dtype)),
        labels=labels.masked_fill(masked, IGNORE),
        student_bias=normal(num_columns).to(dtype).requires_grad_() if bias else None,
        head=head,
    )


def _double_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().double().requires_grad_(tensor.requires_grad)
