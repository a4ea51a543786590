"""The optimizer: rates by step, decay of matrices alone, clipping, and a state that survives as plain tensors."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn

from ring.core.errors import ConfigError
from student.optim import SCHEDULE_KINDS, AdamWSettings, Schedule, StudentOptimizer
from student.parallel.ranks import Ranks
from student.parallel.shares import Shares


class TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.matrix = nn.Parameter(torch.randn(3, 2, generator=generator))
        self.vector = nn.Parameter(torch.randn(2, generator=generator))
        self.unused = nn.Parameter(torch.ones(2, 2))
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)

    def set_gradients(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        self.matrix.grad = torch.randn(3, 2, generator=generator)
        self.vector.grad = torch.randn(2, generator=generator)


# --- schedule ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SCHEDULE_KINDS)
def test_warm_up_rises_to_the_peak_and_no_step_is_wasted(kind: Any) -> None:
    schedule = Schedule(peak_lr=2.0, num_steps=10, num_warmup_steps=4, kind=kind)
    rates = [schedule.lr_at(step) for step in range(1, 11)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4] == 2.0
    assert all(earlier >= later > 0 for earlier, later in itertools.pairwise(rates[3:]))


def test_decays_have_their_closed_forms_and_end_at_the_minimum() -> None:
    linear = Schedule(peak_lr=1.0, num_steps=10, kind="linear", min_lr_frac=0.1)
    cosine = Schedule(peak_lr=1.0, num_steps=10, kind="cosine", min_lr_frac=0.1)
    assert linear.lr_at(6) == pytest.approx(0.1 + 0.9 * 0.5)
    assert cosine.lr_at(3) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.2)))
    for schedule in (linear, cosine):
        assert schedule.lr_at(11) == schedule.lr_at(99) == pytest.approx(0.1)
    assert Schedule(peak_lr=1.0, num_steps=10, kind="constant").lr_at(10) == 1.0


def test_a_run_that_is_all_warm_up_has_a_rate_behind_its_end() -> None:
    assert Schedule(peak_lr=1.0, num_steps=4, num_warmup_steps=4).lr_at(5) == 1.0


@pytest.mark.parametrize(
    "change",
    [{"kind": "square"}, {"peak_lr": 0.0}, {"peak_lr": math.inf}, {"min_lr_frac": 2.0}, {"num_warmup_steps": 11}],
    ids=str,
)
def test_schedules_out_of_range_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Schedule(**({"peak_lr": 1.0, "num_steps": 10} | change))


@pytest.mark.parametrize("change", [{"beta1": 1.0}, {"eps": -1.0}, {"weight_decay": math.nan}], ids=str)
def test_adamw_settings_out_of_range_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        AdamWSettings(**change)


# --- AdamW ---------------------------------------------------------------------------------------


def test_first_update_is_adamws_closed_form_and_decays_matrices_alone() -> None:
    module = TwoParts()
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    module.set_gradients(0)
    optimizer = StudentOptimizer(module, AdamWSettings(weight_decay=0.5, eps=1e-12))
    optimizer.step(lr=0.01)
    # After one update the bias-corrected moments are the gradient and its square: a step of the rate, by sign.
    assert module.matrix.grad is not None
    assert module.vector.grad is not None
    expected = before["matrix"] * (1 - 0.01 * 0.5) - 0.01 * module.matrix.grad.sign()
    torch.testing.assert_close(module.matrix.detach(), expected)
    torch.testing.assert_close(module.vector.detach(), before["vector"] - 0.01 * module.vector.grad.sign())
    assert torch.equal(module.unused, before["unused"])
    assert torch.equal(module.frozen, before["frozen"])


def test_state_taken_over_by_another_optimizer_continues_to_the_bit() -> None:
    whole, first = TwoParts(), TwoParts()
    whole_optimizer, first_optimizer = StudentOptimizer(whole), StudentOptimizer(first)
    for step in range(1, 4):
        for module, optimizer in ((whole, whole_optimizer), (first, first_optimizer)):
            module.set_gradients(step)
            optimizer.step(lr=0.01 / step)
    second = TwoParts()
    second.load_state_dict(first.state_dict())
    second_optimizer = StudentOptimizer(second)
    second_optimizer.load_state_tensors({name: t.clone() for name, t in first_optimizer.state_tensors().items()})
    for step in range(4, 7):
        for module, optimizer in ((whole, whole_optimizer), (second, second_optimizer)):
            module.set_gradients(step)
            optimizer.step(lr=0.01 / step)
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name)), name


def test_parameters_without_an_update_have_no_state() -> None:
    module = TwoParts()
    optimizer = StudentOptimizer(module)
    assert optimizer.state_tensors() == {}
    module.set_gradients(1)
    optimizer.step(lr=0.1)
    assert {name.partition(".")[2] for name in optimizer.state_tensors()} == {"matrix", "vector"}


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    module = TwoParts()
    optimizer = StudentOptimizer(module)
    module.set_gradients(1)
    optimizer.step(lr=0.1)
    whole = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    bad_states = [
        whole | {"exp_avg.absent": torch.ones(1)},
        whole | {"momentum.matrix": torch.ones(3, 2)},
        whole | {"exp_avg.matrix": torch.ones(2, 3)},
        {name: tensor for name, tensor in whole.items() if name != "step.vector"},
    ]
    for bad in bad_states:
        with pytest.raises(ConfigError, match="optimizer state"):
            optimizer.load_state_tensors(bad)
    for name, tensor in optimizer.state_tensors().items():
        assert torch.equal(tensor, whole[name])


# --- clipping ------------------------------------------------------------------------------------


def clip(module: TwoParts, *, max_norm: float | None) -> float:
    """As the trainer clips."""
    return Shares(module, Ranks.alone(torch.device("cpu"))).clip(max_norm=max_norm)


def test_clipping_bounds_the_joint_norm_and_reports_it_unclipped() -> None:
    module = TwoParts()
    module.matrix.grad = torch.full((3, 2), 3.0)
    module.vector.grad = torch.full((2,), -3.0)
    norm = clip(module, max_norm=1.5)
    assert norm == pytest.approx(3.0 * math.sqrt(8))
    clipped = torch.cat([module.matrix.grad.flatten(), module.vector.grad])
    assert float(clipped.norm()) == pytest.approx(1.5, rel=1e-5)


def test_small_gradients_and_no_limit_change_nothing() -> None:
    for max_norm in (100.0, None):
        module = TwoParts()
        module.set_gradients(2)
        assert module.matrix.grad is not None
        before = module.matrix.grad.clone()
        clip(module, max_norm=max_norm)
        assert torch.equal(module.matrix.grad, before)


def test_a_gradient_that_is_not_finite_shows_in_the_norm() -> None:
    module = TwoParts()
    module.set_gradients(2)
    assert module.matrix.grad is not None
    module.matrix.grad[1, 1] = math.nan
    assert not math.isfinite(clip(module, max_norm=1.0))
