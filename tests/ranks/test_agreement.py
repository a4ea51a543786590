"""What the ranks make of how each of them stands, and of what torchrun says to them."""

from __future__ import annotations

import os
import socket
from dataclasses import replace

import pytest

from ring.core.errors import ConfigError
from student.config import TrainConfig
from student.parallel.agreement import Standing, decide
from student.parallel.ranks import Launch, check_equal
from student.train.run import _transports, shared_settings
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
    job = Launch.from_environment(told | {"TORCHELASTIC_RUN_ID": "a job", "TORCHELASTIC_RESTART_COUNT": "2"})
    assert job is not None
    assert job == Launch(rank=1, world_size=4, local_rank=1, restarts=2, run_id=job.run_id)
    for broken in ({"RANK": "4"}, {"RANK": "x"}):
        with pytest.raises(ConfigError, match="environment: "):
            Launch.from_environment(told | broken)
    with pytest.raises(ConfigError, match="without MASTER_PORT"):
        Launch.from_environment({name: value for name, value in told.items() if name != "MASTER_PORT"})


def run_id(environment: dict[str, str]) -> str:
    launch = Launch.from_environment({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"} | environment)
    assert launch is not None
    return launch.run_id


@pytest.mark.parametrize("given", [{}, {"TORCHELASTIC_RUN_ID": "none"}, {"TORCHELASTIC_RUN_ID": "a job"}])
def test_a_run_is_known_by_the_torchrun_that_started_it_whatever_id_it_was_given(given: dict[str, str]) -> None:
    """Scripts give one --rdzv-id to all of their runs. The process here is a child of another one than we are."""
    address = {"MASTER_ADDR": "h", "MASTER_PORT": "1"}
    ours = run_id(address | given)
    assert ours == run_id(address | given | {"TORCHELASTIC_RESTART_COUNT": "2"})
    assert ours != run_id(address | given | {"TORCHELASTIC_RUN_ID": "another job"})
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write_end, run_id(address | given).encode())
        os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as theirs:
        found = theirs.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    assert found.endswith(f" of {socket.gethostname()}")
    assert found != ours


def test_each_machine_may_have_settings_of_its_own_where_they_change_no_number() -> None:
    here = TrainConfig(bind_host="10.0.0.1", cache_dir="/a", auth="/keys/a", threads=4, device="cuda:0")
    there = TrainConfig(bind_host="10.0.0.2", cache_dir="/b", auth="/keys/b", threads=8, device="cuda:1", debug=True)
    assert shared_settings(here) == shared_settings(there)
    for change in ({"lr": 1e-3}, {"auth": None}, {"teacher": ("tcp://10.0.0.3:5555",)}):
        assert shared_settings(replace(here, **change)) != shared_settings(here)
    exact, other = (TrainConfig(deterministic=True, threads=threads) for threads in (4, 8))
    assert shared_settings(exact) != shared_settings(other), "of sums"


def test_a_replica_that_ranks_reach_in_several_ways_is_told_with_all_of_them() -> None:
    ways = [{"transports": {"a": "zmq", "b": "shm"}}, {"transports": {"a": "shm"}}, {"transports": {"a": "zmq"}}, {}]
    assert _transports(ways) == {"a": "shm, zmq", "b": "shm"}


def test_what_must_be_the_same_on_all_ranks_is_named_where_it_differs() -> None:
    check_equal("--data", ["a", "a", "a"])
    with pytest.raises(ConfigError, match=r"^--data: rank 0 has a, rank 2 has b; allowed: the same on all$"):
        check_equal("--data", ["a", "a", "b"])
    with pytest.raises(ConfigError, match=r"settings: rank 0 has {'lr': 1}, rank 1 has {'lr': 2}; allowed"):
        check_equal("settings", [{"lr": 1, "seed": 0}, {"lr": 2, "seed": 0}])
