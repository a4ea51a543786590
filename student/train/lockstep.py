"""A colocated teacher that is cut over all ranks: each of its passes is an exchange, which all ranks make together.

Every rank's ring asks the teacher in its own process, and gets its fills there. But a pass gathers weights from all
ranks, and ranks need different numbers of passes: a long microbatch may take two, one without a row takes none. So a
turn lasts as long as any rank has a pass left; those that have none join with a token of padding.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from ring.core.errors import DisaggKDError
from ring.prefetch import Ring
from student.parallel.ranks import RankLost, Ranks
from student.parallel.sharding import blocks_of
from teacher.body import SplitModel

#: While the request of a turn is on its way from the ring to the teacher.
POLL_S = 0.0005


class SharedBody(nn.Module):
    """The teacher's body, cut over the ranks. A forward is a pass of all of them."""

    def __init__(self, split: SplitModel, ranks: Ranks) -> None:
        """Takes the place of `split.body`, whose head is let go of: it must have been fetched."""
        super().__init__()
        self.num_passes = 0
        self._ranks = ranks
        for block in blocks_of(split.model):
            fully_shard(block, mesh=ranks.mesh, reshard_after_forward=True)
        self.body: Any = fully_shard(split.body, mesh=ranks.mesh, reshard_after_forward=True)
        # Behind a tied embedding stands the head's own reference to the whole weight.
        split.weight_VH = split.weight_VH[:0].clone()
        split.head.weight = nn.Parameter(split.weight_VH, requires_grad=False)
        split.bias_V = None
        split.body = self

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        """As the body's own. Raises RankLost."""
        self._ranks.gather([1])
        self.num_passes += 1
        return self._pass(input_ids)

    def join(self) -> None:
        """This rank has no pass left in this turn: make those of the others with them. Raises RankLost."""
        while any(row[0] for row in self._ranks.gather([0])):
            self._pass(torch.zeros(1, 1, dtype=torch.int64, device=self._ranks.device))

    def _pass(self, input_ids: Tensor) -> Any:
        # Gathered weights outlive a pass, so they can't be tensors of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            return self.body(input_ids=input_ids.clone(), use_cache=False)


class Lockstep:
    """Makes the teacher's passes for one microbatch of every rank at a time."""

    def __init__(self, body: SharedBody, work: Callable[[], bool]) -> None:
        """work: take what is asked, and compute the oldest request if there is one; whether there was anything."""
        self._body, self._work = body, work

    def turn(self, ring: Ring | None) -> None:
        """The passes of the next microbatch of all ranks. ring: where this rank asked for its own; None: it did not.

        Raises RankLost: also where the teacher failed on this rank, since the others can't hear of it any more."""
        before = self._body.num_passes
        try:
            while ring is not None and self._body.num_passes == before:
                if self._work():
                    continue
                if ring.has_failed:
                    # The request never arrives. The others hear of it when they next agree.
                    break
                time.sleep(POLL_S)
            self._body.join()
        except DisaggKDError as error:
            raise error if isinstance(error, RankLost) else RankLost(str(error)) from error
