"""The divergences, each one entry of a table.

Every divergence here is an f-divergence: with the log ratio rho = log p_t - log p_s of a column it is
sum_j p_s f(e^rho), so value and gradient need nothing but rho. Write a = f(r) - r f'(r) with r = e^rho; then

    dD / dz_s(j) = p_s(j) (a_j - sum_k p_s(k) a_k) / T

An entry says what its value sums and what `a` is (a constant in `a` cancels and is dropped). docs/loss.md derives each.

Legend: B rows of a block, C columns of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor


class Scaled(NamedTuple):
    """`factor * tensor`, kept apart so that the factor joins a scalar of the row instead of costing a pass."""

    tensor: Tensor
    factor: float


class Terms(NamedTuple):
    """What one block of columns adds: the value is sum p_s student + sum p_t teacher; slope is the part of a that is
    not Divergence.teacher_slope. The tensors may be the buffers that `terms` was given; absent = 0."""

    student: Scaled | None = None
    teacher: Scaled | None = None
    slope: Scaled | None = None


class DivergenceOptions(Protocol):
    """The options that a divergence may read."""

    @property
    def teacher_weight(self) -> float: ...
    @property
    def skew_alpha(self) -> float: ...


TermsFn = Callable[[Tensor, tuple[Tensor, ...], float], Terms]


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """One divergence. `terms(log_ratio, scratch, mix)` may overwrite all of its tensors.

    mean_log_ratio: under which side's distribution the mean of the log ratio *is* the value (KL's two directions): then
    one pass over the logits is enough, and `terms` gets the log ratio up to a constant of the row.
    teacher_slope: a = terms' slope + teacher_slope * e^rho. That part is written with p_s e^rho = p_t, so that it never
    overflows, and its mean is teacher_slope itself.
    mix reads the one number of the divergence from the options; num_scratch counts the buffers that `terms` needs.
    """

    name: str
    terms: TermsFn
    mean_log_ratio: Literal["student", "teacher"] | None = None
    teacher_slope: float = 0.0
    mix: Callable[[DivergenceOptions], float] = lambda options: 0.0
    num_scratch: int = 0

    @property
    def num_passes(self) -> int:
        """Passes over the logits before the gradient can be written."""
        return 1 if self.mean_log_ratio else 2


def _forward_kl(ratio_BC: Tensor, scratch: tuple[Tensor, ...], mix: float) -> Terms:
    # KL(t || s) = sum p_t rho; p_s a = -p_t.
    return Terms(teacher=Scaled(ratio_BC, 1.0))


def _reverse_kl(ratio_BC: Tensor, scratch: tuple[Tensor, ...], mix: float) -> Terms:
    # KL(s || t) = -sum p_s rho; a = -rho.
    return Terms(student=Scaled(ratio_BC, -1.0), slope=Scaled(ratio_BC, -1.0))


def _mixture(ratio_BC: Tensor, out_BC: Tensor, teacher_share: float) -> Tensor:
    # m / p_s = (1 - b) + b e^rho. lerp is exactly 1 where the models agree: equal models give 0, not rounding noise.
    return torch.lerp(ratio_BC.new_ones(()), torch.exp(ratio_BC, out=out_BC), teacher_share, out=out_BC)


def _jsd(ratio_BC: Tensor, scratch: tuple[Tensor, ...], mix: float) -> Terms:
    # m = (1 - b) p_s + b p_t; value (1 - b) KL(s || m) + b KL(t || m); a = -(1 - b) log(m / p_s).
    log_mix_BC = _mixture(ratio_BC, scratch[0], mix).log_()
    ratio_BC.sub_(log_mix_BC)
    student = Scaled(log_mix_BC, mix - 1.0)
    return Terms(student=student, teacher=Scaled(ratio_BC, mix), slope=student)


def _skew_forward_kl(ratio_BC: Tensor, scratch: tuple[Tensor, ...], mix: float) -> Terms:
    # m = l p_t + (1 - l) p_s; value KL(t || m) = sum p_t (rho - log(m / p_s)); a = -(1 - l) (e^rho / (m / p_s) - 1).
    # The 1 is a constant: with it the slope is 0, not a sum of roundings, where the models agree.
    slope_BC, mix_BC = scratch[0], _mixture(ratio_BC, scratch[1], mix)
    torch.exp(ratio_BC, out=slope_BC).div_(mix_BC).sub_(1.0)
    ratio_BC.sub_(mix_BC.log_())
    return Terms(teacher=Scaled(ratio_BC, 1.0), slope=Scaled(slope_BC, mix - 1.0))


def _skew_reverse_kl(ratio_BC: Tensor, scratch: tuple[Tensor, ...], mix: float) -> Terms:
    # m = l p_s + (1 - l) p_t; value KL(s || m) = -sum p_s log(m / p_s); a = -log(m / p_s) - l (1 / (m / p_s) - 1).
    mix_BC = _mixture(ratio_BC, scratch[0], 1.0 - mix)
    log_mix_BC = torch.log(mix_BC, out=scratch[1])
    slope_BC = mix_BC.reciprocal_().sub_(1.0).mul_(mix).add_(log_mix_BC)
    return Terms(student=Scaled(log_mix_BC, -1.0), slope=Scaled(slope_BC, -1.0))


def _tvd(ratio_BC: Tensor, scratch: tuple[Tensor, ...], mix: float) -> Terms:
    # sum |p_s - p_t| / 2 = sum sign(-rho) (p_s - p_t) / 2; a = sign(-rho) / 2.
    # torch's own sign of NaN is 0: a broken row would get a gradient of zeros, and train on unnoticed.
    sign_BC = ratio_BC.mul_(torch.finfo(ratio_BC.dtype).max).clamp_(-1.0, 1.0)
    student = Scaled(sign_BC, -0.5)
    return Terms(student=student, teacher=Scaled(sign_BC, 0.5), slope=student)


_ENTRIES = (
    Divergence(name="forward_kl", terms=_forward_kl, mean_log_ratio="teacher", teacher_slope=-1.0),
    Divergence(name="reverse_kl", terms=_reverse_kl, mean_log_ratio="student"),
    Divergence(name="jsd", terms=_jsd, mix=lambda options: options.teacher_weight, num_scratch=1),
    Divergence(name="skew_forward_kl", terms=_skew_forward_kl, mix=lambda options: options.skew_alpha, num_scratch=2),
    Divergence(name="skew_reverse_kl", terms=_skew_reverse_kl, mix=lambda options: options.skew_alpha, num_scratch=2),
    Divergence(name="tvd", terms=_tvd),
)
DIVERGENCES: Mapping[str, Divergence] = MappingProxyType({entry.name: entry for entry in _ENTRIES})
