"""A vocabulary group whose ranks hold different rows: window by window they meet, are handled, and part again.

Each rank has its own rows and a shard of both heads' columns. For a window its states, labels and weights are gathered
from all ranks of the group (padded to the group's longest, and the padding dropped before any product), handled as in a
group whose ranks share their inputs, and the gradient of the states is summed on the way back to the rank that the row
came from. So a rank never holds more than a window of rows that are not its own.

Legend: N rows given, R rows of the window, of all ranks, P the longest rank's part of it, K ranks, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from planner.loss_costs import LossPlan
from student.loss.call import LossCall
from student.loss.collectives import all_gather, reduce_scatter
from student.loss.epilogue import Epilogue
from student.loss.products import Arena
from student.loss.rows import Rows
from student.loss.run import Gradients, LossRun
from student.loss.statistics import RowStatistics


@dataclass(frozen=True)
class _Part:
    """Rows `start` to `stop` of this rank's counted ones, and how many each rank of the group brings to the window."""

    start: int
    stop: int
    counts: tuple[int, ...]

    @property
    def longest(self) -> int:
        return max(self.counts)

    @property
    def is_even(self) -> bool:
        return min(self.counts) == self.longest


@dataclass(frozen=True)
class _Kept:
    """What recompute's forward leaves of a window for its backward."""

    stats: RowStatistics
    seconds: Tensor


