"""The two exchanges of tensors that torch renamed; under either name, so that every supported version runs quietly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_torch: Any = dist


def all_gather(gathered: Tensor, own: Tensor, group: ProcessGroup | None) -> None:
    """`own` of every rank of the group, one after the other, into `gathered`."""
    name = "all_gather_single" if hasattr(_torch, "all_gather_single") else "all_gather_into_tensor"
    getattr(_torch, name)(gathered, own, group=group)


def reduce_scatter(own: Tensor, parts: Tensor, group: ProcessGroup | None) -> None:
    """Of `parts`, one for each rank of the group, the sum over the ranks of this rank's, into `own`."""
    name = "reduce_scatter_single" if hasattr(_torch, "reduce_scatter_single") else "reduce_scatter_tensor"
    getattr(_torch, name)(own, parts, group=group)
