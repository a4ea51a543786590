"""L3 and L7: float32-grade logits and sums from 16-bit inputs, and 0 where the models agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from planner.loss_costs import Mode
from student.loss import FullLogitsLoss, Head, KDLoss, LossOptions
from student.loss.divergences import DIVERGENCES
from tests.loss.problems import Answer, Problem, planned_loss, random_problem, relative_error

pytestmark = pytest.mark.usefixtures("matrix_units")
both_modes = pytest.mark.parametrize("mode", ["keep", "recompute"])
every_divergence = pytest.mark.parametrize("divergence", DIVERGENCES)


def errors(found: Answer, wanted: Answer) -> list[float]:
    """Relative to the float64 oracle: kd, d hidden, d weight."""
    pairs = [(found.out.kd, wanted.out.kd), *zip(found.grads, wanted.grads, strict=True)]
    return [float((ours.double() - exact).norm() / exact.norm()) for ours, exact in pairs]


def near_equal_problem(dtype: torch.dtype) -> Problem:
    """The teacher's head plus 2 % of noise, on the same states: a KL of about 2e-3, as late in training."""
    generator = torch.Generator().manual_seed(0)
    num_rows, width, num_columns = 64, 512, 8000
    teacher_VH = torch.randn(num_columns, width, generator=generator) * 3 / width**0.5
    student_VH = teacher_VH * (1 + 0.02 * torch.randn(num_columns, width, generator=generator))
    hidden_NH = torch.randn(num_rows, width, generator=generator).to(dtype)
    return Problem(
        student_hidden=hidden_NH.clone().requires_grad_(),
        student_weight=student_VH.to(dtype).requires_grad_(),
        teacher_hidden=hidden_NH,
        teacher_head=Head(weight=teacher_VH.to(dtype)),
        labels=torch.randint(num_columns, (num_rows,), generator=generator),
    )


@pytest.mark.parametrize("divergence", ["forward_kl", "jsd"])
@both_modes
def test_near_equal_models_in_bf16_keep_their_gradient(divergence: str, mode: Mode, matrix_units: bool) -> None:
    problem = near_equal_problem(torch.bfloat16)
    options = LossOptions(divergence=divergence, kd_weight=1.0, ce_weight=0.0)
    exact = problem.solve_exactly(options)
    loss = planned_loss(options, mode, rows=64, columns=2048, block_elements=64_000)
    kd, d_hidden, d_weight = errors(problem.solve(loss), exact)
    assert kd <= 2e-4
    assert d_hidden <= 5e-3
    assert d_weight <= 5e-3
    # What the float32-grade logits are for: rounded to bf16 the gradient is lost, with full logits just the same.
    fast = planned_loss(replace(options, precision="fast"), mode, rows=64, columns=2048, block_elements=64_000)
    d_hidden = errors(problem.solve(fast), exact)[1]
    # Where 16-bit products are no faster, nothing is rounded for speed.
    assert d_hidden >= 0.1 if matrix_units else d_hidden <= 5e-3
    assert errors(problem.solve(FullLogitsLoss.from_options(options)), exact)[1] >= 0.1


@both_modes
def test_near_equal_models_in_fp32_keep_their_gradient(mode: Mode) -> None:
    problem = near_equal_problem(torch.float32)
    options = LossOptions(kd_weight=1.0, ce_weight=0.0)
    loss = planned_loss(options, mode, rows=64, columns=2048, block_elements=64_000)
    assert all(error <= 1e-3 for error in errors(problem.solve(loss), problem.solve_exactly(options)))


@every_divergence
@both_modes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("precision", ["fp32", "fast"])
def test_error_is_no_greater_than_that_of_full_logits_in_the_same_dtype(
    divergence: str, mode: Mode, dtype: torch.dtype, precision: str
) -> None:
    problem = random_problem(
        31, num_rows=48, student_width=64, teacher_width=96, num_columns=500, dtype=dtype, scale=4.0
    )
    options = LossOptions(divergence=divergence, temperature=1.5, precision=precision)
    exact = problem.solve_exactly(options)
    ours = errors(problem.solve(planned_loss(options, mode, rows=20, columns=128, block_elements=3000)), exact)
    full = errors(problem.solve(FullLogitsLoss.from_options(options)), exact)
    # The gradient of the logits and, in keep, dX are rounded to the states' dtype once each.
    tolerance = 2 * torch.finfo(dtype).eps
    for found, theirs in zip(ours, full, strict=True):
        assert found <= theirs + tolerance


