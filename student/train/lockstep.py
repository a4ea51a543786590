"""A colocated teacher that is cut over all ranks: each of its passes is an exchange, which all ranks make together.

Every rank's ring asks the teacher in its own process, and gets its fills there. But a pass gathers weights from all
ranks, and ranks need different numbers of passes: a long microbatch may take two, one without a row takes none. So a
turn lasts as long as any rank has a pass left; those that have none join with a token of padding.

A rank on which a pass fails still gathers what is left of that pass, and of the others' passes in that turn: they would
else wait in it for ever. Then it says, when the ranks next agree, that its teacher is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from ring.core.errors import DisaggKDError, TeacherLost
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
        self._has_failed = False
        self._num_gathered = 0
        self._is_gathering = False
        blocks = [fully_shard(block, mesh=ranks.mesh, reshard_after_forward=True) for block in blocks_of(split.model)]
        self.body: Any = fully_shard(split.body, mesh=ranks.mesh, reshard_after_forward=True)
        #: Whatever gathers weights, in the order in which a pass does.
        self._parts: list[Any] = [self.body, *blocks]
        for part in self._parts:
            # Around FSDP's own hook, which gathers the part.
            part.register_forward_pre_hook(self._before_gathering, prepend=True)
            part.register_forward_pre_hook(self._after_gathering)
        # Behind a tied embedding stands the head's own reference to the whole weight.
        split.weight_VH = split.weight_VH[:0].clone()
        split.head.weight = nn.Parameter(split.weight_VH, requires_grad=False)
        split.bias_V = None
        split.body = self

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        """As the body's own; the other ranks come through a pass that fails here. Raises RankLost."""
        self._ranks.gather([1])
        self.num_passes += 1
        return self._pass(input_ids)

    def join(self) -> None:
        """This rank has no pass left in this turn: make those of the others with them.

        Raises RankLost. Raises whatever a pass fails with here; the others know nothing of it."""
        failure: Exception | None = None
        while any(row[0] for row in self._ranks.gather([0])):
            try:
                self._pass(torch.zeros(1, 1, dtype=torch.int64, device=self._ranks.device))
            except Exception as error:  # noqa: BLE001 - raised below, once the others have made their passes
                failure = failure or error
        if failure is not None:
            raise failure

    def _pass(self, input_ids: Tensor) -> Any:
        self._num_gathered = 0
        # Gathered weights outlive a pass, so they can't be tensors of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            if self._has_failed:
                return self._gather_the_rest()
            try:
                return self.body(input_ids=input_ids.clone(), use_cache=False)
            except Exception as error:
                if self._is_gathering:
                    # Nobody is left to gather the rest with.
                    raise self._ranks.failure_of(error) from error
                self._has_failed = True
                self._gather_the_rest()
                raise

    def _before_gathering(self, part: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._is_gathering = True

    def _after_gathering(self, part: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._is_gathering = False
        self._num_gathered += 1

    def _gather_the_rest(self) -> None:
        """This rank's side of what a pass has not gathered yet, without computing anything. Raises RankLost."""
        try:
            for part in self._parts[: self._num_gathered]:
                # One that is still whole would not be gathered again in the next pass.
                part.reshard()
            for part in self._parts[self._num_gathered :]:
                part.unshard()
                part.reshard()
        except RuntimeError as error:
            raise self._ranks.failure_of(error) from error


class Lockstep:
    """Makes the teacher's passes for one microbatch of every rank at a time."""

    def __init__(self, body: SharedBody, work: Callable[[], bool]) -> None:
        """work: take what is asked, and compute the oldest request if there is one; whether there was anything."""
        self._body, self._work = body, work

    def turn(self, ring: Ring | None) -> DisaggKDError | None:
        """The passes of the next microbatch of all ranks. ring: where this rank asked for its own; None: it did not.

        Returns what its teacher failed with on this rank: then it is not to be asked any more, and the others have yet
        to hear of it. Raises RankLost."""
        before, failure = self._body.num_passes, None
        try:
            while ring is not None and self._body.num_passes == before:
                if self._work():
                    continue
                if ring.has_failed:
                    # The request never arrives. The others hear of it when they next agree.
                    break
                time.sleep(POLL_S)
        except RankLost:
            raise
        except DisaggKDError as error:
            failure = error
        try:
            self._body.join()
        except RankLost:
            raise
        except Exception as error:  # noqa: BLE001 - returned: the others are to hear of it first
            failure = failure or TeacherLost(f"the teacher in this process failed: {type(error).__name__}: {error}")
        return failure
