"""The data order: a pure function of seed and position, whole epochs, exact resume."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ring.core.errors import ConfigError
from student.data import MicroBatchPlan, PlannedStep
from student.data.order import epoch_order, pack_in_order


def make_plan(num_samples: int, *, lengths: list[int] | None = None, **options: Any) -> MicroBatchPlan:
    """Sample i has i + 2 tokens unless lengths are given; all rows but the last of each count."""
    tokens = np.array(lengths if lengths is not None else range(2, num_samples + 2), dtype=np.int64)
    return MicroBatchPlan(row_counts=tokens - 1, lengths=tokens, **({"epochs": 1, "batch_size": 4} | options))


def brief(step: PlannedStep) -> tuple[Any, ...]:
    return (step.step, step.epoch, step.position, step.next_position, step.num_rows, step.microbatches)


def trained(steps: list[PlannedStep]) -> list[int]:
    return [sample for step in steps for sample in step.sample_ids.tolist()]


# --- the order -----------------------------------------------------------------------------------


@given(st.integers(1, 300), st.integers(0, 2**70), st.integers(0, 5))
def test_every_epoch_is_a_permutation(num_samples: int, seed: int, epoch: int) -> None:
    order = epoch_order(num_samples, seed=seed, epoch=epoch)
    assert sorted(order.tolist()) == list(range(num_samples))


def test_orders_of_seeds_and_epochs_differ_and_repeat() -> None:
    orders = [tuple(epoch_order(50, seed=seed, epoch=epoch)) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9
    assert orders[4] == tuple(epoch_order(50, seed=1, epoch=1))


def test_the_order_of_a_seed_never_changes() -> None:
    # Checkpoints store a position in this very order: another order would lose and repeat samples without a word.
    assert epoch_order(12, seed=7, epoch=3).tolist() == [5, 3, 1, 2, 8, 10, 9, 0, 7, 11, 4, 6]


def test_shuffling_is_uniform_enough_to_put_every_sample_everywhere() -> None:
    # 400 epochs of 8 samples: each sample is expected 50 times in each place; 4 sigma is about 26.
    counts = np.zeros((8, 8), dtype=int)
    for epoch in range(400):
        counts[np.arange(8), epoch_order(8, seed=3, epoch=epoch)] += 1
    assert counts.min() > 24
    assert counts.max() < 76


def test_without_a_seed_the_samples_keep_their_order() -> None:
    assert trained(list(make_plan(6, seed=None, epochs=2).steps())) == [0, 1, 2, 3, 4, 5] * 2


# --- steps ---------------------------------------------------------------------------------------


@pytest.mark.case(43)
def test_last_partial_batch_is_trained_and_divided_by_its_own_rows() -> None:
    steps = list(make_plan(10).steps())
    assert [len(step.sample_ids) for step in steps] == [4, 4, 2]
    assert sorted(trained(steps)) == list(range(10))
    # Sample i has i + 1 rows that count.
    assert [step.num_rows for step in steps] == [sum(i + 1 for i in step.sample_ids) for step in steps]


def test_no_microbatch_and_no_step_crosses_an_epoch() -> None:
    steps = list(make_plan(10, grad_accum=2, epochs=3).steps())
    assert [(step.epoch, [len(batch.sequences) for batch in step.microbatches]) for step in steps] == [
        (epoch, sizes) for epoch in range(3) for sizes in ([4, 4], [2])
    ]
    for epoch in range(3):
        assert sorted(trained(steps[2 * epoch : 2 * epoch + 2])) == list(range(10))


@pytest.mark.case(44)
def test_resume_at_the_epoch_boundary_trains_the_next_epoch_whole() -> None:
    plan = make_plan(240, epochs=2)
    assert plan.num_steps == 120
    position = next(step.next_position for step in plan.steps() if step.step == 60)
    resumed = list(plan.steps(position))
    assert [step.step for step in resumed] == list(range(61, 121))
    assert sorted(trained(resumed)) == list(range(240))


PLANS: dict[str, dict[str, Any]] = {
    "plain": {"num_samples": 23, "epochs": 3},
    "accumulated": {"num_samples": 23, "epochs": 3, "grad_accum": 3, "batch_size": 2},
    "by steps": {"num_samples": 10, "epochs": None, "max_steps": 17},
    "ranks": {"num_samples": 23, "epochs": 2, "world_size": 3, "rank": 1, "batch_size": 2, "grad_accum": 2},
    "packed": {"num_samples": 23, "epochs": 3, "packed_tokens": 30, "batch_size": 2},
    "packed ranks": {"num_samples": 23, "epochs": 3, "packed_tokens": 30, "batch_size": 1, "world_size": 2, "rank": 1},
}


@pytest.mark.parametrize("name", PLANS)
def test_a_resumed_plan_goes_on_exactly_where_it_stopped(name: str) -> None:
    whole = list(make_plan(**PLANS[name]).steps())
    for done in range(len(whole) + 1):
        position = whole[done - 1].next_position if done else 0
        # A fresh object: nothing but the position survives a crash.
        plan = make_plan(**PLANS[name])
        assert plan.step_at(position) == done
        assert plan.position_after(done) == position
        assert [brief(step) for step in plan.steps(position)] == [brief(step) for step in whole[done:]]
    assert make_plan(**PLANS[name]).end_position == whole[-1].next_position


@pytest.mark.case(46)
def test_what_was_only_prefetched_is_asked_for_again() -> None:
    plan = make_plan(40, epochs=2)
    ahead = plan.steps()
    trained_steps = [next(ahead) for _ in range(3)]
    prefetched = [next(ahead) for _ in range(4)]
    # Killed here: the checkpoint knows the position behind the last trained step only.
    resumed = list(make_plan(40, epochs=2).steps(trained_steps[-1].next_position))
    assert [brief(step) for step in resumed[:4]] == [brief(step) for step in prefetched]
    assert sorted(trained([*trained_steps, *resumed])) == sorted(list(range(40)) * 2)


def test_seqs_are_consecutive_whatever_the_steps_are() -> None:
    plan = make_plan(23, epochs=3, grad_accum=2, batch_size=3)
    seqs = [batch.seq for step in plan.steps() for batch in step.microbatches]
    assert seqs == list(range(len(seqs)))
    for step in plan.steps():
        assert plan.seq_at(step.position) == step.microbatches[0].seq


def test_a_finished_run_has_no_steps_left() -> None:
    plan = make_plan(10, epochs=2)
    assert list(plan.steps(20)) == []
    assert list(make_plan(10, epochs=1).steps(20)) == []


def test_position_inside_a_step_is_refused_with_the_last_one_that_fits() -> None:
    plan = make_plan(10, epochs=2)
    with pytest.raises(ConfigError, match=r"position 16 .*ends at 14"):
        plan.steps(16)
    with pytest.raises(ConfigError, match=r"position 3 .*ends at 0"):
        plan.step_at(3)
    with pytest.raises(ConfigError, match=">= 0"):
        plan.steps(-1)


def test_the_same_global_batch_resumes_on_another_number_of_ranks() -> None:
    position = list(make_plan(40, batch_size=4, grad_accum=2).steps())[1].next_position
    for split in (
        {"grad_accum": 1, "world_size": 2},
        {"grad_accum": 2, "world_size": 1},
        {"batch_size": 2, "grad_accum": 4},
    ):
        steps = list(make_plan(40, **({"batch_size": 4} | split)).steps(position))
        assert steps[0].step == 3
        assert sorted(trained(steps)) == sorted(epoch_order(40, seed=0, epoch=0)[16:].tolist())


# --- ranks ---------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))
def test_ranks_share_every_step_without_loss_or_overlap(
    num_samples: int, batch_size: int, grad_accum: int, world_size: int
) -> None:
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "grad_accum": grad_accum,
        "world_size": world_size,
        "epochs": 2,
    }
    by_rank = [list(make_plan(num_samples, rank=rank, **options).steps()) for rank in range(world_size)]
    assert len({len(steps) for steps in by_rank}) == 1
    for steps in zip(*by_rank, strict=True):
        assert len({len(step.microbatches) for step in steps}) == 1
        assert len({step.num_rows for step in steps}) == 1
        shares = [sample for step in steps for batch in step.microbatches for sample in batch.sample_ids]
        assert sorted(shares) == sorted(steps[0].sample_ids.tolist())


@pytest.mark.case(42)
def test_a_rank_without_data_takes_the_step_with_an_empty_microbatch() -> None:
    # 5 microbatches on 2 ranks: three turns, the second rank has nothing in the last.
    first, second = (
        list(make_plan(5, batch_size=1, grad_accum=1, world_size=2, rank=rank, epochs=2).steps()) for rank in (0, 1)
    )
    assert [[batch.seq for batch in step.microbatches] for step in first] == [[0], [1], [2], [3], [4], [5]]
    assert [[batch.seq for batch in step.microbatches] for step in second] == [[0], [1], [None], [2], [3], [None]]
    assert second[2].num_rows == first[2].num_rows > 0


# --- packing -------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 10), min_size=1, max_size=40), st.integers(10, 25))
def test_packing_fills_in_order_and_never_overflows(lengths: list[int], limit: int) -> None:
    starts = pack_in_order(np.array(lengths, dtype=np.int64), limit).tolist()
    assert starts[0] == 0
    assert starts[-1] == len(lengths)
    for start, end in itertools.pairwise(starts):
        assert start < end
        assert sum(lengths[start:end]) <= limit
        if end < len(lengths):
            assert sum(lengths[start : end + 1]) > limit


def test_packed_steps_cover_one_stretch_of_positions_each() -> None:
    plan = make_plan(50, epochs=2, packed_tokens=60, batch_size=2, grad_accum=2)
    steps = list(plan.steps())
    assert [step.position for step in steps[1:]] == [step.next_position for step in steps[:-1]]
    assert sorted(trained(steps)) == sorted(list(range(50)) * 2)
    for step in steps:
        shares = [sample for batch in step.microbatches for sample in batch.sample_ids]
        assert shares == step.sample_ids.tolist()
        for batch in step.microbatches:
            assert all(sum(sample + 2 for sample in sequence) <= 60 for sequence in batch.sequences)
    assert any(len(sequence) > 1 for step in steps for batch in step.microbatches for sequence in batch.sequences)


# --- bounds and bad input ------------------------------------------------------------------------


@pytest.mark.parametrize("packed_tokens", [None, 30])
def test_no_microbatch_exceeds_what_the_slots_are_sized_for(packed_tokens: int | None) -> None:
    plan = make_plan(25, epochs=4, packed_tokens=packed_tokens, batch_size=3)
    for step in plan.steps():
        for batch in step.microbatches:
            assert sum(sample + 1 for sample in batch.sample_ids) <= plan.max_microbatch_rows()
            assert sum(sample + 2 for sample in batch.sample_ids) <= plan.max_microbatch_tokens()


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"grad_accum": 0},
        {"world_size": 2, "rank": 2},
        {"epochs": None},
        {"epochs": 1, "max_steps": 1},
        {"epochs": 0},
        {"packed_tokens": 5},
        {"num_samples": 0},
    ],
    ids=str,
)
def test_plans_that_can_not_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make_plan(**({"num_samples": 10} | options))
