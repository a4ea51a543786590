"""Both heads sharded by columns over a group of processes: the same loss on every rank, gradients of the whole.

Real processes over gloo. Each world size is started once and runs every case.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from planner.loss_costs import LossShape, Mode, choose_mode
from student.loss import Head, KDLoss, LossOptions
from student.loss.divergences import DIVERGENCES
from tests.loss import own_rows
from tests.loss.problems import Answer, Problem, assert_equal_answers, planned_loss, random_problem

NUM_COLUMNS = 11
# A hang guard: the whole takes seconds.
GUARD = timedelta(seconds=120)
MODES: tuple[Mode, Mode] = ("keep", "recompute")


def boundaries_of(world: int) -> list[list[int]]:
    """Where shards begin and end: even, uneven, with shards of padding only and of no column at all."""
    return {
        1: [[0, 11], [0, 14]],
        2: [[0, 6, 12], [0, 2, 11], [0, 11, 15], [0, 13, 13]],
        3: [[0, 4, 8, 12], [0, 1, 9, 11], [0, 6, 11, 13], [0, 12, 14, 16], [0, 0, 5, 11]],
    }[world]


def padded(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """With columns that would take all the mass if they were let in."""
    return torch.cat([tensor, torch.full((size - len(tensor), *tensor.shape[1:]), 7.0, dtype=tensor.dtype)])


def shard_of(problem: Problem, start: int, stop: int) -> Problem:
    assert problem.teacher_head is not None
    assert problem.student_bias is not None
    size = max(stop, NUM_COLUMNS)
    place = {"vocab_start": start, "real_vocab": NUM_COLUMNS}
    teacher_weight = padded(problem.teacher_head.weight, size)[start:stop]
    return Problem(
        student_hidden=problem.student_hidden.detach().clone().requires_grad_(),
        student_weight=padded(problem.student_weight.detach(), size)[start:stop].clone().requires_grad_(),
        student_bias=padded(problem.student_bias.detach(), size)[start:stop].clone().requires_grad_(),
        teacher_hidden=problem.teacher_hidden,
        teacher_head=Head(weight=teacher_weight, logit_softcap=3.0, **place),
        labels=problem.labels,
        head=problem.head | place,
        call=problem.call | {"vocab_group": dist.group.WORLD},
    )


def shard_of_answer(answer: Answer, start: int, stop: int) -> Answer:
    """What a rank should find: all of dX, its own columns of dW and dbias, nothing for padding."""
    d_hidden, *of_columns = answer.grads
    size = max(stop, NUM_COLUMNS)
    zeros = [torch.cat([grad, grad.new_zeros(size - NUM_COLUMNS, *grad.shape[1:])]) for grad in of_columns]
    return Answer(answer.out, [d_hidden, *(grad[start:stop] for grad in zeros)])


def check_every_rank_finds_the_whole_loss_and_its_gradients(rank: int, world: int) -> None:
    problem = random_problem(41, bias=True, logit_softcap=3.0)
    assert problem.teacher_head is not None
    problem.teacher_head = Head(weight=problem.teacher_head.weight, logit_softcap=3.0)
    for divergence in DIVERGENCES:
        for temperature in (1.0, 2.0):
            options = LossOptions(divergence=divergence, temperature=temperature, teacher_weight=0.3)
            wanted = problem.solve_exactly(options, upstream=3.0)
            for boundaries in boundaries_of(world):
                start, stop = boundaries[rank], boundaries[rank + 1]
                for mode in MODES:
                    found = shard_of(problem, start, stop).solve(planned_loss(options, mode), upstream=3.0)
                    assert_equal_answers(found, shard_of_answer(wanted, start, stop))


def check_the_loss_is_equal_to_the_bit_on_all_ranks(rank: int, world: int) -> None:
    problem = random_problem(42, bias=True, dtype=torch.float32)
    for divergence in DIVERGENCES:
        boundaries = boundaries_of(world)[0]
        for mode in MODES:
            shard = shard_of(problem, boundaries[rank], boundaries[rank + 1])
            answer = shard.solve(planned_loss(LossOptions(divergence=divergence), mode))
            mine = torch.stack([*answer.numbers()[:3]])
            all_of_them = [torch.empty_like(mine) for _ in range(world)]
            dist.all_gather(all_of_them, mine)
            assert all(torch.equal(other, mine) for other in all_of_them)
            d_hidden = answer.grads[0].clone()
            dist.broadcast(d_hidden, 0)
            assert torch.equal(d_hidden, answer.grads[0])


def check_canonical_pair_has_the_gradient_of_one_rank(rank: int, world: int) -> None:
    wanted = torch.tensor([-0.5478126857, -0.0784381086, 0.6229556041, 0.0032951901], dtype=torch.float64)
    columns = torch.arange(4).tensor_split(world)[rank]
    start = int(columns[0]) if len(columns) else 4
    one = torch.ones(1, 1, dtype=torch.float64)
    weight = torch.tensor([0.0, 0.5, 2.0, -1.0], dtype=torch.float64)[columns, None].requires_grad_()
    teacher = torch.tensor([2.0, 1.0, 0.0, -1.0], dtype=torch.float64)[columns, None]
    loss = KDLoss(kd_weight=1.0, ce_weight=0.0)
    heads = (Head(weight=weight, vocab_start=start), Head(weight=teacher, vocab_start=start))
    out = loss(one, heads[0], one, heads[1], None, all_rows=True, vocab_group=dist.group.WORLD)
    out.loss.backward()
    assert weight.grad is not None
    assert abs(out.loss.item() - 1.1341411752) <= 2e-10
    torch.testing.assert_close(weight.grad[:, 0], wanted[columns], rtol=0, atol=2e-10)


def check_ranks_agree_on_a_mode_where_only_some_have_room(rank: int, world: int) -> None:
    # The first shard is so wide that keeping its logits would not fit; the others would keep theirs, and wait for ever.
    problem = random_problem(43, num_columns=3000, num_rows=200, dtype=torch.float32)
    assert problem.teacher_head is not None
    cuts = {1: [0, 3000], 2: [0, 2990, 3000], 3: [0, 2990, 2995, 3000]}[world]
    start, stop = cuts[rank], cuts[rank + 1]
    options = LossOptions(workspace_bytes=1 << 20)
    wanted = problem.solve_exactly(options)
    shard = Problem(
        student_hidden=problem.student_hidden,
        student_weight=problem.student_weight.detach()[start:stop].clone().requires_grad_(),
        teacher_hidden=problem.teacher_hidden,
        teacher_head=Head(weight=problem.teacher_head.weight[start:stop], vocab_start=start),
        labels=problem.labels,
        head={"vocab_start": start},
        call={"vocab_group": dist.group.WORLD},
    )
    alone = LossShape(num_rows=200, num_columns=stop - start, student_hidden=5, teacher_hidden=6)
    wish = choose_mode(alone, device="cpu", workspace_bytes=options.workspace_bytes)
    assert wish == ("recompute" if rank == 0 else "keep")
    found = shard.solve(KDLoss.from_options(options))
    assert_equal_answers(found, shard_of_wide(wanted, start, stop), 1e-5)


def shard_of_wide(answer: Answer, start: int, stop: int) -> Answer:
    return Answer(answer.out, [answer.grads[0], answer.grads[1][start:stop]])


def check_bf16_shards_err_no_more_than_one_rank(rank: int, world: int) -> None:
    problem = random_problem(44, num_rows=24, student_width=32, teacher_width=32, bias=True, dtype=torch.bfloat16)
    options = LossOptions(divergence="jsd")
    wanted = problem.solve_exactly(options)
    boundaries = boundaries_of(world)[0]
    start, stop = boundaries[rank], boundaries[rank + 1]
    uncapped = shard_of(problem, start, stop)
    assert uncapped.teacher_head is not None
    uncapped.teacher_head = Head(weight=uncapped.teacher_head.weight, vocab_start=start, real_vocab=NUM_COLUMNS)
    for mode in MODES:
        assert_equal_answers(uncapped.solve(planned_loss(options, mode)), shard_of_answer(wanted, start, stop), 8e-3)


def check_a_label_outside_of_all_shards_is_refused_on_every_rank(rank: int, world: int) -> None:
    problem = random_problem(45, bias=True)
    assert problem.labels is not None
    problem.labels[problem.labels >= 0] = NUM_COLUMNS
    boundaries = boundaries_of(world)[0]
    for mode in MODES:
        with pytest.raises(ValueError, match="labels"):
            shard_of(problem, boundaries[rank], boundaries[rank + 1]).solve(planned_loss(LossOptions(), mode))


CHECKS: dict[str, Callable[[int, int], None]] = {
    check.__name__: check
    for check in (
        check_every_rank_finds_the_whole_loss_and_its_gradients,
        check_the_loss_is_equal_to_the_bit_on_all_ranks,
        check_canonical_pair_has_the_gradient_of_one_rank,
        check_ranks_agree_on_a_mode_where_only_some_have_room,
        check_bf16_shards_err_no_more_than_one_rank,
        check_a_label_outside_of_all_shards_is_refused_on_every_rank,
        *own_rows.CHECKS,
    )
}


def run_rank(rank: int, world: int, store: str, names: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=GUARD)
    for name in names:
        CHECKS[name](rank, world)
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_vocabulary_shards_over_real_processes(world: int, tmp_path: Path) -> None:
    arguments: tuple[Any, ...] = (world, str(tmp_path / "store"), tuple(CHECKS))
    mp.start_processes(run_rank, arguments, nprocs=world, start_method="spawn")


@pytest.mark.slow
@pytest.mark.parametrize("world", [4, 8])
def test_the_gradient_is_not_multiplied_by_the_number_of_ranks(world: int, tmp_path: Path) -> None:
    """Four columns over four and over eight ranks, half of which have none."""
    names = (check_canonical_pair_has_the_gradient_of_one_rank.__name__,)
    arguments: tuple[Any, ...] = (world, str(tmp_path / "store"), names)
    mp.start_processes(run_rank, arguments, nprocs=world, start_method="spawn")
