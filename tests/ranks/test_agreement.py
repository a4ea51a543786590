"""What the ranks make of how each of them stands, and of what torchrun says to them."""

from __future__ import annotations

import pytest

from ring.core.errors import ConfigError
from student.parallel.agreement import Standing, decide
from student.parallel.ranks import Launch, check_equal
from student.train.teachers import _endpoints_of

READY, WAITING, STOPPING, LOST = Standing


@pytest.mark.parametrize(
    ("own", "signal", "other", "wanted"),
    [
        (READY, 0, [READY, 0, 0], READY),
        (READY, 15, [READY, 0, 0], READY),  # the step is finished first
        (READY, 0, [WAITING, 0, 0], WAITING),
        (READY, 0, [WAITING, 15, 0], STOPPING),
        (WAITING, 2, [READY, 0, 0], STOPPING),
        (WAITING, 15, [LOST, 0, 3], LOST),  # whoever lost its teacher says so, whatever was asked of the others
    ],
)
def test_of_several_standings_the_worst_decides(own: Standing, signal: int, other: list[int], wanted: Standing) -> None:
    verdict = decide([[own, signal, 0], other])
    assert verdict.standing is wanted
    assert verdict.signal == (signal or other[1])


def test_the_verdict_names_who_is_lost_and_how_it_ends() -> None:
    verdict = decide([[READY, 0, 0], [READY, 0, 0], [LOST, 0, 3], [LOST, 0, 1]])
    assert verdict.lost == ((2, 3), (3, 1))


@pytest.mark.parametrize(
    ("count", "wanted"), [(0, ["abc", "abc", "abc"]), (1, ["a", "b", "c"]), (2, ["ab", "ca", "bc"]), (9, ["abc"] * 3)]
)
def test_replicas_are_dealt_to_ranks_in_turn(count: int, wanted: list[str]) -> None:
    dealt = [_endpoints_of(rank, ("a", "b", "c"), count) for rank in range(3)]
    assert [sorted(endpoints) for endpoints in dealt] == [sorted(text) for text in wanted]


def test_a_launch_is_read_from_what_torchrun_sets_or_there_is_none() -> None:
    told = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    assert Launch.from_environment({}) is None
    job = Launch.from_environment(told | {"TORCHELASTIC_RUN_ID": "a job"})
    assert job == Launch(rank=1, world_size=4, local_rank=1, restarts=0, run_id="a job")
    started, restarted = (
        Launch.from_environment(told | {"TORCHELASTIC_RESTART_COUNT": count, "TORCHELASTIC_RUN_ID": "none"})
        for count in ("0", "2")
    )
    assert started is not None
    assert restarted is not None
    assert restarted.restarts == 2
    assert started.run_id == restarted.run_id not in ("", "none"), "without an id torchrun's process is one"
    for broken in ({"RANK": "4"}, {"RANK": "x"}):
        with pytest.raises(ConfigError, match="environment: "):
            Launch.from_environment(told | broken)
    with pytest.raises(ConfigError, match="without MASTER_PORT"):
        Launch.from_environment({name: value for name, value in told.items() if name != "MASTER_PORT"})


def test_what_must_be_the_same_on_all_ranks_is_named_where_it_differs() -> None:
    check_equal("--data", ["a", "a", "a"])
    with pytest.raises(ConfigError, match=r"^--data: rank 0 has a, rank 2 has b; allowed: the same on all$"):
        check_equal("--data", ["a", "a", "b"])
    with pytest.raises(ConfigError, match=r"settings: rank 0 has {'lr': 1}, rank 1 has {'lr': 2}; allowed"):
        check_equal("settings", [{"lr": 1, "seed": 0}, {"lr": 2, "seed": 0}])
