"""From planned sample ids to the tensors of one microbatch, and to the three parts of the request that asks for it.

Both are built from the same samples in one place, because their rows must agree: the i-th state that the teacher sends
belongs to the i-th entry of `row_index`.

Legend: B sequences, S tokens of the longest sequence, R rows that count, T tokens without padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from planner.input_hash import input_hash
from student.data.dataset import TokenDataset
from student.data.order import PlannedMicroBatch

IGNORE_INDEX = -100


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """One microbatch in host memory; nothing in it may be written to.

    Model's side: `input_ids`, `position_ids` [B, S] int64, padded on the right, positions counted anew in each
    document; `labels` [B * S] int64, already shifted: the token after row i in the same document where row i counts,
    else IGNORE_INDEX; `row_index` [R] int64: the rows that count, as indices into B * S.
    Teacher's side: `token_ids` [T] uint32, documents one after the other; `doc_lengths` their tokens; `row_ranges`
    half-open ranges into T, ascending: the same R rows in the same order; `input_hash` over these three.
    A microbatch without data (`seq` None) has one padding token, no document and no row: it still goes through the
    model, so that every rank takes part in the step.
    """

    seq: int | None
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    row_index: torch.Tensor
    token_ids: npt.NDArray[np.uint32]
    doc_lengths: tuple[int, ...]
    row_ranges: tuple[tuple[int, int], ...]
    input_hash: bytes
    sample_ids: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return int(self.row_index.numel())

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def inputs(self, device: str | torch.device) -> dict[str, torch.Tensor]:
        """The model's side on a device, by the names that DistilledStudent takes."""
        tensors = {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "labels": self.labels,
            "row_index": self.row_index,
        }
        return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}

    def token_bytes(self) -> bytes:
        """The token ids as they travel: little-endian uint32."""
        return self.token_ids.astype("<u4").tobytes()


def build_microbatch(dataset: TokenDataset, planned: PlannedMicroBatch, *, pad_id: int = 0) -> MicroBatch:
    """The tensors of a planned microbatch. `pad_id`: any id that the model can embed; padding never counts."""
    lines = [[dataset.sample(sample_id) for sample_id in sequence] for sequence in planned.sequences]
    width = max((sum(len(sample.token_ids) for sample in line) for line in lines), default=1)
    shape = (max(len(lines), 1), width)
    ids_BS = np.full(shape, pad_id, dtype=np.int64)
    positions_BS = np.broadcast_to(np.arange(width, dtype=np.int64), shape).copy()
    labels_BS = np.full(shape, IGNORE_INDEX, dtype=np.int64)
    row_index: list[npt.NDArray[np.int64]] = []
    row_ranges: list[tuple[int, int]] = []
    num_tokens = 0
    for b, line in enumerate(lines):
        column = 0
        for sample in line:
            length = len(sample.token_ids)
            ids_BS[b, column : column + length] = sample.token_ids
            # To the end of the line: padding goes on counting from the last document and so stays a part of it.
            positions_BS[b, column:] = np.arange(width - column)
            for start, end in sample.row_ranges:
                labels_BS[b, column + start : column + end] = sample.token_ids[start + 1 : end + 1]
                row_index.append(np.arange(start, end, dtype=np.int64) + (b * width + column))
                row_ranges.append((num_tokens + start, num_tokens + end))
            column += length
            num_tokens += length
    samples = [sample for line in lines for sample in line]
    token_ids = np.concatenate([np.empty(0, dtype=np.uint32), *(sample.token_ids for sample in samples)])
    doc_lengths = tuple(len(sample.token_ids) for sample in samples)
    return MicroBatch(
        seq=planned.seq,
        input_ids=torch.from_numpy(ids_BS),
        position_ids=torch.from_numpy(positions_BS),
        labels=torch.from_numpy(labels_BS.reshape(-1)),
        row_index=torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *row_index])),
        token_ids=token_ids,
        doc_lengths=doc_lengths,
        row_ranges=tuple(row_ranges),
        input_hash=input_hash(token_ids.astype("<u4").tobytes(), doc_lengths, row_ranges),
        sample_ids=planned.sample_ids,
    )


def sequential_microbatches(
    dataset: TokenDataset,
    *,
    batch_size: int,
    pad_id: int = 0,
    max_samples: int | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[MicroBatch]:
    """The first `max_samples` samples in order, one to a sequence: for evaluation, which has no seq and no plan.

    Of several ranks each gets its turn's microbatches, and as many as every other: the last may be without data.
    """
    num_samples = dataset.num_samples if max_samples is None else min(max_samples, dataset.num_samples)
    for turn in range(0, num_samples, batch_size * world_size):
        begin = min(turn + rank * batch_size, num_samples)
        ids: Sequence[int] = range(begin, min(begin + batch_size, num_samples))
        yield build_microbatch(
            dataset, PlannedMicroBatch(seq=None, sequences=tuple((sample_id,) for sample_id in ids)), pad_id=pad_id
        )
