"""The order in which samples are trained on: a pure function of the seed and of one number, the position.

Position p is the p-th sample of an endless, epoch-wise shuffled order. Samples form sequences (lines of the model's
input: one sample each, or several packed), `batch_size` sequences form a microbatch, and
`batch_size * grad_accum * world_size` sequences form a step. Neither crosses the end of an epoch: there the last
microbatch and the last step are simply smaller. Nothing here holds state that a checkpoint would have to store; a
position says all, and every rank knows the whole step, hence its divisor, before any forward pass.

Shuffling uses its own few lines of integer mixing instead of a library's generator: a checkpoint must find the same
order again under any later version of any library.

Legend: N samples of an epoch, Q sequences of an epoch.
"""

from __future__ import annotations

import bisect
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ring.core.errors import ConfigError

Int64Array = npt.NDArray[np.int64]

_MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
# The epoch that steps are taken from and the next one: prefetch looks across the border, never further.
_KEPT_LAYOUTS = 2


def _mix_64(value: int) -> int:
    """The finaliser of splitmix64: a bijection of 64-bit integers that flips about half of the bits for any change."""
    value &= _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def epoch_order(num_samples: int, *, seed: int | None, epoch: int) -> Int64Array:
    """The sample ids of one epoch in training order, [N]: a permutation given by seed and epoch; seed None = in order.

    Each id gets a 64-bit key; the ids are sorted by it.
    """
    if seed is None:
        return np.arange(num_samples, dtype=np.int64)
    start = _mix_64(_mix_64(seed) + _mix_64(epoch * _GOLDEN + 1))
    keys_N = np.arange(num_samples, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(start)
    keys_N = (keys_N ^ (keys_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys_N = (keys_N ^ (keys_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    keys_N ^= keys_N >> np.uint64(31)
    # Stable: equal keys, however unlikely, must not depend on the sorting algorithm.
    return np.argsort(keys_N, kind="stable").astype(np.int64)


def pack_in_order(lengths_N: Int64Array, sequence_tokens: int) -> Int64Array:
    """Where sequences begin when samples are packed in order, [Q + 1]; the last entry is N.

    Each sequence takes samples as long as they fit. It keeps neighbours together, so a sequence, a microbatch and a
    step each cover one stretch of positions, and a position stays the one number that a checkpoint needs. Every
    sample must fit by itself.
    """
    ends_N = np.cumsum(lengths_N).tolist()
    starts = [0]
    num_samples, begin, used = len(ends_N), 0, 0
    while begin < num_samples:
        begin = bisect.bisect_right(ends_N, used + sequence_tokens, lo=begin)
        used = ends_N[begin - 1]
        starts.append(begin)
    return np.array(starts, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class PlannedMicroBatch:
    """Which samples a rank's microbatch holds: `sequences[i]` are the sample ids of the i-th line of its input.

    `seq` is None, and there are no sequences, where the rank has no data left in a step that other ranks still take.
    """

    seq: int | None
    sequences: tuple[tuple[int, ...], ...]

    @property
    def sample_ids(self) -> tuple[int, ...]:
        return tuple(sample for sequence in self.sequences for sample in sequence)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedStep:
    """One optimizer step. `step` counts from 1 over the whole run; `epoch` from 0.

    `sample_ids`: samples of all ranks, in order. `num_rows`: rows that count in them: the divisor on every rank.
    `next_position`: what a checkpoint written after this step stores. `microbatches`: this rank's; as many on every
    rank.
    """

    step: int
    epoch: int
    position: int
    next_position: int
    num_rows: int
    sample_ids: Int64Array
    microbatches: tuple[PlannedMicroBatch, ...]


@dataclass(frozen=True)
class _EpochLayout:
    """order: sample ids in training order, [N]. starts: first place of each sequence, and N at the end, [Q + 1]."""

    order: Int64Array
    starts: Int64Array


class MicroBatchPlan:
    """Every step of a run: iterate `steps(position)` from the start or from a checkpoint's position.

    `row_counts`, `lengths`: counted rows (all >= 1) and tokens of each sample, [N]: a TokenDataset's. With
    `packed_tokens` given, samples are packed into sequences of at most that many tokens. Exactly one of `epochs` and
    `max_steps` says when the run ends. `seed=None` keeps the samples in their order.

    Raises ConfigError: a count below 1, both or neither of epochs and max_steps, a rank outside of the world, a
    sample longer than `packed_tokens`.
    """

    def __init__(
        self,
        *,
        row_counts: Int64Array,
        lengths: Int64Array,
        batch_size: int,
        grad_accum: int = 1,
        epochs: int | None = None,
        max_steps: int | None = None,
        seed: int | None = 0,
        rank: int = 0,
        world_size: int = 1,
        packed_tokens: int | None = None,
    ) -> None:
        counts = {"batch_size": batch_size, "grad_accum": grad_accum, "world_size": world_size}
        for name, count in {**counts, "samples": len(row_counts)}.items():
            if count < 1:
                raise ConfigError(f"{name} must be >= 1, got {count}")
        if (epochs is None) == (max_steps is None):
            raise ConfigError(f"give one of epochs and max_steps, got epochs={epochs} and max_steps={max_steps}")
        if (epochs if epochs is not None else max_steps or 0) < 1:
            raise ConfigError(f"epochs or max_steps must be >= 1, got {epochs if max_steps is None else max_steps}")
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} is outside of the world; allowed: 0 to {world_size - 1}")
        if packed_tokens is not None and int(lengths.max()) > packed_tokens:
            raise ConfigError(f"a sample of {int(lengths.max())} tokens does not fit a sequence of {packed_tokens}")
        self.num_samples = len(row_counts)
        self.batch_size = batch_size
        self.grad_accum = grad_accum
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self._row_counts = row_counts
        self._lengths = lengths
        self._packed_tokens = packed_tokens
        self._epochs = epochs
        self._max_steps = max_steps
        self._layouts: OrderedDict[int, _EpochLayout] = OrderedDict()
        # Steps and this rank's microbatches in all epochs before the i-th.
        self._steps_before = [0]
        self._seqs_before = [0]

    @property
    def sequences_per_step(self) -> int:
        return self.batch_size * self.grad_accum * self.world_size

    @property
    def num_steps(self) -> int:
        """Steps of the whole run, from position 0."""
        if self._max_steps is not None:
            return self._max_steps
        assert self._epochs is not None  # the constructor requires one of the two
        return self._count_before(self._epochs)[0]

    def step_at(self, position: int) -> int:
        """How many steps end at or before this position.

        Raises ConfigError: the position is not where a step ends.
        """
        epoch, in_epoch = self._step_in_epoch(position)
        return self._count_before(epoch)[0] + in_epoch

    def position_after(self, step: int) -> int:
        """Where the step-th step ends: the position of the sample after it."""
        if self._packed_tokens is None:
            epoch = step // self._count_in_epoch(self.num_samples)[0]
        else:
            epoch = 0
            while self._count_before(epoch + 1)[0] <= step:
                epoch += 1
        in_epoch = step - self._count_before(epoch)[0]
        if not in_epoch:
            return epoch * self.num_samples
        starts_Q = self._layout(epoch).starts
        return epoch * self.num_samples + int(starts_Q[min(in_epoch * self.sequences_per_step, len(starts_Q) - 1)])

    @property
    def end_position(self) -> int:
        """Where the run ends: so many samples it trains on, each pass counted."""
        return self.position_after(self.num_steps)

    def seq_at(self, position: int) -> int:
        """The seq of this rank's first microbatch at or after the position.

        Raises ConfigError: the position is not where a step ends.
        """
        epoch, in_epoch = self._step_in_epoch(position)
        return self._count_before(epoch)[1] + in_epoch * self.grad_accum

    def steps(self, position: int = 0) -> Iterator[PlannedStep]:
        """The steps from a position to the end of the run; none if the run ends there.

        Raises ConfigError, before the first step: the position is not where a step ends.
        """
        # Not a generator itself: a wrong position is refused by the call, not by the first use.
        return self._iterate(position, self.step_at(position), self.seq_at(position))

    def max_microbatch_rows(self) -> int:
        """No microbatch of the run has more counted rows: what a slot must hold."""
        if self._packed_tokens is not None:
            return self.batch_size * (self._packed_tokens - 1)
        return self._sum_of_largest(self._row_counts)

    def max_microbatch_tokens(self) -> int:
        """No microbatch of the run has more tokens, padding aside: what one request asks the teacher to read."""
        if self._packed_tokens is not None:
            return self.batch_size * self._packed_tokens
        return self._sum_of_largest(self._lengths)

    def _sum_of_largest(self, counts_N: Int64Array) -> int:
        return int(np.sort(counts_N)[-self.batch_size :].sum())

    def _iterate(self, position: int, step: int, seq: int) -> Iterator[PlannedStep]:
        num_steps = self.num_steps
        while step < num_steps:
            step += 1
            planned, seq = self._plan_step(step, position, seq)
            yield planned
            position = planned.next_position

    def _plan_step(self, step: int, position: int, seq: int) -> tuple[PlannedStep, int]:
        epoch, place = divmod(position, self.num_samples)
        layout = self._layout(epoch)
        first = int(np.searchsorted(layout.starts, place))
        last = min(first + self.sequences_per_step, len(layout.starts) - 1)
        num_microbatches = -(-(last - first) // self.batch_size)
        microbatches = []
        for turn in range(-(-num_microbatches // self.world_size)):
            begin = first + (turn * self.world_size + self.rank) * self.batch_size
            bounds = layout.starts[begin : min(begin + self.batch_size, last) + 1].tolist() if begin < last else []
            sequences = tuple(tuple(layout.order[start:end].tolist()) for start, end in itertools.pairwise(bounds))
            microbatches.append(PlannedMicroBatch(seq=seq if sequences else None, sequences=sequences))
            seq += bool(sequences)
        end_place = int(layout.starts[last])
        sample_ids = layout.order[place:end_place]
        planned = PlannedStep(
            step=step,
            epoch=epoch,
            position=position,
            next_position=epoch * self.num_samples + end_place,
            num_rows=int(self._row_counts[sample_ids].sum()),
            sample_ids=sample_ids,
            microbatches=tuple(microbatches),
        )
        return planned, seq

    def _step_in_epoch(self, position: int) -> tuple[int, int]:
        """The epoch of a position, and how many of its steps end at or before it."""
        if position < 0:
            raise ConfigError(f"a position must be >= 0, got {position}")
        epoch, place = divmod(position, self.num_samples)
        starts_Q = self._layout(epoch).starts
        sequence = int(np.searchsorted(starts_Q, place))
        in_epoch, rest = divmod(sequence, self.sequences_per_step)
        if starts_Q[sequence] != place or rest:
            step_start = (sequence - 1) // self.sequences_per_step * self.sequences_per_step
            before = epoch * self.num_samples + int(starts_Q[step_start])
            raise ConfigError(
                f"no step ends at position {position} with batch_size {self.batch_size} x grad_accum "
                f"{self.grad_accum} x world size {self.world_size}; the one before it ends at {before}: resume with "
                "the same data and packing, and the same product of the three"
            )
        return epoch, in_epoch

    def _count_before(self, epoch: int) -> tuple[int, int]:
        """Steps, and microbatches of this rank, in the epochs 0 to `epoch - 1`."""
        if self._packed_tokens is None:
            steps, seqs = self._count_in_epoch(self.num_samples)
            return epoch * steps, epoch * seqs
        while len(self._steps_before) <= epoch:
            layout = self._layout(len(self._steps_before) - 1)
            steps, seqs = self._count_in_epoch(len(layout.starts) - 1)
            self._steps_before.append(self._steps_before[-1] + steps)
            self._seqs_before.append(self._seqs_before[-1] + seqs)
        return self._steps_before[epoch], self._seqs_before[epoch]

    def _count_in_epoch(self, num_sequences: int) -> tuple[int, int]:
        whole_steps, rest = divmod(num_sequences, self.sequences_per_step)
        rest_microbatches = -(-rest // self.batch_size)
        own_rest = max(0, -(-(rest_microbatches - self.rank) // self.world_size))
        return whole_steps + bool(rest), whole_steps * self.grad_accum + own_rest

    def _layout(self, epoch: int) -> _EpochLayout:
        if epoch in self._layouts:
            self._layouts.move_to_end(epoch)
            return self._layouts[epoch]
        order_N = epoch_order(self.num_samples, seed=self.seed, epoch=epoch)
        if self._packed_tokens is None:
            starts_Q = np.arange(self.num_samples + 1, dtype=np.int64)
        else:
            starts_Q = pack_in_order(self._lengths[order_N], self._packed_tokens)
        self._layouts[epoch] = _EpochLayout(order_N, starts_Q)
        while len(self._layouts) > _KEPT_LAYOUTS:
            self._layouts.popitem(last=False)
        return self._layouts[epoch]
