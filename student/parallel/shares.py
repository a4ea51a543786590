"""Where each trained parameter lies: whole on every rank, cut over all of them (FSDP), or over a vocabulary group.

The optimizer only ever sees plain tensors, this rank's part of each parameter, whatever torch wraps them in; a
checkpoint sees DTensors, which know what part of the whole they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from student.parallel.ranks import Ranks

#: Gradients travel in pieces of this size.
BUCKET_BYTES = 64 * 2**20


class Spread(Enum):
    WHOLE = "whole on every rank"
    WORLD = "cut over all ranks"
    VOCAB = "cut over the ranks of a vocabulary group, alike in every group"


@dataclass(frozen=True, eq=False)
class Share:
    """This rank's part of one parameter.

    owner: the parameter as the module holds it. local: the same memory as a plain parameter, for the optimizer.
    shape: of the whole. mesh, placements: how shares make the whole; None for a whole one."""

    owner: nn.Parameter
    local: nn.Parameter
    spread: Spread
    shape: torch.Size
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()

    def take_gradient(self) -> None:
        """Let `local` have the gradient that autograd left at the owner, as one tensor."""
        grad = self.owner.grad
        if self.local is not self.owner:
            self.local.grad = grad.to_local() if isinstance(grad, DTensor) else grad

    def drop_gradient(self) -> None:
        self.owner.grad = None
        self.local.grad = None

    def as_whole(self, local: Tensor) -> Tensor:
        """A tensor of this rank's part's shape as the part of the whole that it is."""
        if self.mesh is None:
            return local
        stride = torch.empty(self.shape, device="meta").stride()
        made: DTensor = DTensor.from_local(
            local.detach(), self.mesh, self.placements, run_check=False, shape=self.shape, stride=stride
        )
        return made

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor that every rank holds."""
        if self.mesh is None:
            return whole
        for dimension, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                size, index = self.mesh.size(dimension), self.mesh.get_local_rank(dimension)
                pieces = whole.chunk(size, dim=placement.dim)
                whole = pieces[index] if index < len(pieces) else whole[:0]
        return whole


class Shares:
    """The shares of all trained parameters, by name."""

    def __init__(self, module: nn.Module, ranks: Ranks, *, vocab: Mapping[nn.Parameter, int] | None = None) -> None:
        """vocab: parameters that are shards of a vocabulary, with the columns of the whole."""
        self._ranks = ranks
        self.by_name = {
            name: _share(parameter, ranks, (vocab or {}).get(parameter))
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }

    def locals(self) -> dict[str, nn.Parameter]:
        """What the optimizer steps, by name."""
        return {name: share.local for name, share in self.by_name.items()}

    def zero_grad(self) -> None:
        for share in self.by_name.values():
            share.drop_gradient()

    def collect_gradients(self) -> None:
        """Sum the gradients over the ranks that hold the same part: once, after the last microbatch of a step.

        FSDP has summed its own by then. Every rank has the same gradients of the same shares afterwards."""
        for share in self.by_name.values():
            share.take_gradient()
        if not self._ranks.are_many:
            return
        self._sum(Spread.WHOLE, None)
        mesh = self._ranks.vocab_mesh
        if mesh is not None and mesh.size(0) > 1:
            self._sum(Spread.VOCAB, mesh.get_group("data"))

    def _sum(self, spread: Spread, group: dist.ProcessGroup | None) -> None:
        shares = [share for share in self.by_name.values() if share.spread is spread]
        if not shares:
            return
        used = torch.tensor([share.local.grad is not None for share in shares], dtype=torch.uint8, device=self._device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
        # What no rank used has no gradient, as in one process; what some used has zeros on the others (experts).
        summed = [share.local for share, flag in zip(shares, used.tolist(), strict=True) if flag]
        for parameter in summed:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in _buckets(parameter.grad for parameter in summed):
            flat = torch.cat([grad.reshape(-1) for grad in bucket])
            dist.all_reduce(flat, group=group)
            for grad, total in zip(bucket, torch.split(flat, [grad.numel() for grad in bucket]), strict=True):
                grad.copy_(total.view_as(grad))

    def clip(self, *, max_norm: float | None) -> float:
        """Scale all gradients down to a joint 2-norm of at most max_norm (None: only measure), over all ranks.

        Returns the norm before clipping, equal on every rank."""
        with_grad = [share for share in self.by_name.values() if share.local.grad is not None]
        of_spread = {spread: [s.local.grad for s in with_grad if s.spread is spread] for spread in Spread}
        norms = {spread: _norm(gradients) for spread, gradients in of_spread.items()}
        norm = norms[Spread.WHOLE]
        if any(share.spread is not Spread.WHOLE for share in self.by_name.values()):
            mesh = self._ranks.vocab_mesh
            num_copies = 1 if mesh is None else mesh.size(0)
            shared = norms[Spread.WORLD].double() ** 2 + norms[Spread.VOCAB].double() ** 2 / num_copies
            shared = shared.to(self._device)
            dist.all_reduce(shared)
            norm = (norm.double().to(self._device) ** 2 + shared).sqrt()
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_([share.local for share in with_grad], max_norm, norm)
        return float(norm)

    @property
    def _device(self) -> torch.device:
        return self._ranks.device


def _share(parameter: nn.Parameter, ranks: Ranks, num_columns: int | None) -> Share:
    if isinstance(parameter, DTensor):
        # The same memory: what the optimizer writes here FSDP gathers.
        detached: Any = parameter.detach()
        local = nn.Parameter(detached.to_local())
        mesh, placements = parameter.device_mesh, tuple(parameter.placements)
        return Share(parameter, local, Spread.WORLD, parameter.shape, mesh, placements)
    if num_columns is not None:
        shape = torch.Size((num_columns, *parameter.shape[1:]))
        return Share(parameter, parameter, Spread.VOCAB, shape, ranks.vocab_mesh, (Replicate(), Shard(0)))
    return Share(parameter, parameter, Spread.WHOLE, parameter.shape)


def _norm(gradients: list[Any]) -> Tensor:
    norm: Tensor = torch.nn.utils.get_total_norm(gradients)
    return norm


def _buckets(gradients: Iterable[Tensor | None]) -> Iterable[list[Tensor]]:
    """The gradients in their order, cut where the dtype changes or a bucket is full."""
    bucket: list[Tensor] = []
    num_bytes = 0
    for gradient in gradients:
        assert gradient is not None
        if bucket and (gradient.dtype != bucket[0].dtype or num_bytes + gradient.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(gradient)
        num_bytes += gradient.nbytes
    if bucket:
        yield bucket
