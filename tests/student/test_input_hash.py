"""The hash that ties a fill to its request."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.input_hash import INPUT_HASH_BYTES, input_hash
from student.data import TokenDataset, build_microbatch
from student.data.order import PlannedMicroBatch

TOKENS = struct.pack("<5I", 5, 6, 7, 8, 9)


def test_hash_of_the_published_layout_never_changes() -> None:
    # Teachers and students of different versions compare it: a new value needs a new protocol version.
    assert input_hash(TOKENS, [3, 2], [(0, 2), (3, 4)]).hex() == "b3bcb244d6aa8e3c3a198e02700b9b68"
    assert len(input_hash(b"", [], [])) == INPUT_HASH_BYTES


def test_every_part_is_covered() -> None:
    other_token = TOKENS[:-1] + b"\x01"
    hashes = {
        input_hash(TOKENS, [3, 2], [(0, 2), (3, 4)]),
        input_hash(other_token, [3, 2], [(0, 2), (3, 4)]),
        input_hash(TOKENS, [2, 3], [(0, 2), (3, 4)]),
        input_hash(TOKENS, [5], [(0, 2), (3, 4)]),
        input_hash(TOKENS, [3, 2], [(0, 2)]),
        input_hash(TOKENS, [3, 2], [(0, 1), (3, 4)]),
    }
    assert len(hashes) == 6


Requests = st.tuples(
    st.lists(st.integers(0, 3), max_size=3).map(lambda ids: struct.pack(f"<{len(ids)}I", *ids)),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=2).map(tuple),
)


@given(Requests, Requests)
def test_numbers_that_move_between_the_parts_change_the_hash(
    left: tuple[bytes, tuple[int, ...], tuple[tuple[int, int], ...]],
    right: tuple[bytes, tuple[int, ...], tuple[tuple[int, int], ...]],
) -> None:
    assert (input_hash(*left) == input_hash(*right)) == (left == right)


def test_malformed_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        input_hash(b"123", [1], [])
    with pytest.raises(ValueError, match=">= 0"):
        input_hash(TOKENS, [5], [(-1, 2)])


def test_microbatch_carries_the_hash_of_what_it_sends(ids_dataset: Callable[..., TokenDataset]) -> None:
    dataset = ids_dataset([5, 6, 7], [8, 9])
    batch = build_microbatch(dataset, PlannedMicroBatch(seq=0, sequences=((0,), (1,))))
    assert batch.token_bytes() == TOKENS
    assert batch.input_hash == input_hash(TOKENS, [3, 2], [(0, 2), (3, 4)])
