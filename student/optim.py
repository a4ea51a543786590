"""AdamW, and the learning rate as a function of the step.

Nothing here counts steps: the trainer says which update it makes, so that a resumed run can't be off by one. The
optimizer's whole state is a flat map of tensors by parameter name, which a checkpoint stores without pickling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from ring.core.errors import ConfigError

ScheduleKind = Literal["cosine", "linear", "constant"]
SCHEDULE_KINDS: tuple[ScheduleKind, ...] = ("cosine", "linear", "constant")
# AdamW's tensors of each parameter; `step` is its own count of updates, which the bias correction needs.
_STATE_NAMES = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate over the steps 1 to `num_steps`: linear warm-up, then a decay to `min_lr_frac` of the peak.

    `constant` stays at the peak after the warm-up. The decay ends just behind the last step, so that even with
    `min_lr_frac` 0 every step learns something.

    Raises ConfigError: an unknown kind, a negative or not finite rate, a warm-up longer than the run.
    """

    peak_lr: float
    num_steps: int
    num_warmup_steps: int = 0
    kind: ScheduleKind = "cosine"
    min_lr_frac: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULE_KINDS:
            raise ConfigError(f"schedule {self.kind!r}; allowed: {', '.join(SCHEDULE_KINDS)}")
        if not (math.isfinite(self.peak_lr) and self.peak_lr > 0):
            raise ConfigError(f"learning rate must be finite and > 0, got {self.peak_lr}")
        if not 0 <= self.min_lr_frac <= 1:
            raise ConfigError(f"min_lr_frac must be within 0 and 1, got {self.min_lr_frac}")
        if not 0 <= self.num_warmup_steps <= self.num_steps:
            raise ConfigError(
                f"warm-up of {self.num_warmup_steps} steps; allowed: 0 to {self.num_steps}, the steps of the run"
            )

    def lr_at(self, step: int) -> float:
        """The rate of the step-th update, counted from 1; behind the last step it stays at the end of the decay."""
        if step <= self.num_warmup_steps:
            return self.peak_lr * step / self.num_warmup_steps
        if self.kind == "constant":
            return self.peak_lr
        passed_frac = min((step - 1 - self.num_warmup_steps) / (self.num_steps - self.num_warmup_steps or 1), 1.0)
        left = 1 - passed_frac if self.kind == "linear" else 0.5 * (1 + math.cos(math.pi * passed_frac))
        return self.peak_lr * (self.min_lr_frac + (1 - self.min_lr_frac) * left)


@dataclass(frozen=True, kw_only=True)
class AdamWSettings:
    """Raises ConfigError: a value out of range."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        for name, value in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0 <= value < 1:
                raise ConfigError(f"{name} must be within 0 and 1 (excluded), got {value}")
        for name, value in (("eps", self.eps), ("weight_decay", self.weight_decay)):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} must be finite and >= 0, got {value}")


class StudentOptimizer:
    """AdamW over a module's trainable parameters; vectors (norms, biases) are not decayed.

    Parameters are known by their names in `module`, which a checkpoint's tensors carry: keep them over a resume. Where
    they are spread over ranks, `module` is instead a map of this rank's parts, by the same names.
    """

    def __init__(self, module: nn.Module | Mapping[str, nn.Parameter], settings: AdamWSettings | None = None) -> None:
        settings = settings or AdamWSettings()
        named = module.named_parameters() if isinstance(module, nn.Module) else module.items()
        self._parameters = {name: p for name, p in named if p.requires_grad}
        decayed = [p for p in self._parameters.values() if p.ndim >= 2]
        kept = [p for p in self._parameters.values() if p.ndim < 2]
        groups = [
            {"params": decayed, "weight_decay": settings.weight_decay},
            {"params": kept, "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
        )

    def step(self, *, lr: float) -> None:
        """One update of every parameter that has a gradient."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()

    def zero_grad(self) -> None:
        self._adamw.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """The whole state, by `<what>.<parameter name>`: the live tensors, not copies."""
        return {
            f"{what}.{name}": self._adamw.state[parameter][what]
            for name, parameter in self._parameters.items()
            if parameter in self._adamw.state
            for what in _STATE_NAMES
        }

    def load_state_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes over a state that `state_tensors` gave; a parameter without an update so far has none.

        Raises ConfigError: unknown or missing names, or other shapes or dtypes; nothing is changed then.
        """
        states: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in tensors.items():
            what, _, name = key.partition(".")
            if what not in _STATE_NAMES or name not in self._parameters:
                raise ConfigError(f"optimizer state {key!r} belongs to no parameter of this student")
            like = torch.tensor(0.0) if what == "step" else self._parameters[name]
            if (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
                raise ConfigError(
                    f"optimizer state {key!r} is {tensor.dtype} of shape {tuple(tensor.shape)}; allowed: {like.dtype} "
                    f"of shape {tuple(like.shape)}"
                )
            states.setdefault(name, {})[what] = tensor
        for name, state in states.items():
            if len(state) != len(_STATE_NAMES):
                missing = ", ".join(what for what in _STATE_NAMES if what not in state)
                raise ConfigError(f"optimizer state of {name!r} lacks {missing}")
        self._adamw.state.clear()
        for name, state in states.items():
            parameter = self._parameters[name]
            # AdamW keeps its count on the CPU, the rest beside the parameter.
            self._adamw.state[parameter] = {
                what: tensor.clone() if what == "step" else tensor.to(parameter.device, copy=True)
                for what, tensor in state.items()
            }
