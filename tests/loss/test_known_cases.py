"""Hard cases known from public bug reports about distillation losses, with values worked out in float64.

Logits become inputs by an exact factorisation: one state of width 1 whose value is 1, and the logits as the head's
weight.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from planner.loss_costs import Mode
from student.loss import FullLogitsLoss, Head, KDLoss, KDOutput, LossOptions
from student.loss.call import DistillationLoss
from student.loss.divergences import DIVERGENCES
from student.loss.reference import divergence_of_logits
from tests.loss.problems import planned_loss

TEACHER = [2.0, 1.0, 0.0, -1.0]
STUDENT = [0.0, 0.5, 2.0, -1.0]
INF = math.inf


def losses(options: LossOptions) -> list[DistillationLoss]:
    """Every way to the number: both modes, a tile wider and one narrower than the vocabulary, and the full logits."""
    modes: tuple[Mode, Mode] = ("keep", "recompute")
    fused = [planned_loss(options, mode, columns=columns) for mode in modes for columns in (2, 8)]
    return [*fused, KDLoss.from_options(options), FullLogitsLoss.from_options(options)]


def of_logits(
    loss: DistillationLoss,
    student: list[float],
    teacher: list[float],
    *,
    dtype: torch.dtype = torch.float64,
    student_head: dict[str, Any] | None = None,
    teacher_head: dict[str, Any] | None = None,
    as_bias: bool = False,
    label: int = 0,
) -> tuple[KDOutput, torch.Tensor]:
    """The loss of one row and dL/d(student's logits)."""
    student_C, teacher_C = torch.tensor(student, dtype=dtype), torch.tensor(teacher, dtype=dtype)
    one = torch.ones(1, 1, dtype=dtype)
    if as_bias:
        bias = student_C.requires_grad_()
        zeros = torch.zeros(len(student), 1, dtype=dtype)
        ours = Head(weight=zeros, bias=bias, **(student_head or {}))
        theirs = Head(weight=torch.zeros(len(teacher), 1, dtype=dtype), bias=teacher_C, **(teacher_head or {}))
        leaf = bias
    else:
        leaf = student_C[:, None].requires_grad_()
        ours = Head(weight=leaf, **(student_head or {}))
        theirs = Head(weight=teacher_C[:, None], **(teacher_head or {}))
    out = loss(one, ours, one, theirs, torch.tensor([label]), all_rows=True)
    return out, torch.autograd.grad(out.loss, leaf)[0].flatten()


def kd_only(divergence: str, **choices: Any) -> LossOptions:
    return LossOptions(divergence=divergence, kd_weight=1.0, ce_weight=0.0, **choices)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (kd_only("forward_kl"), 1.1341411752),
        (kd_only("forward_kl", temperature=2.0, scale_t2=False), 0.2936551021),
        (kd_only("forward_kl", temperature=2.0), 1.1746204084),
        (kd_only("reverse_kl"), 1.2466144588),
        (kd_only("reverse_kl", temperature=2.0, scale_t2=False), 0.3121154372),
        (kd_only("jsd", teacher_weight=0.1), 0.0971237393),
        (kd_only("jsd", teacher_weight=0.5), 0.2563100680),
        (kd_only("jsd", teacher_weight=0.9), 0.1038274823),
        (kd_only("tvd"), 0.6262507943),
    ],
    ids=lambda value: f"{value.divergence}-T{value.temperature:g}" if isinstance(value, LossOptions) else None,
)
def test_canonical_pair(options: LossOptions, wanted: float) -> None:
    for loss in losses(options):
        assert of_logits(loss, STUDENT, TEACHER)[0].loss.item() == pytest.approx(wanted, abs=2e-10)


def test_canonical_gradient_of_forward_kl() -> None:
    wanted = torch.tensor([-0.5478126857, -0.0784381086, 0.6229556041, 0.0032951901], dtype=torch.float64)
    for loss in losses(kd_only("forward_kl")):
        torch.testing.assert_close(of_logits(loss, STUDENT, TEACHER)[1], wanted, rtol=0, atol=2e-10)


