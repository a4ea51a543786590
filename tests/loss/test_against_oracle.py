"""L1: the fused loss equals the loss over full logits, in value and gradients, whatever the windows, tiles and
blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.loss_costs import Mode
from student.loss import FullLogitsLoss, Head, KDLoss, LossOptions
from student.loss.divergences import DIVERGENCES
from tests.loss.problems import IGNORE, Problem, assert_equal_answers, planned_loss, random_problem

MODES: tuple[Mode, ...] = ("keep", "recompute")
every_divergence = pytest.mark.parametrize("divergence", DIVERGENCES)
both_modes = pytest.mark.parametrize("mode", MODES)


def options_of(divergence: str, *, temperature: float = 1.0, **choices: float) -> LossOptions:
    return LossOptions(divergence=divergence, temperature=temperature, teacher_weight=0.3, skew_alpha=0.2, **choices)


def check(problem: Problem, options: LossOptions, mode: Mode, *, upstream: float = 1.0, **sizes: int) -> None:
    found = problem.solve(planned_loss(options, mode, **sizes), upstream=upstream)
    assert_equal_answers(found, problem.solve_exactly(options, upstream=upstream))


@every_divergence
@both_modes
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_fused_equals_full_logits(divergence: str, mode: Mode, temperature: float) -> None:
    check(random_problem(1), options_of(divergence, temperature=temperature), mode, upstream=3.0)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    divergence=st.sampled_from(sorted(DIVERGENCES)),
    mode=st.sampled_from(MODES),
    temperature=st.sampled_from([0.5, 1.0, 3.0]),
    num_rows=st.integers(1, 9),
    num_columns=st.integers(1, 13),
    widths=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    sizes=st.tuples(st.integers(1, 10), st.integers(1, 14), st.integers(1, 150)),
    scale=st.sampled_from([0.1, 1.0, 10.0]),
)
def test_fused_equals_full_logits_at_any_shape(
    seed: int,
    divergence: str,
    mode: Mode,
    temperature: float,
    num_rows: int,
    num_columns: int,
    widths: tuple[int, int],
    sizes: tuple[int, int, int],
    scale: float,
) -> None:
    problem = random_problem(
        seed,
        num_rows=num_rows,
        num_columns=num_columns,
        student_width=widths[0],
        teacher_width=widths[1],
        masked_frac=0.0 if num_rows == 1 else 0.2,
        scale=scale,
    )
    if bool((problem.labels == IGNORE).all()):
        problem.labels = torch.zeros(num_rows, dtype=torch.int64)
    options = options_of(divergence, temperature=temperature)
    check(problem, options, mode, rows=sizes[0], columns=sizes[1], block_elements=sizes[2])


@every_divergence
@both_modes
def test_gradcheck(divergence: str, mode: Mode) -> None:
    problem = random_problem(3, num_rows=4, num_columns=6, bias=True)
    loss = planned_loss(options_of(divergence, temperature=1.5), mode)

    def value(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        head = Head(weight=weight, bias=bias)
        return loss(hidden, head, problem.teacher_hidden, problem.teacher_head, problem.labels).loss

    assert torch.autograd.gradcheck(value, problem.leaves())


@every_divergence
@both_modes
@pytest.mark.parametrize(
    "head", [{"logit_softcap": 2.0}, {"logit_scale": 0.4}, {"logit_softcap": 3.0, "logit_scale": 1.7}]
)
def test_heads_with_bias_cap_and_scale(divergence: str, mode: Mode, head: dict[str, float]) -> None:
    problem = random_problem(4, bias=True, scale=4.0, **head)
    assert problem.teacher_head is not None
    bias = torch.linspace(-1, 1, problem.teacher_head.weight.shape[0]).double()
    problem.teacher_head = replace(problem.teacher_head, bias=bias, **head)
    check(problem, options_of(divergence, temperature=2.0), mode)


@both_modes
@pytest.mark.parametrize(("student_padding", "teacher_padding"), [(0, 2), (3, 0), (2, 5)])
def test_padded_columns_carry_no_mass_on_either_side(mode: Mode, student_padding: int, teacher_padding: int) -> None:
    problem = random_problem(5, bias=True)
    options = options_of("jsd")
    wanted = problem.solve_exactly(options)
    # Padding that would carry nearly all mass if it were let in.
    assert problem.teacher_head is not None
    assert problem.student_bias is not None
    teacher_weight = torch.cat([problem.teacher_head.weight, torch.full((teacher_padding, 6), 9.0).double()])
    student_weight = torch.cat([problem.student_weight.detach(), torch.full((student_padding, 5), 9.0).double()])
    student_bias = torch.cat([problem.student_bias.detach(), torch.full((student_padding,), 9.0).double()])
    padded = replace(
        problem,
        student_weight=student_weight.requires_grad_(),
        student_bias=student_bias.requires_grad_(),
        teacher_head=Head(weight=teacher_weight, real_vocab=11),
        head={"real_vocab": 11},
    )
    found = padded.solve(planned_loss(options, mode))
    for grad in found.grads[1:]:
        assert not grad[11:].any()
    found.grads[1:] = [grad[:11] for grad in found.grads[1:]]
    assert_equal_answers(found, wanted)


@both_modes
def test_row_weights_and_teacher_row_scale(mode: Mode) -> None:
    problem = random_problem(6)
    assert problem.teacher_hidden is not None
    problem.call = {
        "row_weights": torch.linspace(0, 2, 7).double(),
        "teacher_row_scale": torch.linspace(0.5, 2, 7).double(),
        "num_rows": 13,
    }
    options = options_of("skew_reverse_kl", temperature=0.7)
    check(problem, options, mode)
    # The scale belongs to the teacher's states: dividing them by it changes nothing.
    wanted = replace(problem, call={key: value for key, value in problem.call.items() if key != "teacher_row_scale"})
    scale_N1 = problem.call["teacher_row_scale"][:, None]
    scaled = replace(problem, teacher_hidden=problem.teacher_hidden / scale_N1)
    assert_equal_answers(scaled.solve(planned_loss(options, mode)), wanted.solve_exactly(options))


@both_modes
@pytest.mark.parametrize("weights", [{"kd_weight": 0.0, "ce_weight": 1.0}, {"kd_weight": 1.0, "ce_weight": 0.0}])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_either_part_alone(mode: Mode, weights: dict[str, float], temperature: float) -> None:
    check(random_problem(7), options_of("forward_kl", temperature=temperature, **weights), mode)


@both_modes
def test_without_kd_the_teacher_is_not_asked_for(mode: Mode) -> None:
    problem = replace(random_problem(8), teacher_hidden=None, teacher_head=None)
    check(problem, LossOptions(kd_weight=0.0, ce_weight=1.0), mode)


@both_modes
def test_without_ce_the_labels_are_not_asked_for(mode: Mode) -> None:
    problem = replace(random_problem(9), labels=None, call={"all_rows": True})
    check(problem, LossOptions(kd_weight=2.0, ce_weight=0.0), mode)


@both_modes
@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_side_gets_no_gradient_and_the_other_the_same(mode: Mode, frozen: int) -> None:
    options = options_of("reverse_kl")
    problem = random_problem(10)
    wanted = problem.solve_exactly(options)
    problem.leaves()[frozen].requires_grad_(False)
    found = problem.solve(planned_loss(options, mode))
    del wanted.grads[frozen]
    assert_equal_answers(found, wanted)


@both_modes
def test_teacher_tensors_get_no_gradient(mode: Mode) -> None:
    problem = random_problem(11)
    assert problem.teacher_hidden is not None
    assert problem.teacher_head is not None
    problem.teacher_hidden.requires_grad_()
    problem.teacher_head.weight.requires_grad_()
    arguments, keywords = problem.arguments()
    planned_loss(LossOptions(), mode)(*arguments, **keywords).loss.backward()
    assert problem.teacher_hidden.grad is None
    assert problem.teacher_head.weight.grad is None


@every_divergence
@both_modes
def test_value_without_gradients_is_the_same(divergence: str, mode: Mode) -> None:
    problem = random_problem(12)
    loss = planned_loss(options_of(divergence), mode)
    arguments, keywords = problem.arguments()
    with torch.no_grad():
        quiet = loss(*arguments, **keywords)
    assert not quiet.loss.requires_grad
    assert torch.equal(quiet.loss, loss(*arguments, **keywords).loss.detach())


@pytest.mark.parametrize("loss_class", [KDLoss, FullLogitsLoss])
def test_loss_is_the_weighted_sum_of_its_parts(loss_class: type[KDLoss] | type[FullLogitsLoss]) -> None:
    loss = loss_class("reverse_kl", temperature=2.0, kd_weight=0.3, ce_weight=0.9)
    out = random_problem(13).solve(loss).out
    torch.testing.assert_close(out.loss.detach(), 0.3 * out.kd + 0.9 * out.ce, rtol=1e-14, atol=0)
    assert not out.kd.requires_grad
    assert not out.ce.requires_grad


@both_modes
def test_main_gradient_takes_dw_and_autograd_gets_none(mode: Mode) -> None:
    options = options_of("jsd")
    problem = random_problem(14, dtype=torch.float32)
    wanted = problem.solve_exactly(options)
    main_grad = torch.full((11, 5), 2.0)
    problem.head = {"main_grad": main_grad}
    arguments, keywords = problem.arguments()
    for _ in range(3):
        planned_loss(options, mode)(*arguments, **keywords).loss.backward()
    assert problem.student_weight.grad is None
    torch.testing.assert_close(main_grad, (2.0 + 3 * wanted.grads[1]).float(), rtol=1e-5, atol=1e-5)


@both_modes
def test_tied_embeddings_get_both_gradients(mode: Mode) -> None:
    torch.manual_seed(0)
    problem = random_problem(15)
    weight = problem.student_weight
    tokens = torch.tensor([1, 4, 4, 0, 2, 10, 3])

    def gradient(loss: KDLoss | FullLogitsLoss) -> torch.Tensor:
        tied = replace(problem, student_hidden=torch.tanh(weight[tokens]))
        arguments, keywords = tied.arguments()
        return torch.autograd.grad(loss(*arguments, **keywords).loss, weight)[0]

    options = options_of("forward_kl")
    wanted = gradient(FullLogitsLoss.from_options(options))
    torch.testing.assert_close(gradient(planned_loss(options, mode)), wanted, rtol=1e-10, atol=1e-12)


@both_modes
def test_activation_checkpointing_changes_nothing(mode: Mode) -> None:
    problem = random_problem(16)
    options = options_of("jsd", temperature=2.0)
    wanted = problem.solve_exactly(options)
    arguments, keywords = problem.arguments()
    loss = planned_loss(options, mode)

    def run(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return loss(hidden, Head(weight=weight), *arguments[2:], **keywords).loss

    for reentrant in (False, True):
        out = torch.utils.checkpoint.checkpoint(run, *problem.leaves(), use_reentrant=reentrant)
        grads = torch.autograd.grad(out, problem.leaves()) if not reentrant else _backward(out, problem.leaves())
        for found, right in zip(grads, wanted.grads, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)


def _backward(out: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    # The reentrant kind of checkpoint works with backward() only.
    out.backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


@both_modes
def test_a_second_backward_gives_the_same_again(mode: Mode) -> None:
    problem, options = random_problem(17), options_of("jsd")
    wanted = problem.solve_exactly(options)
    arguments, keywords = problem.arguments()
    out = planned_loss(options, mode)(*arguments, **keywords)
    for _ in range(2):
        grads = torch.autograd.grad(out.loss, problem.leaves(), retain_graph=True)
        for found, right in zip(grads, wanted.grads, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)


@both_modes
def test_a_second_derivative_is_refused_and_a_graph_kept_for_the_first_is_not(mode: Mode) -> None:
    problem, options = random_problem(17), options_of("jsd")
    wanted = problem.solve_exactly(options)
    arguments, keywords = problem.arguments()
    out = planned_loss(options, mode)(*arguments, **keywords)
    # A penalty on this gradient would be differentiated as if it were a constant.
    with pytest.raises(RuntimeError, match=r"create_graph=True; allowed: first derivatives.*FullLogitsLoss"):
        torch.autograd.grad(out.loss, problem.leaves(), create_graph=True)
    grads = torch.autograd.grad(out.loss, problem.leaves(), retain_graph=True)
    for found, right in zip(grads, wanted.grads, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)


@both_modes
def test_a_teacher_overwritten_while_backward_still_needs_it_is_refused(mode: Mode) -> None:
    problem = random_problem(17)
    assert problem.teacher_hidden is not None
    arguments, keywords = problem.arguments()
    out = planned_loss(LossOptions(), mode)(*arguments, **keywords)
    if mode == "keep":
        out.loss.backward(retain_graph=True)
    problem.teacher_hidden.zero_()
    with pytest.raises(RuntimeError, match="teacher_hidden"):
        out.loss.backward()


def test_keep_is_done_with_the_teacher_when_the_call_returns() -> None:
    problem, options = random_problem(18), LossOptions()
    wanted = problem.solve_exactly(options)
    assert problem.teacher_hidden is not None
    arguments, keywords = problem.arguments()
    out = planned_loss(options, "keep")(*arguments, **keywords)
    problem.teacher_hidden.fill_(torch.nan)
    for found, right in zip(torch.autograd.grad(out.loss, problem.leaves()), wanted.grads, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)
