"""The kernels on CPU tensors, by triton's interpreter, against the oracle.

test_kernels.py runs this file in a process of its own: the interpreter is chosen by an environment variable that triton
reads when it is imported."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

import student.loss.plan as plan
from planner.loss_costs import Mode
from student.loss import LossOptions
from student.loss.divergences import DIVERGENCES
from student.loss.epilogue import Epilogue, Window
from student.loss.head import Head
from student.loss.products import Arena
from student.loss.statistics import RowStatistics
from student.loss.triton_kernels import BLOCK, KERNEL_DIVERGENCES, TritonEpilogue, _block
from tests.loss.problems import assert_equal_answers, planned_loss, random_problem

assert os.environ["TRITON_INTERPRET"] == "1"
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")

TOLERANCE = 3e-5
HEADS: dict[str, dict[str, Any]] = {"plain": {}, "capped": {"logit_softcap": 3.0, "logit_scale": 0.5}}


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels everywhere; what was launched is noted."""
    launched: list[str] = []

    def noted(name: str) -> Any:
        step = getattr(TritonEpilogue, name)

        def run(self: TritonEpilogue, *args: Any, **kwargs: Any) -> None:
            launched.append(name)
            step(self, *args, **kwargs)

        return run

    for name in ("statistics", "second", "gradient"):
        monkeypatch.setattr(TritonEpilogue, name, noted(name))
    monkeypatch.setattr(plan, "has_kernels", lambda device: True)
    return launched


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("mode", ["keep", "recompute"])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("head", HEADS)
def test_kernels_equal_the_oracle(
    divergence: str, mode: Mode, temperature: float, head: str, kernels: list[str]
) -> None:
    problem = random_problem(81, num_rows=7, num_columns=13, dtype=torch.float32)
    problem.head = dict(HEADS[head])
    options = LossOptions(divergence=divergence, temperature=temperature)
    assert_equal_answers(problem.solve(planned_loss(options, mode)), problem.solve_exactly(options), TOLERANCE)
    assert "statistics" in kernels
    assert "gradient" in kernels
    assert ("second" in kernels) == (DIVERGENCES[divergence].num_passes == 2)


@pytest.mark.parametrize("mode", ["keep", "recompute"])
@pytest.mark.parametrize("weights", [{"kd_weight": 0.0, "ce_weight": 1.0}, {"kd_weight": 1.0, "ce_weight": 0.0}])
def test_either_part_alone(mode: Mode, weights: dict[str, float], kernels: list[str]) -> None:
    problem = random_problem(82, num_rows=5, num_columns=9, dtype=torch.float32)
    options = LossOptions(divergence="jsd", **weights)
    assert_equal_answers(problem.solve(planned_loss(options, mode)), problem.solve_exactly(options), TOLERANCE)
    assert "gradient" in kernels


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_padding_row_weights_and_teacher_row_scale(mode: Mode, kernels: list[str]) -> None:
    problem = random_problem(83, num_rows=6, num_columns=17, dtype=torch.float32)
    assert problem.teacher_head is not None
    problem.head, problem.teacher_head = {"real_vocab": 14}, Head(weight=problem.teacher_head.weight, real_vocab=14)
    problem.call["row_weights"] = torch.linspace(0.5, 2.0, 6)
    problem.call["teacher_row_scale"] = torch.linspace(0.5, 1.5, 6)
    options = LossOptions(divergence="skew_reverse_kl")
    assert_equal_answers(problem.solve(planned_loss(options, mode)), problem.solve_exactly(options), TOLERANCE)
    assert "gradient" in kernels