@both_modes
@pytest.mark.parametrize("weight", [1e-9, 1e-4, 1.0, 100.0, 1e9])
@pytest.mark.parametrize("choices", [{}, {"divergence": "jsd", "temperature": 60.0}, {"kd_weight": 300.0}])
def test_fp16_gradients_neither_overflow_nor_vanish_at_any_weight(
    mode: Mode, weight: float, choices: dict[str, Any]
) -> None:
    problem = random_problem(33, num_rows=24, student_width=16, num_columns=40, dtype=torch.float16)
    options = LossOptions(**choices)
    loss = planned_loss(options, mode, rows=9, columns=16, block_elements=200)
    # What arrives from a loss scaler keeps the results within fp16.
    scale = 64.0 / options.kd_weight / options.temperature
    problem.call["row_weights"] = torch.full((24,), weight, dtype=torch.float32)
    problem.call["row_weights"][::3] /= 2
    exact = problem.solve_exactly(options, upstream=scale / weight)
    found = problem.solve(loss, upstream=scale / weight)
    assert all(error <= 4e-3 for error in errors(found, exact))


@both_modes
def test_dw_is_summed_in_float32_over_windows(mode: Mode) -> None:
    problem = random_problem(
        32, num_rows=512, student_width=16, teacher_width=16, num_columns=64, dtype=torch.bfloat16, masked_frac=0.0
    )
    options = LossOptions()
    exact = problem.solve_exactly(options)
    problem.head = {"main_grad": torch.zeros(64, 16)}
    few, many = (planned_loss(options, mode, rows=rows, columns=64, block_elements=4096) for rows in (512, 8))
    found = []
    for loss in (few, many):
        problem.head["main_grad"].zero_()
        arguments, keywords = problem.arguments()
        loss(*arguments, **keywords).loss.backward()
        found.append(relative_error(problem.head["main_grad"], exact.grads[1]))
    # 64 windows summed in bf16 would lose 2 digits; each window's own product is rounded once.
    assert found[1] <= max(1.5 * found[0], 3e-3)


@every_divergence
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("precision", ["fp32", "fast"])
def test_identical_models_give_zero_and_never_less(divergence: str, dtype: torch.dtype, precision: str) -> None:
    generator = torch.Generator().manual_seed(1)
    weight_VH = (torch.randn(151_936, 16, generator=generator)).to(dtype)
    hidden_NH = torch.randn(3, 16, generator=generator).to(dtype).requires_grad_()
    loss = KDLoss(divergence, kd_weight=1.0, ce_weight=0.0, precision=precision, teacher_weight=0.3)
    out = loss(hidden_NH, Head(weight=weight_VH), hidden_NH.detach(), Head(weight=weight_VH), None, all_rows=True)
    assert 0 <= out.kd.item() <= 1e-7
    out.loss.backward()
    assert hidden_NH.grad is not None
    assert hidden_NH.grad.isfinite().all()
    assert hidden_NH.grad.abs().max() <= 1e-6


@every_divergence
@both_modes
def test_almost_identical_models_never_give_a_negative_divergence(divergence: str, mode: Mode) -> None:
    for seed in range(5):
        problem = random_problem(seed, num_rows=16, student_width=6, num_columns=300, dtype=torch.float32, scale=3.0)
        nudge = 1 + 1e-4 * torch.randn(300, 6, generator=torch.Generator().manual_seed(seed))
        problem.teacher_head = Head(weight=problem.student_weight.detach() * nudge)
        problem.teacher_hidden = problem.student_hidden.detach()
        options = LossOptions(divergence=divergence, kd_weight=1.0, ce_weight=0.0)
        for row in range(16):
            problem.call = {"row_index": torch.tensor([row])}
            loss = planned_loss(options, mode, columns=64, block_elements=300)
            assert problem.solve(loss).out.kd.item() >= 0


