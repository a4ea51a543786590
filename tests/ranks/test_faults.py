"""A fault on one rank, at a moment when the others wait for it in an exchange: all hear of it, and end alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.conftest import StartWorld
from tests.ranks.world import run_ranks
from tests.system.conftest import Inputs
from tests.system.processes import Student

MANY_STEPS = ("--steps", 100000)


def with_fault(fault: str, *, rank: int) -> dict[str, object]:
    return {"command": ("tests.ranks.failing", fault), "env": {"FAULTY_RANK": str(rank)}}


def last_error(rank: Student) -> str:
    assert "Traceback" not in rank.errors
    return rank.errors.splitlines()[-1].removeprefix("student.train: error: ")


def test_what_ends_the_ring_of_one_rank_costs_no_step_whatever_its_type(endpoint: str, start_world: StartWorld) -> None:
    world = start_world("--teacher", endpoint, *MANY_STEPS, size=2, **with_fault("lease", rank=1))
    assert world.wait() == [1, 1], world.tail()
    assert last_error(world.ranks[1]) == "no lease can be made"
    assert last_error(world.first).startswith("rank 1 has lost its teacher")
    taken = world.first.steps_taken
    assert taken > 0
    assert world.first.checkpoints == [f"step-{taken:08d}"]
    assert world.summary["ending"].startswith("RankFailed: rank 1")


@pytest.mark.parametrize(
    ("fault", "code", "words"), [("submit", 2, "it can't be asked for"), ("pump", 1, "the pump failed")]
)
def test_what_never_reaches_a_teacher_in_turns_is_not_waited_for(
    inputs: Inputs, start_world: StartWorld, fault: str, code: int, words: str
) -> None:
    world = start_world(
        *("--layout", "colocated", "--teacher", inputs.teacher, "--fsdp", "--ring-depth", 2, *MANY_STEPS),
        size=2,
        **with_fault(fault, rank=1),
    )
    assert world.wait() == [code, code], world.tail()
    assert last_error(world.ranks[1]) == words
    assert world.first.checkpoints == [f"step-{world.first.steps_taken:08d}"]


@pytest.mark.parametrize(("fault", "rank"), [("embedding", 1), ("layer", 0), ("norm", 1)])
def test_a_teacher_that_fails_in_the_midst_of_a_pass_of_all_is_lost_in_order(
    inputs: Inputs, start_world: StartWorld, fault: str, rank: int
) -> None:
    """The other rank waits in that pass for what the failed one has yet to gather."""
    world = start_world(
        *("--layout", "colocated", "--teacher", inputs.teacher, "--fsdp", "--ring-depth", 2, *MANY_STEPS),
        size=2,
        **with_fault(fault, rank=rank),
    )
    assert world.wait() == [3, 3], world.tail()
    assert (
        last_error(world.ranks[rank]) == "the teacher in this process failed: RuntimeError: no memory for this at all"
    )
    assert last_error(world.ranks[1 - rank]).startswith(f"rank {rank} has lost its teacher")
    taken = world.first.steps_taken
    assert taken > 0
    assert world.first.checkpoints == [f"step-{taken:08d}"]
    assert world.summary["ending"].startswith("TeacherLost: ")


def test_a_rank_that_is_killed_in_a_pass_of_all_is_lost_like_any_other(inputs: Inputs, start_world: StartWorld) -> None:
    world = start_world(
        *("--layout", "colocated", "--teacher", inputs.teacher, "--fsdp", "--ring-depth", 2, *MANY_STEPS),
        size=2,
        **with_fault("death in a layer", rank=1),
    )
    assert world.first.wait() == 1
    assert last_error(world.first).startswith("rank 0: ")
    assert world.first.checkpoints == []


@pytest.mark.parametrize(
    ("fault", "rank", "words"),
    [("records", 0, "no space left for metrics.jsonl"), ("memory", 1, "not enough memory")],
)
def test_a_checkpoint_that_one_rank_can_t_begin_ends_all_with_its_words(
    endpoint: str, start_world: StartWorld, fault: str, rank: int, words: str
) -> None:
    world = start_world(
        "--teacher", endpoint, "--checkpoint-every", 2, *MANY_STEPS, size=2, **with_fault(fault, rank=rank)
    )
    assert world.wait() == [1, 1], world.tail()
    assert words in last_error(world.ranks[rank])
    assert last_error(world.ranks[1 - rank]).startswith(f"rank {rank} failed: ")
    assert words in last_error(world.ranks[1 - rank])


def test_a_checkpoint_that_fails_in_the_background_costs_neither_the_next_one_nor_the_run(
    endpoint: str, start_world: StartWorld
) -> None:
    flags = ("--steps", 6, "--checkpoint-every", 2)
    world = start_world("--teacher", endpoint, *flags, size=2, **with_fault("full", rank=1))
    world.succeed()
    assert world.first.checkpoints == ["step-00000004", "step-00000006"]
    (said,) = (line for line in world.first.errors.splitlines() if "no checkpoint of step 2" in line)
    assert "rank 1 could not write its part: OSError: [Errno 27]" in said
    assert "training goes on, and waits for the next one" in said
    assert "checkpoint of step 4 is there, after that of step 2 failed" in world.first.errors
    assert "step 6 is there" not in world.first.errors


@pytest.mark.parametrize(
    ("num_steps", "code"), [(2, 0), (100000, 143)], ids=["the last step", "a signal after the same step"]
)
def test_a_checkpoint_that_failed_in_the_background_is_made_once_more_before_the_run_ends(
    endpoint: str, start_world: StartWorld, num_steps: int, code: int
) -> None:
    flags = ("--steps", num_steps, "--warmup-steps", 0, "--checkpoint-every", 2)
    fault = "full" if code == 0 else "full, and a signal"
    world = start_world("--teacher", endpoint, *flags, size=2, **with_fault(fault, rank=1))
    assert world.wait() == [code, code], world.tail()
    assert world.first.checkpoints == ["step-00000002"]
    (said,) = (line for line in world.first.errors.splitlines() if "no checkpoint of step 2" in line)
    assert "rank 1 could not write its part: OSError: [Errno 27]" in said
    assert said.endswith("it is tried once more")


def test_a_checkpoint_that_failed_leaves_nothing_in_memory(tmp_path: Path) -> None:
    """Each is a copy of all that the rank trains: with what the next one copies two would be there."""
    for rank in run_ranks("tests.ranks.failed_writer", tmp_path / "root", size=2, cwd=tmp_path):
        rank.succeed()


def test_a_run_that_can_save_nothing_more_ends(endpoint: str, start_world: StartWorld) -> None:
    flags = ("--checkpoint-every", 2, *MANY_STEPS)
    world = start_world("--teacher", endpoint, *flags, size=2, **with_fault("full for good", rank=1))
    assert world.wait() == [1, 1], world.tail()
    assert "rank 1 could not write its part" in last_error(world.ranks[1])
    assert "no checkpoint of step 4" in world.first.errors, "the second is waited for"
    assert world.first.checkpoints == ["step-00000002"]
    assert world.first.steps_taken == 6


@pytest.mark.parametrize("way", ["--background-checkpoints=false", "--background-checkpoints=true"])
def test_a_rank_that_hangs_in_a_checkpoint_is_waited_for_as_long_as_one_may_take(
    endpoint: str, start_world: StartWorld, way: str
) -> None:
    """Not as long as loading may; at the end of the run, where nothing else waits for it, either."""
    flags = ("--steps", 2, "--warmup-steps", 0, way, "--checkpoint-timeout", 8, "--rank-timeout", 1000)
    world = start_world("--teacher", endpoint, *flags, size=2, **with_fault("stopped", rank=1))
    assert world.first.wait() == 1
    assert last_error(world.first).startswith(
        "rank 0: another rank ended, or was silent for longer than --rank-timeout"
    )
    assert world.first.checkpoints == []


def test_a_model_is_never_exported_from_an_older_step(endpoint: str, start_world: StartWorld) -> None:
    flags = ("--steps", 2, "--warmup-steps", 0, "--checkpoint-every", 1)
    world = start_world("--teacher", endpoint, *flags, size=2, **with_fault("torn", rank=0))
    assert world.wait() == [1, 1], world.tail()
    assert "the model after step 2 could not be exported" in last_error(world.first)
    assert not (world.out / "model").exists()


def test_a_vocabulary_group_waits_for_a_silent_rank_as_long_as_it_was_told(tmp_path: Path) -> None:
    for rank in run_ranks("tests.ranks.silent", size=2, cwd=tmp_path):
        rank.succeed()


def test_a_rank_that_is_killed_in_an_evaluation_is_lost_like_any_other(
    inputs: Inputs, endpoint: str, start_world: StartWorld
) -> None:
    flags = ("--eval-data", inputs.eval_data, "--eval-every", 1, "--vocab-parallel", 2)
    world = start_world("--teacher", endpoint, *flags, size=2, **with_fault("evaluation", rank=1))
    assert world.first.wait() == 1
    assert last_error(world.first).startswith("rank 0: ")


def test_an_out_that_the_ranks_do_not_share_is_refused_before_anything_is_loaded(
    inputs: Inputs, endpoint: str, start_world: StartWorld
) -> None:
    """A relative one: each rank of a world of these tests has a working directory of its own, as hosts have disks."""
    world = start_world("--teacher", endpoint, "--out", Path("own"), size=2)
    assert world.wait() == [2, 2], world.tail()
    assert "--out own" in last_error(world.ranks[1])
    assert "allowed: a directory on a file system that all ranks share" in last_error(world.ranks[1])
    assert "rank 1 failed: --out own" in last_error(world.first)
