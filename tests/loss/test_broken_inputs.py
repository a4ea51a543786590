"""What is broken shows: a NaN in the states reaches loss and gradient, a tensor on another device is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from student.loss import FullLogitsLoss, Head, KDLoss, LossOptions
from student.loss.divergences import DIVERGENCES
from tests.loss.problems import loss_of_kind, random_problem


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("kind", ["keep", "recompute", "full"])
@pytest.mark.parametrize("side", ["student", "teacher"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("matrix_units")
def test_a_broken_state_of_either_model_reaches_loss_and_gradient(
    divergence: str, kind: str, side: str, value: float, dtype: torch.dtype
) -> None:
    problem = random_problem(91, masked_frac=0.0, dtype=dtype)
    broken = problem.student_hidden if side == "student" else problem.teacher_hidden
    assert broken is not None
    with torch.no_grad():
        broken[1, 2] = value
    options = LossOptions(divergence=divergence, kd_weight=1.0, ce_weight=0.0, temperature=2.0)
    found = problem.solve(loss_of_kind(kind, options))
    d_hidden_NH, d_weight_VH = found.grads
    assert not found.out.loss.isfinite()
    assert not d_hidden_NH[1].isfinite().any()
    assert d_hidden_NH[[0, 2]].isfinite().all()
    assert not d_weight_VH.isfinite().any()


ON_META: list[tuple[str, dict[str, Any]]] = [
    ("teacher_hidden", {"teacher_hidden": torch.empty(7, 6, device="meta", dtype=torch.float64)}),
    ("teacher head weight", {"teacher_head": Head(weight=torch.empty(11, 6, device="meta"))}),
    ("teacher head bias", {"teacher_head": Head(weight=torch.zeros(11, 6), bias=torch.empty(11, device="meta"))}),
    ("student head weight", {"student_weight": torch.empty(11, 5, device="meta", dtype=torch.float64)}),
    ("student head bias", {"student_bias": torch.empty(11, device="meta", dtype=torch.float64)}),
    ("student head main_grad", {"head": {"main_grad": torch.empty(11, 5, device="meta", dtype=torch.float64)}}),
    ("labels", {"labels": torch.empty(7, device="meta", dtype=torch.int64)}),
    ("row_index", {"call": {"row_index": torch.empty(3, device="meta", dtype=torch.int64)}}),
    ("row_weights", {"call": {"row_weights": torch.empty(7, device="meta")}}),
    ("teacher_row_scale", {"call": {"teacher_row_scale": torch.empty(7, device="meta")}}),
]


@pytest.mark.parametrize("loss_class", [KDLoss, FullLogitsLoss])
@pytest.mark.parametrize(("name", "changes"), ON_META, ids=[name for name, _ in ON_META])
def test_a_tensor_on_another_device_is_refused_by_name(
    loss_class: type[KDLoss | FullLogitsLoss], name: str, changes: dict[str, Any]
) -> None:
    problem = random_problem(92)
    arguments, keywords = replace(problem, **changes).arguments()
    with pytest.raises(ValueError, match=f"{name}: on meta.*cpu.*allowed"):
        loss_class()(*arguments, **keywords)