@both_modes
@pytest.mark.parametrize("hidden_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_weights_of_another_dtype_are_cast_and_gradients_come_in_their_own(
    mode: Mode, hidden_dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    problem = random_problem(33, num_rows=20, student_width=32, teacher_width=48, num_columns=700, scale=3.0)
    assert problem.teacher_hidden is not None
    assert problem.teacher_head is not None
    # Numbers that every dtype holds: the answer must not depend on the weight's dtype at all.
    for tensor in (problem.student_hidden, problem.student_weight, problem.teacher_hidden, problem.teacher_head.weight):
        tensor.data = tensor.detach().bfloat16().double()
    problem.student_hidden = problem.student_hidden.detach().to(hidden_dtype).requires_grad_()
    problem.teacher_hidden = problem.teacher_hidden.to(hidden_dtype)
    problem.teacher_head = Head(weight=problem.teacher_head.weight.detach())
    options = LossOptions(temperature=2.0)
    loss = planned_loss(options, mode, rows=9, columns=300, block_elements=900)
    answers = []
    for dtype in (hidden_dtype, weight_dtype):
        problem.student_weight = problem.student_weight.detach().to(dtype).requires_grad_()
        problem.teacher_head = Head(weight=problem.teacher_head.weight.to(dtype))
        arguments, keywords = problem.arguments()
        out = loss(*arguments, **keywords)
        out.loss.backward()
        assert problem.student_weight.grad is not None
        assert problem.student_hidden.grad is not None
        assert problem.student_weight.grad.dtype == dtype
        answers.append((out.loss.detach(), problem.student_hidden.grad, problem.student_weight.grad))
        problem.student_hidden.grad = None
    for found, wanted in zip(answers[1], answers[0], strict=True):
        assert relative_error(found, wanted) <= (5e-3 if torch.bfloat16 in (weight_dtype, hidden_dtype) else 1e-5)


@both_modes
def test_autocast_around_the_loss_changes_nothing(mode: Mode) -> None:
    problem = random_problem(34, num_rows=12, student_width=16, teacher_width=16, num_columns=60, dtype=torch.float32)
    loss = planned_loss(LossOptions(), mode, rows=5, columns=16, block_elements=64)
    wanted = problem.solve(loss)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = problem.solve(loss)
    for ours, theirs in zip(found.numbers(), wanted.numbers(), strict=True):
        assert torch.equal(ours, theirs)


@both_modes
def test_teacher_states_in_8_bits_with_a_scale_a_row(mode: Mode) -> None:
    problem = random_problem(35, num_rows=12, student_width=16, teacher_width=16, num_columns=60, masked_frac=0.0)
    problem.student_hidden = problem.student_hidden.detach().bfloat16().requires_grad_()
    problem.student_weight = problem.student_weight.detach().bfloat16().requires_grad_()
    assert problem.teacher_hidden is not None
    assert problem.teacher_head is not None
    scale_N = problem.teacher_hidden.abs().amax(1).float() / 448
    packed_NH = (problem.teacher_hidden.float() / scale_N[:, None]).to(torch.float8_e4m3fn)
    head = Head(weight=problem.teacher_head.weight.bfloat16())
    packed = replace(problem, teacher_hidden=packed_NH, teacher_head=head, call={"teacher_row_scale": scale_N})
    unpacked_NH = packed_NH.double() * scale_N.double()[:, None]
    wanted = replace(problem, teacher_hidden=unpacked_NH, teacher_head=head).solve_exactly(LossOptions())
    found = packed.solve(planned_loss(LossOptions(), mode, rows=5, columns=16, block_elements=64))
    assert max(errors(found, wanted)) <= 6e-3
    assert errors(found, wanted)[0] <= 1e-4


def test_teacher_states_made_in_inference_mode_are_read() -> None:
    problem = random_problem(36)
    wanted = problem.solve_exactly(LossOptions())
    assert problem.teacher_hidden is not None
    assert problem.teacher_head is not None
    with torch.inference_mode():
        problem.teacher_hidden = problem.teacher_hidden.clone()
        problem.teacher_head = Head(weight=problem.teacher_head.weight.clone())
    for mode in ("keep", "recompute"):
        found = problem.solve(planned_loss(LossOptions(), mode))
        for ours, theirs in zip(found.numbers(), wanted.numbers(), strict=True):
            assert relative_error(ours, theirs) <= 1e-10