class GroupRun:
    """As LossRun, for rows that are spread over the ranks of the call's vocabulary group."""

    def __init__(self, call: LossCall, plan: LossPlan, epilogue: Epilogue) -> None:
        assert call.vocab_group is not None
        assert call.group_rows is not None
        self.call, self.plan, self.epilogue = call, plan, epilogue
        self._group, self._counts = call.vocab_group, call.group_rows
        self._rank = dist.get_rank(self._group)
        self._rows_a_rank = max(plan.window_rows // len(self._counts), 1)
        self._kept: list[_Kept] = []
        self._sums = (self._zero(), self._zero())

    @property
    def num_rows(self) -> int:
        """Counted rows of the whole group: every rank takes part as long as one has any."""
        return sum(self._counts)

    def keep(self, grads: Gradients, scale: float | Tensor) -> None:
        """Statistics and, where wanted, gradients times `scale`, window by window."""
        arena = self._arena()
        self._sums = (self._zero(), self._zero())
        for part in self._parts():
            run = self._run_of(part, arena)
            window = self._gradients_of(part, grads)
            run.keep(window, scale)
            self._add_sums(run)
            self._take_back(part, window, grads)

    def collect(self) -> None:
        """recompute's forward: the statistics of every window."""
        arena = self._arena()
        for part in self._parts():
            run = self._run_of(part, arena)
            run.collect()
            self._add_sums(run)
            self._kept.append(_Kept(run.stats, run.seconds_2R))

    def differentiate(self, grads: Gradients, scale: float | Tensor) -> None:
        """recompute's backward: the windows meet once more."""
        arena = self._arena()
        for part, kept in zip(self._parts(), self._kept, strict=True):
            run = self._run_of(part, arena)
            run.stats, run.seconds_2R = kept.stats, kept.seconds
            window = self._gradients_of(part, grads)
            run.differentiate(window, scale)
            # Of one that holds no real column nothing is written, so nothing is to be added to either.
            window.has_weight |= run.num_columns > 0
            self._take_back(part, window, grads)

    def sums(self) -> tuple[Tensor, Tensor]:
        """Weighted sums of the divergence and of CE over the rows of the whole group: the same on all of its ranks."""
        return self._sums

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=self.epilogue.dtype, device=self.call.student_hidden.device)

    def _arena(self) -> Arena:
        # One for all windows: fresh memory of this size would cost a page fault every few rows.
        return Arena(self.plan.workspace_bytes, self.call.student_hidden.device)

    def _add_sums(self, run: LossRun) -> None:
        kd, ce = run.sums()
        self._sums = (self._sums[0] + kd, self._sums[1] + ce)

    def _parts(self) -> Iterator[_Part]:
        """As many on every rank, whatever it has: each is an exchange that all must take part in."""
        step, own = self._rows_a_rank, self._counts[self._rank]
        for start in range(0, max(self._counts), step):
            counts = tuple(min(max(count - start, 0), step) for count in self._counts)
            yield _Part(min(start, own), min(start + step, own), counts)

    def _run_of(self, part: _Part, arena: Arena) -> LossRun:
        """The window of the whole group, as a call whose inputs are the same on all of its ranks."""
        call, rows = self.call, self.call.rows
        start, stop = part.start, part.stop

        def of_rows(values: Tensor | None) -> Tensor | None:
            return None if values is None else self._gather(rows.pick(values, start, stop), part)

        def of_teacher(values: Tensor | None) -> Tensor | None:
            return None if values is None else self._gather(rows.pick_teacher(values, start, stop), part)

        hidden_RH = of_rows(call.student_hidden)
        assert hidden_RH is not None
        together = replace(
            call,
            student_hidden=hidden_RH,
            teacher_hidden=of_teacher(call.teacher_hidden),
            labels=of_rows(call.labels),
            row_weights=of_rows(call.row_weights),
            teacher_row_scale=of_teacher(call.teacher_row_scale),
            rows=Rows(index=None, count=sum(part.counts), teacher_compact=True),
            group_rows=None,
        )
        return LossRun(together, self.plan, self.epilogue, arena=arena, sums_hidden=False)

    def _gather(self, own: Tensor, part: _Part) -> Tensor:
        """The window's rows of every rank, one rank after the other."""
        shape, longest, num_ranks = own.shape[1:], part.longest, len(part.counts)
        if own.shape[0] < longest:
            padded = own.new_empty(longest, *shape)
            padded[: own.shape[0]] = own
            own = padded
        gathered = own.new_empty(num_ranks * longest, *shape)
        # As bytes: a group of the CPU knows fewer dtypes than states come in.
        all_gather(_bytes_of(gathered), _bytes_of(own.contiguous()), self._group)
        return gathered if part.is_even else torch.cat(_cut(gathered, part))

    def _gradients_of(self, part: _Part, grads: Gradients) -> Gradients:
        """Where the window's gradients go: the states' into memory of its own, the head's into the call's sums."""
        hidden = None
        if grads.hidden is not None:
            hidden = grads.hidden.new_empty(sum(part.counts), grads.hidden.shape[1], dtype=self.epilogue.dtype)
        return Gradients(hidden, grads.weight, grads.bias, has_weight=grads.has_weight)

    def _take_back(self, part: _Part, window: Gradients, grads: Gradients) -> None:
        """Sum the window's dX over the group, and put this rank's rows of it where they belong."""
        grads.has_weight = window.has_weight
        if grads.hidden is None or window.hidden is None:
            return
        sent, longest = window.hidden, part.longest
        if not part.is_even:
            sent = sent.new_zeros(len(part.counts) * longest, sent.shape[1])
            for slot, rows in zip(_cut(sent, part), torch.split(window.hidden, list(part.counts)), strict=True):
                slot.copy_(rows)
        own_PH = sent.new_empty(longest, sent.shape[1])
        reduce_scatter(own_PH, sent, self._group)
        own_RH = own_PH[: part.stop - part.start]
        if self.call.rows.index is None:
            grads.hidden[part.start : part.stop] = own_RH
        else:
            index_R = self.call.rows.index[part.start : part.stop]
            grads.hidden.index_copy_(0, index_R, own_RH.to(grads.hidden.dtype))


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.numel() else tensor


def _cut(padded: Tensor, part: _Part) -> list[Tensor]:
    """Each rank's rows in the padded layout: views."""
    blocks = torch.split(padded, part.longest)
    return [block[:count] for block, count in zip(blocks, part.counts, strict=True)]
