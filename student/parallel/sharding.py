"""FSDP2 around student and loss: every rank keeps a part of each parameter, and gathers the whole where it is used.

Student and loss are one module, so that the head is whole where the loss reads it. Blocks of the body are groups of
their own: only one or two are whole at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ring.core.errors import ConfigError
from student.load import body_of
from student.parallel.ranks import Ranks


def shard_fully(
    module: nn.Module,
    model: Any,
    ranks: Ranks,
    *,
    mixed_precision: bool,
    reshard_after_forward: bool,
    kept: Iterable[nn.Parameter] = (),
) -> None:
    """Cut the parameters of `module` over all ranks, in place; `model` is the causal LM in it.

    mixed_precision: gather weights as bf16, sum gradients in float32. Inputs are never cast: one is a ring slot, read
    in place. reshard_after_forward: blocks let go of their whole weights between forward and backward, and gather them
    again. kept: parameters that stay as they are.

    Raises ConfigError: the model has no blocks that could be gathered one at a time, or torch is too old."""
    assert ranks.mesh is not None
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise ConfigError(f"--fsdp: torch {torch.__version__} is too old; allowed: 2.13 and later")
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if mixed_precision else None,
        reduce_dtype=torch.float32 if mixed_precision else None,
        cast_forward_inputs=False,
    )
    ignored = set(kept)
    for block in blocks_of(model):
        fully_shard(
            block,
            mesh=ranks.mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=policy,
            ignored_params=ignored,
        )
    # The root (embedding, final norm, head) is needed again as soon as backward begins.
    fully_shard(module, mesh=ranks.mesh, reshard_after_forward=False, mp_policy=policy, ignored_params=ignored)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # Losses are divided by the rows of the whole step already: gradients are sums, not means.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    # A rank whose tokens reached no part of an expert gives zeros for it: the others wait for its share.
    module.set_reduce_scatter_unused_params(True)  # type: ignore[operator]


def blocks_of(model: Any) -> list[nn.Module]:
    """The layers of a causal LM's body, in their order. Raises ConfigError: it has none."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    body = body_of(model)
    assert body is not None
    blocks = [part for part in body.modules() if type(part).__name__ in names]
    if not blocks:
        lists = [part for part in body.children() if isinstance(part, nn.ModuleList)]
        blocks = [block for entry in lists for block in entry]
    if not blocks:
        raise ConfigError(f"--fsdp: {type(model).__name__} has no list of layers; allowed: a causal LM with one")
    return blocks