def test_the_temperature_divides_kd_only_and_ce_stays_at_1() -> None:
    wanted_ce = -torch.log_softmax(torch.tensor(STUDENT, dtype=torch.float64), 0)[1].item()
    for loss in losses(LossOptions(temperature=2.0)):
        out, _ = of_logits(loss, STUDENT, TEACHER, label=1)
        assert out.ce.item() == pytest.approx(wanted_ce, rel=1e-12)
        assert out.loss.item() == pytest.approx(0.5 * 1.1746204084 + 0.5 * wanted_ce, abs=2e-10)


def test_columns_of_a_tile_past_the_vocabulary_carry_no_mass() -> None:
    # Zero-padded columns would each add e^0 to both sums: 0.0022222.
    student, teacher = [-5.0, -6.0, -7.0, -8.0, -9.0], [-4.0, -6.0, -7.0, -8.0, -9.0]
    for loss in losses(kd_only("forward_kl")):
        assert of_logits(loss, student, teacher)[0].kd.item() == pytest.approx(0.0874748, abs=1e-7)


def test_minus_infinity_in_both_models_is_no_column_at_all() -> None:
    for as_bias in (False, True):
        for loss in losses(kd_only("forward_kl")):
            out, grad = of_logits(loss, [2.0, 1.0, -INF], [1.0, 2.0, -INF], as_bias=as_bias)
            assert out.kd.item() == pytest.approx(0.4621171573, abs=2e-10)
            assert grad.isfinite().all()
            assert grad[2] == 0


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_minus_infinity_in_both_models_equals_leaving_the_column_out(divergence: str) -> None:
    options = LossOptions(divergence=divergence, teacher_weight=0.3)
    for loss in losses(options):
        short, short_grad = of_logits(loss, STUDENT, TEACHER, as_bias=True)
        # The forbidden columns fill whole tiles of 2.
        student, teacher = (
            [-INF, -INF, *STUDENT[:2], -INF, *STUDENT[2:]],
            [-INF, -INF, *TEACHER[:2], -INF, *TEACHER[2:]],
        )
        long, long_grad = of_logits(loss, student, teacher, as_bias=True, label=2)
        torch.testing.assert_close(long.loss, short.loss, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(long_grad[[2, 3, 5, 6]], short_grad, rtol=1e-12, atol=1e-14)
        assert not long_grad[[0, 1, 4]].any()


def test_a_column_that_only_the_teacher_forbids() -> None:
    for loss in losses(kd_only("forward_kl")):
        out, grad = of_logits(loss, [2.0, 1.0, 0.0], [1.0, 2.0, -INF], as_bias=True)
        assert out.kd.item() == pytest.approx(0.5564614342, abs=2e-10)
        assert grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_an_infinite_divergence_is_an_error_and_a_bounded_one_a_number(divergence: str, dtype: torch.dtype) -> None:
    student, teacher = [2.0, -INF, 0.0], [1.0, -9.0, 0.0]
    if divergence == "reverse_kl":
        student, teacher = teacher, student
    options = kd_only(divergence)
    for loss in losses(options)[:-1]:
        if divergence in ("forward_kl", "reverse_kl"):
            with pytest.raises(ValueError, match="infinite"):
                of_logits(loss, student, teacher, as_bias=True, dtype=dtype)
            continue
        out, grad = of_logits(loss, student, teacher, as_bias=True, dtype=dtype)
        rows = [torch.tensor([logits], dtype=torch.float64) for logits in (student, teacher)]
        wanted = divergence_of_logits(*rows, options).item()
        assert out.kd.item() == pytest.approx(wanted, rel=1e-5)
        assert grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_far_apart_models_at_a_low_temperature_give_finite_gradients(divergence: str, dtype: torch.dtype) -> None:
    wanted = {"reverse_kl": 800.0, "forward_kl": 800.0, "tvd": 1.0, "jsd": math.log(2)}
    for loss in losses(kd_only(divergence, temperature=0.05, scale_t2=False)):
        out, grad = of_logits(loss, [0.0, 40.0], [40.0, 0.0], dtype=dtype)
        assert grad.isfinite().all()
        assert out.kd.isfinite()
        if divergence in wanted:
            assert out.kd.item() == pytest.approx(wanted[divergence], rel=2e-6)
        if divergence != "forward_kl":
            assert grad.abs().max() <= 1e-6


def test_teacher_weight_weighs_the_teacher() -> None:
    for teacher_weight, wanted in ((0.1, 0.06592), (0.9, 0.08242)):
        for loss in losses(kd_only("jsd", teacher_weight=teacher_weight)):
            out, _ = of_logits(loss, [0.0, 0.0, 0.0], [3.0, 0.0, 0.0])
            assert out.kd.item() == pytest.approx(wanted, abs=5e-6)


def test_softcap_is_part_of_the_logits() -> None:
    cap = {"logit_softcap": 30.0}
    for loss in losses(kd_only("forward_kl")):
        out, _ = of_logits(loss, [50.0, 60.0, 0.0], [60.0, 50.0, 0.0], student_head=cap, teacher_head=cap)
        assert out.kd.item() == pytest.approx(0.4515060223, abs=2e-10)
        bare, _ = of_logits(loss, [50.0, 60.0, 0.0], [60.0, 50.0, 0.0])
        assert bare.kd.item() == pytest.approx(9.9990920426, abs=2e-9)


def test_padding_that_would_take_all_the_mass() -> None:
    padded = {"real_vocab": 4}
    for loss in losses(kd_only("forward_kl")):
        out, grad = of_logits(loss, STUDENT, [*TEACHER, 9.0, 9.0], teacher_head=padded)
        assert out.kd.item() == pytest.approx(1.1341411752, abs=2e-10)
        out, grad = of_logits(loss, [*STUDENT, 9.0, 9.0], TEACHER, student_head=padded)
        assert out.kd.item() == pytest.approx(1.1341411752, abs=2e-10)
        assert not grad[4:].any()


def test_different_sizes_without_a_real_vocabulary_are_refused() -> None:
    for loss in losses(kd_only("forward_kl")):
        with pytest.raises(ValueError, match=r"student's 4 .*teacher's 6 .*real_vocab"):
            of_logits(loss, STUDENT, [*TEACHER, 9.0, 9.0])


@pytest.mark.parametrize("label", [4, 5, -1, 1 << 40])
def test_a_label_outside_of_the_vocabulary_is_refused(label: int) -> None:
    options = LossOptions()
    head = {"real_vocab": 4}
    for loss in losses(options):
        with pytest.raises(ValueError, match="labels"):
            of_logits(loss, [*STUDENT, 9.0], [*TEACHER, 9.0], student_head=head, teacher_head=head, label=label)


@pytest.mark.parametrize(
    ("choices", "name"),
    [
        ({"divergence": "kl"}, "divergence"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"kd_weight": -1.0}, "kd_weight"),
        ({"ce_weight": math.nan}, "ce_weight"),
        ({"kd_weight": 0.0, "ce_weight": 0.0}, "kd_weight"),
        ({"teacher_weight": 0.0}, "teacher_weight"),
        ({"teacher_weight": 1.0}, "teacher_weight"),
        ({"skew_alpha": 0.0}, "skew_alpha"),
        ({"precision": "bf16"}, "precision"),
        ({"workspace_bytes": 0}, "workspace_bytes"),
    ],
)
def test_options_out_of_range_are_refused_by_name(choices: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.*got.*allowed"):
        KDLoss(**choices)


def test_jsd_at_its_end_points_names_the_way_out() -> None:
    with pytest.raises(ValueError, match="forward_kl or reverse_kl"):
        KDLoss("jsd", teacher_weight=1.0)
