"""L4 and L8: which rows count, what the rest may hold, and what the sum is divided by."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from planner.loss_costs import Mode
from student.loss import FullLogitsLoss, Head, KDLoss, LossOptions
from student.loss.call import DistillationLoss
from student.loss.divergences import DIVERGENCES
from tests.loss.problems import IGNORE, Problem, assert_equal_answers, loss_of_kind, planned_loss, random_problem

both_modes = pytest.mark.parametrize("mode", ["keep", "recompute"])
OPTIONS = LossOptions(divergence="jsd", temperature=2.0)


def counted(problem: Problem) -> torch.Tensor:
    assert problem.labels is not None
    return (problem.labels != IGNORE).nonzero().squeeze(1)


def gradients(problem: Problem, loss: DistillationLoss, **call: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    arguments, keywords = problem.arguments()
    out = loss(*arguments, **(keywords | call))
    return out.loss.detach(), list(torch.autograd.grad(out.loss, problem.leaves()))


@both_modes
def test_masked_rows_never_enter_a_product(mode: Mode) -> None:
    problem = random_problem(21)
    wanted = problem.solve_exactly(OPTIONS)
    masked = problem.labels == IGNORE
    assert masked.any()
    with torch.no_grad():
        problem.student_hidden[masked] = torch.nan
    assert problem.teacher_hidden is not None
    problem.teacher_hidden[masked] = torch.nan
    for index in (None, counted(problem)):
        problem.call = {} if index is None else {"row_index": index}
        assert_equal_answers(problem.solve(planned_loss(OPTIONS, mode)), wanted)


@both_modes
def test_a_masked_rows_teacher_changes_nothing(mode: Mode) -> None:
    problem = random_problem(22)
    before = problem.solve(planned_loss(OPTIONS, mode))
    assert problem.teacher_hidden is not None
    problem.teacher_hidden[problem.labels == IGNORE] *= -3
    after = problem.solve(planned_loss(OPTIONS, mode))
    for left, right in zip(before.numbers(), after.numbers(), strict=True):
        assert torch.equal(left, right)


@both_modes
def test_named_rows_equal_rows_read_from_the_labels(mode: Mode) -> None:
    problem = random_problem(23)
    loss = planned_loss(OPTIONS, mode)
    wanted = problem.solve(loss)
    index = counted(problem)
    assert problem.teacher_hidden is not None
    for teacher in (problem.teacher_hidden, problem.teacher_hidden[index]):
        named = replace(problem, teacher_hidden=teacher, call={"row_index": index})
        assert_equal_answers(named.solve(loss), wanted, 1e-14)
        # The teacher's states may be compact where the rows are read from the labels, too.
        assert_equal_answers(replace(problem, teacher_hidden=teacher).solve(loss), wanted, 1e-14)


@both_modes
def test_with_as_many_teacher_rows_as_counted_ones_they_are_in_the_order_of_the_index(mode: Mode) -> None:
    problem = random_problem(24, masked_frac=0.0)
    wanted = problem.solve(planned_loss(OPTIONS, mode))
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    assert problem.teacher_hidden is not None
    shuffled = replace(problem, teacher_hidden=problem.teacher_hidden[order], call={"row_index": order})
    assert_equal_answers(shuffled.solve(planned_loss(OPTIONS, mode)), wanted)
    in_order = replace(problem, call={"row_index": torch.arange(7)})
    assert_equal_answers(in_order.solve(planned_loss(OPTIONS, mode)), wanted)


@both_modes
def test_all_rows_counts_every_row(mode: Mode) -> None:
    problem = random_problem(25, masked_frac=0.0)
    wanted = problem.solve_exactly(OPTIONS)
    problem.call = {"all_rows": True}
    assert_equal_answers(problem.solve(planned_loss(OPTIONS, mode)), wanted)


@both_modes
def test_a_named_row_without_a_label_counts_for_kd_alone(mode: Mode) -> None:
    problem = random_problem(26)
    assert (problem.labels == IGNORE).any()
    problem.call = {"all_rows": True}
    answer = problem.solve(planned_loss(OPTIONS, mode))
    assert_equal_answers(answer, problem.solve_exactly(OPTIONS))
    assert answer.out.rows == 7


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("kind", ["keep", "recompute", "full"])
def test_no_counted_row_gives_zero_and_zero_gradients_and_one_warning(kind: str, divergence: str) -> None:
    options = LossOptions(divergence=divergence)
    loss: DistillationLoss = FullLogitsLoss.from_options(options)
    if kind in ("keep", "recompute"):
        loss = planned_loss(options, "keep" if kind == "keep" else "recompute")
    problem = random_problem(27, num_rows=4, bias=True, masked_frac=1.0)
    with pytest.warns(RuntimeWarning, match="no row") as caught:
        answers = [problem.solve(loss) for _ in range(3)]
    assert len(caught) == 1
    assert loss.num_empty_calls == 3
    for answer in answers:
        assert answer.out.rows == 0
        for number in answer.numbers():
            assert not number.any()
            assert number.isfinite().all()


@both_modes
def test_a_step_without_rows_under_a_global_divisor_of_zero_is_zero(mode: Mode) -> None:
    problem = random_problem(28, num_rows=4, masked_frac=1.0)
    for num_rows in (0, torch.tensor(0)):
        problem.call = {"row_index": torch.empty(0, dtype=torch.int64), "num_rows": num_rows}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert problem.solve(planned_loss(OPTIONS, mode)).out.loss.item() == 0


@both_modes
def test_the_divisor_is_global_and_never_a_mean_of_means(mode: Mode) -> None:
    # One microbatch with a row whose loss is 1, one with three of loss 3: 2.5, where a mean of means says 2.
    loss = planned_loss(LossOptions(kd_weight=0.0, ce_weight=1.0), mode)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for value, count in ((1.0, 1), (3.0, 3)):
        other = torch.log(torch.expm1(torch.tensor([value], dtype=torch.float64)))
        head = Head(weight=torch.zeros(2, 1, dtype=torch.float64), bias=torch.cat([zero[0], other]))
        out = loss(zero.expand(count, 1), head, None, None, torch.zeros(count, dtype=torch.int64), num_rows=4)
        total += out.loss
    assert total.item() == pytest.approx(2.5, rel=1e-12)


@pytest.mark.parametrize("kind", ["keep", "recompute", "full"])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_divisor_below_one_divides(kind: str, as_tensor: bool) -> None:
    # A weighted mean of equal weights is the plain mean, whatever the weights are.
    loss = loss_of_kind(kind, OPTIONS)
    problem = random_problem(31, masked_frac=0.0)
    wanted = problem.solve(loss)
    problem.call = {"row_weights": torch.full((7,), 0.01, dtype=torch.float64), "num_rows": 0.07}
    if as_tensor:
        problem.call["num_rows"] = torch.tensor(0.07, dtype=torch.float64)
    assert_equal_answers(problem.solve(loss), wanted)


@pytest.mark.parametrize("kind", ["keep", "recompute", "full"])
@pytest.mark.parametrize("num_rows", [torch.tensor(7), torch.tensor([7]), torch.tensor(7.0), torch.tensor(7).int()])
def test_a_divisor_in_a_tensor_costs_no_digit(kind: str, num_rows: torch.Tensor) -> None:
    loss = loss_of_kind(kind, OPTIONS)
    problem = random_problem(32)
    problem.call = {"num_rows": 7}
    wanted = problem.solve_exactly(OPTIONS)
    problem.call = {"num_rows": num_rows}
    found = problem.solve(loss)
    assert found.out.loss.shape == ()
    assert_equal_answers(found, wanted)


@both_modes
@pytest.mark.parametrize("lengths", [[2, 2, 2, 2, 16, 16, 16, 16], [5] * 8])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_gradient_accumulation_changes_no_gradient(mode: Mode, lengths: list[int], as_tensor: bool) -> None:
    total = sum(lengths)
    problem = random_problem(29, num_rows=total, dtype=torch.float32, masked_frac=0.2)
    num_rows: int | torch.Tensor = int(counted(problem).numel())
    num_rows = torch.tensor(num_rows) if as_tensor else num_rows
    assert problem.teacher_hidden is not None
    assert problem.labels is not None
    loss = planned_loss(OPTIONS, mode, rows=8, columns=5, block_elements=40)
    results = []
    for num_batches in (1, 2, 4, 8):
        value, grads = torch.zeros(()), [torch.zeros_like(leaf) for leaf in problem.leaves()]
        per_batch = 8 // num_batches
        start = 0
        for first in range(0, 8, per_batch):
            stop = start + sum(lengths[first : first + per_batch])
            rows = slice(start, stop)
            batch = replace(
                problem,
                student_hidden=problem.student_hidden[rows],
                teacher_hidden=problem.teacher_hidden[rows],
                labels=problem.labels[rows],
            )
            arguments, _ = batch.arguments()
            out = loss(*arguments, num_rows=num_rows)
            value += out.loss.detach()
            for total_grad, grad in zip(grads, torch.autograd.grad(out.loss, problem.leaves()), strict=True):
                total_grad += grad
            start = stop
        results.append((value, *grads))
    for result in results[1:]:
        for found, wanted in zip(result, results[0], strict=True):
            assert (found - wanted).norm() <= 1e-6 * wanted.norm()


def call_with(problem: Problem, **changes: Any) -> None:
    arguments, keywords = replace(problem, **changes).arguments()
    KDLoss()(*arguments, **keywords)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"call": {"row_index": torch.arange(3), "all_rows": True}}, "row_index and all_rows"),
        ({"call": {"row_index": torch.arange(3).int()}}, "row_index.*int64"),
        ({"call": {"row_index": torch.arange(8)}}, "row_index.*8 rows of 7"),
        ({"labels": None}, "labels.*None"),
        ({"labels": torch.zeros(6, dtype=torch.int64)}, "labels"),
        ({"labels": torch.zeros(7)}, "labels.*int64"),
        ({"teacher_hidden": None}, "teacher_hidden"),
        ({"teacher_hidden": torch.zeros(2, 6).double()}, "teacher_hidden.*2 rows"),
        ({"teacher_hidden": torch.zeros(7, 5).double()}, "teacher head.*6.*5"),
        ({"student_hidden": torch.zeros(7, 4).double()}, "student head.*5.*4"),
        ({"student_hidden": torch.zeros(7).double()}, "student_hidden"),
        ({"call": {"row_weights": torch.zeros(6)}}, "row_weights"),
        ({"call": {"teacher_row_scale": torch.zeros(6)}}, "teacher_row_scale"),
        ({"call": {"num_rows": -1}}, "num_rows.*-1"),
        ({"call": {"num_rows": math.nan}}, "num_rows.*nan"),
        ({"call": {"num_rows": math.inf}}, "num_rows.*inf"),
        ({"call": {"num_rows": torch.tensor(-1)}}, "num_rows"),
        ({"call": {"num_rows": torch.tensor(math.nan)}}, "num_rows"),
        ({"call": {"num_rows": torch.tensor([3, 4])}}, r"num_rows.*\(2,\)"),
        ({"call": {"num_rows": torch.tensor(3, device="meta")}}, "num_rows.*meta"),
        ({"head": {"real_vocab": 12}}, "real_vocab"),
        ({"head": {"real_vocab": 10}}, "vocabulary: 10 .*11 11"),
        ({"head": {"vocab_start": 3}}, "vocab_start"),
        ({"head": {"main_grad": torch.zeros(11, 5)}}, "main_grad.*float32.*float64"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call_with(random_problem(30), **changes)


@pytest.mark.parametrize(
    "head",
    [
        {"bias": torch.zeros(3)},
        {"logit_softcap": 0.0},
        {"logit_scale": 0.0},
        {"real_vocab": 0},
        {"vocab_start": -1},
        {"main_grad": torch.zeros(2, 2)},
        {"weight": torch.zeros(4)},
        {"weight": torch.zeros(4, 2, dtype=torch.int64)},
    ],
)
def test_a_head_that_can_not_be_one_is_refused(head: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="got"):
        Head(**({"weight": torch.zeros(4, 2)} | head))
