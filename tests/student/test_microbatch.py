"""Microbatches: what the model gets, what the teacher is asked for, and that both name the same rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch

from student.data import (
    IGNORE_INDEX,
    MicroBatch,
    MicroBatchPlan,
    PlannedMicroBatch,
    TokenDataset,
    build_microbatch,
    sequential_microbatches,
)

MakeDataset = Callable[..., TokenDataset]
IGN = IGNORE_INDEX


def batch_of(dataset: TokenDataset, *sequences: tuple[int, ...], pad_id: int = 0) -> MicroBatch:
    return build_microbatch(dataset, PlannedMicroBatch(seq=0, sequences=sequences), pad_id=pad_id)


def teacher_rows(batch: MicroBatch) -> list[int]:
    """The tokens at the rows that the teacher sends, in its order."""
    return [int(batch.token_ids[row]) for start, end in batch.row_ranges for row in range(start, end)]


def student_rows(batch: MicroBatch) -> list[int]:
    """The tokens at the rows that the student counts, in its order."""
    return [int(token) for token in batch.input_ids.flatten()[batch.row_index]]


def test_prompt_of_three_and_completion_of_two_count_exactly_rows_two_and_three(ids_dataset: MakeDataset) -> None:
    dataset = ids_dataset({"input_ids": [11, 12, 13, 14, 15], "loss_mask": [0, 0, 0, 1, 1]})
    batch = batch_of(dataset, (0,))
    assert batch.row_index.tolist() == [2, 3]
    assert batch.labels.tolist() == [IGN, IGN, 14, 15, IGN]
    assert batch.row_ranges == ((2, 4),)
    assert batch.num_rows == 2


@pytest.mark.case(48)
def test_packed_documents_of_three_and_two_tokens_have_three_targets_and_none_across(ids_dataset: MakeDataset) -> None:
    batch = batch_of(ids_dataset([11, 12, 13], [21, 22]), (0, 1))
    assert batch.input_ids.tolist() == [[11, 12, 13, 21, 22]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.labels.tolist() == [12, 13, IGN, 22, IGN]
    assert batch.row_index.tolist() == [0, 1, 3]
    assert batch.doc_lengths == (3, 2)
    assert batch.row_ranges == ((0, 2), (3, 4))


def test_padding_is_on_the_right_travels_never_and_counts_never(ids_dataset: MakeDataset) -> None:
    batch = batch_of(ids_dataset([11, 12, 13, 14], [21, 22]), (0,), (1,), pad_id=99)
    assert batch.input_ids.tolist() == [[11, 12, 13, 14], [21, 22, 99, 99]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3]] * 2
    assert batch.labels.tolist() == [12, 13, 14, IGN, 22, IGN, IGN, IGN]
    assert batch.row_index.tolist() == [0, 1, 2, 4]
    assert batch.token_ids.tolist() == [11, 12, 13, 14, 21, 22]
    assert batch.token_ids.dtype == np.uint32
    assert batch.row_ranges == ((0, 3), (4, 5))


def test_labels_are_the_tokens_after_the_rows_that_count(ids_dataset: MakeDataset) -> None:
    dataset = ids_dataset(
        {"input_ids": [1, 2, 3, 4, 5, 6], "loss_mask": [0, 1, 0, 1, 1, 0]}, [7, 8, 9], {"input_ids": [10, 11, 12, 13]}
    )
    batch = batch_of(dataset, (2, 0), (1,))
    counted = batch.labels != IGN
    assert counted.nonzero().flatten().tolist() == batch.row_index.tolist()
    assert batch.labels[batch.row_index].tolist() == [11, 12, 13, 2, 4, 5, 8, 9]


@pytest.mark.parametrize("packed_tokens", [None, 24])
def test_teacher_and_student_name_the_same_rows_in_the_same_order(
    packed_tokens: int | None, ids_dataset: MakeDataset
) -> None:
    rng = np.random.default_rng(5)
    documents = [
        {"input_ids": rng.integers(1, 300, n).tolist(), "loss_mask": rng.integers(0, 2, n).tolist()}
        for n in rng.integers(2, 20, 60)
    ]
    dataset = ids_dataset(*documents, max_length=12)
    plan = MicroBatchPlan(
        row_counts=dataset.row_counts,
        lengths=dataset.lengths,
        batch_size=3,
        grad_accum=2,
        epochs=1,
        packed_tokens=packed_tokens,
    )
    for step in plan.steps():
        batches = [build_microbatch(dataset, planned) for planned in step.microbatches]
        assert sum(batch.num_rows for batch in batches) == step.num_rows
        for batch in batches:
            assert teacher_rows(batch) == student_rows(batch)
            assert sum(batch.doc_lengths) == batch.num_tokens
            assert batch.num_rows == sum(end - start for start, end in batch.row_ranges)
            # Each row's label is the next token of the same document.
            ends = set(np.cumsum(batch.doc_lengths).tolist())
            next_tokens = [row + 1 for start, end in batch.row_ranges for row in range(start, end)]
            assert not ends.intersection(next_tokens)
            assert batch.labels[batch.row_index].tolist() == batch.token_ids[next_tokens].tolist()


def test_an_empty_microbatch_has_one_token_and_no_row(ids_dataset: MakeDataset) -> None:
    batch = build_microbatch(ids_dataset([1, 2]), PlannedMicroBatch(seq=None, sequences=()), pad_id=7)
    assert batch.seq is None
    assert batch.input_ids.tolist() == [[7]]
    assert batch.num_rows == batch.num_tokens == 0
    assert batch.row_index.dtype == torch.int64
    assert batch.doc_lengths == batch.row_ranges == batch.sample_ids == ()


def test_microbatches_are_frozen_and_give_the_models_side_by_name(ids_dataset: MakeDataset) -> None:
    batch = batch_of(ids_dataset([1, 2, 3]), (0,))
    with pytest.raises(FrozenInstanceError):
        batch.seq = 3  # type: ignore[misc]
    assert set(batch.inputs("cpu")) == {"input_ids", "position_ids", "labels", "row_index"}
    assert all(tensor.dtype == torch.int64 for tensor in batch.inputs("cpu").values())


def test_evaluation_reads_the_samples_in_order_and_has_no_seq(ids_dataset: MakeDataset) -> None:
    dataset = ids_dataset(*([i, i + 1, i + 2] for i in range(1, 6)))
    batches = list(sequential_microbatches(dataset, batch_size=2))
    assert [batch.sample_ids for batch in batches] == [(0, 1), (2, 3), (4,)]
    assert {batch.seq for batch in batches} == {None}
    assert [b.sample_ids for b in sequential_microbatches(dataset, batch_size=2, max_samples=3)] == [(0, 1), (2,)]
