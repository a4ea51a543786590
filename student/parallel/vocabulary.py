"""The student's vocabulary cut over the ranks of a vocabulary group: its head, and the embedding where it is tied.

The ranks of a group hold different microbatches. The fused loss makes the head's part of that its own business
(`group_rows`); the embedding's is here: token ids are gathered over the group, every rank looks up those that fall into
its columns, and the sum of what they found goes back to the rank that asked.

Legend: B sequences, S tokens of one, T tokens of the longest rank, K ranks, V columns of this rank, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring.core.errors import ConfigError
from student.load import LoadedStudent, states_of
from student.loss.collectives import all_gather, reduce_scatter

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: Of token ids that only pad a rank's share of an exchange.
NO_TOKEN = -1
#: Relative to the largest: the sharded embedding adds zeros, which changes nothing but the sign of a zero.
PROBE_TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True)
class VocabGroup:
    """The ranks that share one set of heads. `index`: this rank's place in it."""

    group: dist.ProcessGroup
    size: int
    index: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> VocabGroup:
        return cls(group=mesh.get_group("vocab"), size=mesh.size(1), index=mesh.get_local_rank("vocab"))

    def columns(self, num_columns: int) -> tuple[int, int]:
        """First and last + 1 of this rank's columns, as torch cuts a tensor: the last ranks may have fewer, or none."""
        width = -(-num_columns // self.size)
        return min(self.index * width, num_columns), min((self.index + 1) * width, num_columns)

    def counts(self, *own: int) -> list[tuple[int, ...]]:
        """Each of these numbers of all ranks of the group, in its order."""
        gathered = torch.empty(self.size * len(own), dtype=torch.int64)
        all_gather(gathered, torch.tensor(own, dtype=torch.int64), self.group)
        return [tuple(column) for column in gathered.view(self.size, len(own)).T.tolist()]


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """This rank's columns `[start, stop)` of the student's `num_columns`, and the parameters that hold them."""

    group: VocabGroup
    start: int
    stop: int
    num_columns: int
    parameters: tuple[nn.Parameter, ...]


class VocabularyShardedEmbedding(nn.Module):
    """As nn.Embedding of the whole vocabulary, though this rank has only the rows from `start` on."""

    def __init__(self, weight: nn.Parameter, group: VocabGroup, *, start: int, padding_idx: int | None) -> None:
        super().__init__()
        self.weight = weight
        self.num_embeddings, self.embedding_dim = weight.shape
        self._group, self._start, self._padding_idx = group, start, padding_idx

    def forward(self, input_ids: Tensor) -> Tensor:
        (counts,) = self._group.counts(input_ids.numel())
        found_TH: Tensor = _Lookup.apply(  # type: ignore[no-untyped-call]
            self.weight, input_ids.reshape(-1), self._start, max(counts), self._group, self._padding_idx
        )
        return found_TH[: input_ids.numel()].view(*input_ids.shape, self.embedding_dim)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight_VH: Tensor,
        own_ids: Tensor,
        start: int,
        longest: int,
        group: VocabGroup,
        padding_idx: int | None,
    ) -> Tensor:
        padded_T = own_ids.new_full((longest,), NO_TOKEN)
        padded_T[: own_ids.numel()] = own_ids
        ids_KT = own_ids.new_empty(group.size * longest)
        all_gather(ids_KT, padded_T, group.group)
        places = ((ids_KT >= start) & (ids_KT < start + weight_VH.shape[0])).nonzero().squeeze(1)
        columns = ids_KT[places] - start
        found_KTH = weight_VH.new_zeros(len(ids_KT), weight_VH.shape[1])
        found_KTH[places] = weight_VH[columns]
        own_TH = weight_VH.new_empty(longest, weight_VH.shape[1])
        reduce_scatter(own_TH, found_KTH, group.group)
        if padding_idx is not None:
            # Its row gets no gradient, as in nn.Embedding.
            kept = columns != padding_idx - start
            places, columns = places[kept], columns[kept]
        ctx.save_for_backward(places, columns)
        ctx.group, ctx.num_columns = group, weight_VH.shape[0]
        return own_TH

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:
        places, columns = ctx.saved_tensors
        grad_KTH = grad_TH.new_empty(ctx.group.size * grad_TH.shape[0], grad_TH.shape[1])
        all_gather(grad_KTH.view(-1), grad_TH.contiguous().view(-1), ctx.group.group)
        grad_VH = torch.ops.aten.embedding_dense_backward(grad_KTH[places], columns, ctx.num_columns, -1, False)
        return grad_VH, None, None, None, None, None


def shard_vocabulary(student: LoadedStudent, group: VocabGroup) -> VocabShard:
    """Cut the student's head over the group, in place, and its embedding with it where they are one.

    Raises ConfigError: an embedding that does more than look up, and scale."""
    model = student.model
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = embedding.weight is head.weight
    num_columns = head.weight.shape[0]
    start, stop = group.columns(num_columns)
    before = _probe_states(student) if is_tied else None
    # Clones: the whole must not stay in memory behind a view.
    head.weight = nn.Parameter(head.weight.detach()[start:stop].clone())
    head.out_features = stop - start
    parameters = [head.weight]
    if getattr(head, "bias", None) is not None:
        head.bias = nn.Parameter(head.bias.detach()[start:stop].clone())
        parameters.append(head.bias)
    if is_tied:
        model.set_input_embeddings(_sharded(embedding, head.weight, group, start, type(model).__name__))
        _check_probe(student, before)
    return VocabShard(group=group, start=start, stop=stop, num_columns=num_columns, parameters=tuple(parameters))


def _sharded(embedding: Any, weight: nn.Parameter, group: VocabGroup, start: int, name: str) -> nn.Module:
    sharded: nn.Module = VocabularyShardedEmbedding(weight, group, start=start, padding_idx=embedding.padding_idx)
    if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
        raise ConfigError(f"--vocab-parallel: {name} has a tied embedding with options of its own; allowed: none")
    scale = getattr(embedding, "embed_scale", None)
    if scale is None:
        return sharded

    def scaled(module: nn.Module, inputs: tuple[Tensor, ...], found: Tensor) -> Tensor:
        scaled_BSH: Tensor = found * scale.to(found.dtype)
        return scaled_BSH

    # As the family's own embedding does after its lookup.
    sharded.register_forward_hook(scaled)
    return sharded


def _probe_states(student: LoadedStudent) -> Tensor:
    """States of some tokens without dropout. Every rank of the group asks for the same."""
    ids = torch.arange(16, device=student.model.get_output_embeddings().weight.device).view(1, -1)
    student.model.eval()
    with torch.no_grad():
        states = states_of(student.model, ids * 7919 % student.num_ids, None)
    student.model.train()
    return states


def _check_probe(student: LoadedStudent, before: Tensor | None) -> None:
    assert before is not None
    after = _probe_states(student)
    difference = float((after - before).abs().max() / before.abs().max().clamp(min=1e-30))
    if not difference <= PROBE_TOLERANCE:
        raise ConfigError(
            f"--vocab-parallel: {type(student.model).__name__} reads its tied embedding in a way not known here: "
            f"states differ by {difference:.2g} of the largest; allowed: {PROBE_TOLERANCE:g}. Train it without "
            f"--vocab-parallel"
        )