def test_a_bias_is_read_and_one_that_learns_is_left_to_torch(
    kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = random_problem(84, dtype=torch.float32, bias=True)
    options = LossOptions()
    assert_equal_answers(problem.solve(planned_loss(options, "keep")), problem.solve_exactly(options), TOLERANCE)
    assert kernels == []
    assert problem.student_bias is not None
    problem.student_bias.requires_grad_(False)
    loss = planned_loss(options, "keep")
    arguments, keywords = problem.arguments()
    exact = planned_loss(options, "keep")
    found = loss(*arguments, **keywords).loss.detach()
    assert "statistics" in kernels
    monkeypatch.setattr(plan, "has_kernels", lambda device: False)
    torch.testing.assert_close(found, exact(*arguments, **keywords).loss.detach(), rtol=TOLERANCE, atol=0)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("mode", ["keep", "recompute"])
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_a_nan_of_either_model_reaches_loss_and_gradient(
    divergence: str, mode: Mode, side: str, kernels: list[str]
) -> None:
    problem = random_problem(87, dtype=torch.float32, masked_frac=0.0)
    broken = problem.student_hidden if side == "student" else problem.teacher_hidden
    assert broken is not None
    with torch.no_grad():
        broken[1, 2] = torch.nan
    found = problem.solve(planned_loss(LossOptions(divergence=divergence, kd_weight=1.0, ce_weight=0.0), mode))
    assert found.out.loss.isnan()
    assert found.grads[0][1].isnan().all()
    assert found.grads[0][[0, 2]].isfinite().all()
    assert "gradient" in kernels


def test_rows_longer_than_a_block_are_gone_over_in_steps(kernels: list[str]) -> None:
    problem = random_problem(85, num_rows=3, num_columns=2 * BLOCK + 5, dtype=torch.float32, masked_frac=0.0)
    options = LossOptions(divergence="jsd", temperature=2.0)
    assert_equal_answers(problem.solve(planned_loss(options, "keep")), problem.solve_exactly(options), TOLERANCE)
    assert "gradient" in kernels


def test_float64_is_left_to_torch(kernels: list[str]) -> None:
    problem = random_problem(86, dtype=torch.float64)
    assert_equal_answers(problem.solve(planned_loss(LossOptions(), "keep")), problem.solve_exactly(LossOptions()))
    assert kernels == []


def test_every_divergence_has_its_place_in_the_kernels() -> None:
    assert set(KERNEL_DIVERGENCES) == set(DIVERGENCES)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_16_bit_gradient_in_the_logits_own_rows(divergence: str) -> None:
    """As on a GPU: float32 logits, a gradient of half their width over them."""
    num_rows, num_columns = 4, BLOCK + 700
    entry, generator = DIVERGENCES[divergence], torch.Generator().manual_seed(0)
    planes = [torch.randn(num_rows, num_columns, generator=generator) for _ in range(2)]
    stats = RowStatistics.empty(
        num_rows, entry=entry, temperature=1.0, label_sum=False, dtype=torch.float32, device=torch.device("cpu")
    )
    settings: dict[str, Any] = {
        "entry": entry,
        "mix": 0.3,
        "temperature": 1.0,
        "dtype": torch.float32,
        "has_labels": True,
        "has_ce_grad": True,
        "student_head": Head(weight=torch.zeros(num_columns, 1)),
        "teacher_head": Head(weight=torch.zeros(num_columns, 1)),
        "num_planes": 1,
        "in_place_student": False,
        "in_place_teacher": False,
    }

    def window(student_RC: Tensor, grad_RC: Tensor) -> Window:
        return Window(
            student_planes=[student_RC],
            teacher_planes=[planes[1]],
            grad=grad_RC,
            stats=RowStatistics(stats.table.clone(), entry, 1.0),
            seconds=torch.zeros(2, num_rows),
            kd_scale=torch.full((num_rows,), 0.7),
            ce_scale=torch.full((num_rows,), 0.2),
            label=torch.arange(num_rows)[:, None] * 1000,
            label_hit=torch.ones(num_rows, 1),
            teacher_scale=None,
            student_bias=None,
            teacher_bias=None,
            grad_bias=None,
        )

    room = Arena(64 << 20, torch.device("cpu"))
    wanted_RC = torch.empty(num_rows, num_columns, dtype=torch.bfloat16)
    Epilogue(**settings).fused(window(planes[0].clone(), wanted_RC), 1, room, with_gradient=True)
    own_RC = planes[0].clone()
    grad_RC = own_RC.view(torch.bfloat16)[:, :num_columns]
    TritonEpilogue(**settings).fused(window(own_RC, grad_RC), 1, room, with_gradient=True)
    torch.testing.assert_close(grad_RC, wanted_RC, rtol=2e-2, atol=1e-9)


def test_blocks_are_powers_of_two() -> None:
    assert [_block(num) for num in (1, 2, 3, 1000, BLOCK, 10 * BLOCK)] == [1, 2, 4, 1024, BLOCK, BLOCK]
