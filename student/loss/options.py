"""What a user may choose about the loss, checked whole when it is made; and what a call returns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from student.loss.divergences import DIVERGENCES

PRECISIONS = ("fp32", "fast")


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """The choices of a distillation loss; see KDLoss for what each means.

    Raises ValueError: a value outside its range, with the name, what was given and what is allowed.
    """

    divergence: str = "forward_kl"
    temperature: float = 1.0
    scale_t2: bool = True
    kd_weight: float = 0.5
    ce_weight: float = 0.5
    teacher_weight: float = 0.5
    skew_alpha: float = 0.1
    precision: str = "fp32"
    workspace_bytes: int | None = None
    ignore_index: int = -100

    def __post_init__(self) -> None:
        if self.divergence not in DIVERGENCES:
            raise ValueError(f"divergence: got {self.divergence!r}; allowed: {', '.join(DIVERGENCES)}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision: got {self.precision!r}; allowed: {', '.join(PRECISIONS)}")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"temperature: got {self.temperature}; allowed: a finite number above 0")
        for name in ("kd_weight", "ce_weight"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}: got {value}; allowed: a finite number, 0 or more")
        if self.kd_weight == 0 and self.ce_weight == 0:
            raise ValueError("kd_weight and ce_weight: got 0 and 0; allowed: at least one above 0")
        if not 0 < self.teacher_weight < 1:
            raise ValueError(
                f"teacher_weight: got {self.teacher_weight}; allowed: between 0 and 1, both excluded. At either end "
                f"the Jensen-Shannon divergence is 0 for any pair of models: use forward_kl or reverse_kl there"
            )
        if not 0 < self.skew_alpha < 1:
            raise ValueError(
                f"skew_alpha: got {self.skew_alpha}; allowed: between 0 and 1, both excluded. At 0 it is the plain "
                f"forward_kl or reverse_kl, at 1 the divergence is 0 for any pair of models"
            )
        if self.workspace_bytes is not None and self.workspace_bytes < 1:
            raise ValueError(f"workspace_bytes: got {self.workspace_bytes}; allowed: None or 1 and more")

    @property
    def kd_scale(self) -> float:
        """The factor of the KD term beside its weight: T^2, or 1 with scale_t2 off."""
        return self.temperature**2 if self.scale_t2 else 1.0


class KDOutput(NamedTuple):
    """What a call of the loss returns: loss = kd_weight * kd + ce_weight * ce.

    loss is differentiable; kd and ce are detached scalars, divided by the same divisor as the loss (so the parts of
    several calls with one global `num_rows` add up); kd holds the T^2 factor where it applies. rows is the call's own
    count.
    """

    loss: Tensor
    kd: Tensor
    ce: Tensor
    rows: int
