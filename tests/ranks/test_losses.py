"""One rank's loss is everybody's: whatever happens to one of them, all end, none hangs, and the run can go on."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from student.checkpoint import latest_checkpoint
from tests.ranks.conftest import NUM_STEPS, StartWorld
from tests.ranks.test_runs import assert_same_curve
from tests.system.conftest import Start
from tests.system.processes import check_refusal, holding

EARLY = 3
MANY_STEPS = ("--steps", 100000)
# A death is noticed at once; what has to go well before has its time.
SOON = ("--teacher-timeout", 4)


def test_when_one_rank_loses_its_only_replica_all_write_the_checkpoint_and_exit_3(
    one_rank_curve: list[dict[str, Any]], endpoint: str, start_teacher: Start, start_world: StartWorld
) -> None:
    doomed = start_teacher()
    each_its_own = ("--teacher", endpoint, doomed.endpoint, "--replicas-per-rank", 1)
    world = start_world(*each_its_own, *SOON, "--fsdp", *MANY_STEPS, size=2)
    world.until_step(EARLY)
    doomed.send(signal.SIGKILL)
    assert world.wait() == [3, 3], world.tail()
    first, second = world.ranks
    assert doomed.endpoint in second.errors.splitlines()[-1], "the one that lost it names it"
    assert "rank 1 has lost its teacher" in first.errors.splitlines()[-1]
    taken = first.steps_taken
    assert first.checkpoints == [f"step-{taken:08d}"]
    assert world.summary["ending"].startswith("TeacherLost: ")
    assert not (world.out / "model").exists()


@pytest.mark.slow
def test_a_run_that_lost_its_teacher_goes_on_where_it_stopped(
    one_rank_curve: list[dict[str, Any]], endpoint: str, start_teacher: Start, start_world: StartWorld
) -> None:
    doomed = start_teacher()
    world = start_world(*("--teacher", doomed.endpoint, *SOON, "--vocab-parallel", 2), size=2, command=holding(EARLY))
    world.first.until_held_at(EARLY)
    doomed.send(signal.SIGKILL)
    world.first.let_go()
    assert world.wait() == [3, 3], world.tail()
    assert EARLY <= world.first.steps_taken < NUM_STEPS
    resumed = start_world("--teacher", endpoint, "--vocab-parallel", 2, "--resume", size=2)
    resumed.succeed()
    assert_same_curve(resumed.out, one_rank_curve)


def test_when_a_rank_is_killed_the_others_end_at_once(endpoint: str, start_world: StartWorld) -> None:
    world = start_world("--teacher", endpoint, *MANY_STEPS, "--checkpoint-every", 2, size=3)
    world.first.until(lambda: bool(world.first.checkpoints), "a checkpoint is there")
    world.ranks[1].send(signal.SIGKILL)
    codes = world.wait()
    assert codes[1] == -signal.SIGKILL
    assert [codes[0], codes[2]] == [1, 1], world.tail()
    for survivor in (world.ranks[0], world.ranks[2]):
        assert "Traceback" not in survivor.errors
        assert survivor.errors.splitlines()[-1].startswith("student.train: error: rank")
    assert latest_checkpoint(world.out / "checkpoints")[0] is not None, "one that was there is whole"


def test_when_a_rank_is_stopped_the_others_end_after_the_time_out(endpoint: str, start_world: StartWorld) -> None:
    # Which covers what is said while they load too: with less a busy machine ends them before they have begun.
    world = start_world("--teacher", endpoint, *MANY_STEPS, "--rank-timeout", 15, size=2)
    world.until_step(EARLY)
    world.ranks[1].send(signal.SIGSTOP)
    assert world.first.wait() == 1
    assert "Traceback" not in world.first.errors
    assert world.first.errors.splitlines()[-1].startswith("student.train: error: rank 0")
    world.ranks[1].send(signal.SIGCONT)
    assert world.ranks[1].wait() == 1, "there is nobody left to go on with"


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_with_a_checkpoint(
    one_rank_curve: list[dict[str, Any]], endpoint: str, start_world: StartWorld
) -> None:
    world = start_world("--teacher", endpoint, size=2, command=holding(EARLY))
    world.first.until_held_at(EARLY)
    world.ranks[1].send(signal.SIGTERM)
    world.first.let_go()
    assert world.wait() == [143, 143], world.tail()
    taken = world.first.steps_taken
    assert world.first.checkpoints == [f"step-{taken:08d}"]
    resumed = start_world("--teacher", endpoint, "--resume", size=2)
    resumed.succeed()
    assert_same_curve(resumed.out, one_rank_curve)


def test_groups_that_do_not_fit_the_world_are_refused_by_all(endpoint: str, start_world: StartWorld) -> None:
    world = start_world("--teacher", endpoint, "--vocab-parallel", 3, size=2)
    for rank in world:
        check_refusal(rank, 2, "--vocab-parallel 3", "2 ranks", "divisor")


def test_what_fails_on_one_rank_only_ends_all_before_the_first_step(
    endpoint: str, start_world: StartWorld, tmp_path: Path
) -> None:
    """Rank 0 alone looks at --out."""
    (tmp_path / "out").write_text("not a directory")
    world = start_world("--teacher", endpoint, size=2)
    check_refusal(world.ranks[0], 2, "--out", "allowed: a directory")
    check_refusal(world.ranks[1], 2, "rank 0 failed: --out")
