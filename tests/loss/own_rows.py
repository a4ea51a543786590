"""Checks of a vocabulary group whose ranks hold different rows; `test_vocab_group` runs them on real processes."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from planner.loss_costs import LossShape, Mode, most_window_rows
from student.loss import Head, KDLoss, LossOptions
from student.loss.divergences import DIVERGENCES
from tests.loss.problems import IGNORE, Answer, Problem, assert_equal_answers, planned_loss, random_problem

MODES: tuple[Mode, Mode] = ("keep", "recompute")
#: Rows that each rank of a world brings: as many, uneven, none at all, and none anywhere.
SHARES = {
    1: [[9], [0]],
    2: [[6, 6], [9, 2], [0, 7], [5, 0], [0, 0]],
    3: [[4, 4, 4], [8, 1, 5], [0, 7, 0], [3, 0, 9], [0, 0, 0]],
}


def share_of(problem: Problem, shares: list[int], rank: int, columns: tuple[int, int], *, scattered: bool) -> Problem:
    """A rank's rows and columns. scattered: its rows lie among others that don't count."""
    start = sum(shares[:rank])
    rows = slice(start, start + shares[rank])
    hidden = problem.student_hidden.detach()[rows]
    assert problem.labels is not None
    assert problem.teacher_hidden is not None
    assert problem.teacher_head is not None
    labels, index = problem.labels[rows], {"all_rows": True}
    if scattered:
        wide = hidden.new_full((2 * len(hidden) + 1, hidden.shape[1]), torch.nan)
        wide_labels = labels.new_full((len(wide),), IGNORE)
        wide[1::2], wide_labels[1::2] = hidden, labels
        hidden, labels = wide, wide_labels
        index = {"row_index": torch.arange(1, len(wide), 2)}
    first, last = columns
    return Problem(
        student_hidden=hidden.clone().requires_grad_(),
        student_weight=problem.student_weight.detach()[first:last].clone().requires_grad_(),
        teacher_hidden=problem.teacher_hidden[rows],
        teacher_head=Head(weight=problem.teacher_head.weight[first:last], vocab_start=first),
        labels=labels,
        head={"vocab_start": first},
        call=index | {"vocab_group": dist.group.WORLD, "group_rows": shares, "num_rows": max(sum(shares), 1)},
    )


def check_own_rows_have_the_loss_of_all_rows_together(rank: int, world: int) -> None:
    for shares in SHARES[world]:
        problem = random_problem(51, num_rows=max(sum(shares), 1), masked_frac=0.0)
        first, last = (columns := torch.arange(11).tensor_split(world)[rank])[0].item(), columns[-1].item() + 1
        for divergence in DIVERGENCES:
            options = LossOptions(divergence=divergence, temperature=2.0)
            wanted = replace(problem, call={"all_rows": True}).solve_exactly(options, upstream=3.0)
            for mode in MODES:
                for scattered in (False, True):
                    own = share_of(problem, shares, rank, (int(first), int(last)), scattered=scattered)
                    with pytest.warns(RuntimeWarning) if not sum(shares) else nullcontext():
                        found = own.solve(planned_loss(options, mode, rows=2 * world), upstream=3.0)
                    if sum(shares):
                        assert_equal_answers(found, part_of(wanted, shares, rank, (int(first), int(last)), scattered))
                    else:
                        assert not any(number.any() for number in found.numbers())


def part_of(answer: Answer, shares: list[int], rank: int, columns: tuple[int, int], scattered: bool) -> Answer:
    """What a rank should find: the loss of all rows, dX of its own, dW of its columns."""
    d_hidden, d_weight = answer.grads
    start = sum(shares[:rank])
    own = d_hidden[start : start + shares[rank]]
    if scattered:
        wide = own.new_zeros(2 * len(own) + 1, own.shape[1])
        wide[1::2] = own
        own = wide
    return Answer(answer.out._replace(rows=shares[rank]), [own, d_weight[slice(*columns)]])


def check_own_rows_in_16_bits_err_no_more_than_one_rank(rank: int, world: int) -> None:
    shares = SHARES[world][1 if world > 1 else 0]
    columns = torch.arange(11).tensor_split(world)[rank]
    bounds = (int(columns[0]), int(columns[-1]) + 1)
    for dtype in (torch.bfloat16, torch.float16):
        problem = random_problem(
            52, num_rows=sum(shares), student_width=32, teacher_width=32, dtype=dtype, masked_frac=0.0
        )
        wanted = replace(problem, call={"all_rows": True}).solve_exactly(LossOptions())
        for mode in MODES:
            found = share_of(problem, shares, rank, bounds, scattered=True).solve(planned_loss(LossOptions(), mode))
            assert_equal_answers(found, part_of(wanted, shares, rank, bounds, True), 8e-3)


def check_fp16_gradients_hold_weights_of_any_size_on_any_rank(rank: int, world: int) -> None:
    # All ranks' rows meet in one product, so all must be boosted alike: by the heaviest row, which one rank has.
    shares = SHARES[world][1 if world > 1 else 0]
    columns = torch.arange(11).tensor_split(world)[rank]
    bounds = (int(columns[0]), int(columns[-1]) + 1)
    problem = random_problem(
        56, num_rows=sum(shares), student_width=32, teacher_width=32, dtype=torch.float16, masked_frac=0.0
    )
    weights = torch.ones(sum(shares))
    weights[0] = 1000.0
    # As a loss scaler does, the upstream factor keeps the results within fp16.
    upstream = 0.01
    wanted = replace(problem, call={"all_rows": True, "row_weights": weights}).solve_exactly(
        LossOptions(), upstream=upstream
    )
    for mode in MODES:
        own = share_of(problem, shares, rank, bounds, scattered=False)
        own.call["row_weights"] = weights[sum(shares[:rank]) :][: shares[rank]]
        found = own.solve(planned_loss(LossOptions(), mode), upstream=upstream)
        assert_equal_answers(found, part_of(wanted, shares, rank, bounds, False), 8e-3)


def check_ranks_agree_on_windows_where_their_shards_differ(rank: int, world: int) -> None:
    # A stated workspace holds fewer rows of a wide shard than of a narrow one; each window is an exchange of all.
    num_columns, workspace_bytes = 259, 1 << 20
    cuts = {1: [0, 259], 2: [0, 250, 259], 3: [0, 200, 250, 259]}[world]
    first, last = cuts[rank], cuts[rank + 1]
    shapes = [
        LossShape(num_rows=1, num_columns=stop - start, student_hidden=5, teacher_hidden=6, state_bytes=8, work_bytes=8)
        for start, stop in pairwise(cuts)
    ]
    windows = [most_window_rows(shape, device="cpu", workspace_bytes=workspace_bytes) for shape in shapes]
    assert len(set(windows)) == world, "each would cut other windows by itself"
    shares = [700 // world] * world
    problem = random_problem(54, num_rows=sum(shares), num_columns=num_columns, masked_frac=0.0)
    options = LossOptions(divergence="jsd", workspace_bytes=workspace_bytes)
    wanted = replace(problem, call={"all_rows": True}).solve_exactly(options)
    own = share_of(problem, shares, rank, (first, last), scattered=False)
    assert_equal_answers(own.solve(KDLoss.from_options(options)), part_of(wanted, shares, rank, (first, last), False))


def check_a_workspace_too_small_for_one_rank_is_refused_on_all(rank: int, world: int) -> None:
    # 30 kB hold a window of three columns, and none of a hundred.
    columns = (0, 100) if rank == 0 else (100 + 3 * (rank - 1), 103 + 3 * (rank - 1))
    shares = [9] * world
    problem = random_problem(55, num_rows=sum(shares), num_columns=100 + 3 * (world - 1), masked_frac=0.0)
    own = share_of(problem, shares, rank, columns, scattered=False)
    with pytest.raises(ValueError, match="workspace_bytes: got 30000"):
        own.solve(KDLoss.from_options(LossOptions(workspace_bytes=30_000)))


def check_counts_that_are_not_the_call_s_are_refused(rank: int, world: int) -> None:
    problem = random_problem(53, num_rows=4, masked_frac=0.0)
    for group_rows, message in (([4] * (world + 1), "group_rows"), ([5] * world, "group_rows")):
        own = share_of(problem, [4] + [0] * (world - 1), 0, (0, 11), scattered=False)
        own.call["group_rows"] = group_rows
        with pytest.raises(ValueError, match=message):
            own.solve(planned_loss(LossOptions(), "keep"))
    own.call |= {"group_rows": [4], "vocab_group": None}
    with pytest.raises(ValueError, match="without a vocab_group"):
        own.solve(planned_loss(LossOptions(), "keep"))


CHECKS = (
    check_own_rows_have_the_loss_of_all_rows_together,
    check_own_rows_in_16_bits_err_no_more_than_one_rank,
    check_fp16_gradients_hold_weights_of_any_size_on_any_rank,
    check_ranks_agree_on_windows_where_their_shards_differ,
    check_a_workspace_too_small_for_one_rank_is_refused_on_all,
    check_counts_that_are_not_the_call_s_are_refused,
)
