"""Sharded checkpoints: resumed on another number of ranks, started anew by torchrun, and exported as one model."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from ring.core.errors import ConfigError
from student.checkpoint import Checkpoint, TrainState
from student.parallel.checkpoint import load_whole_model
from student.rng import RngState, capture_rng, restore_rng
from student.train.resume import restore_generators
from tests.ranks.conftest import NUM_STEPS, StartWorld
from tests.ranks.test_runs import assert_same_curve
from tests.ranks.world import World
from tests.system.conftest import Inputs, Start
from tests.system.processes import Command, check_refusal, curve, environment, holding, is_held, parking

HALF = NUM_STEPS // 2
#: With a checkpoint every other step, that of step 2 is whole by then: that of step 4 waited for it.
CHECKPOINTED = 5


def settings(size: int, accum: int) -> tuple[object, ...]:
    return ("--steps", NUM_STEPS, "--batch-size", 8 // (size * accum), "--grad-accum", accum)


def keep_half(out: Path) -> None:
    """As if the run had been killed after half of its steps."""
    for path in (out / "checkpoints").glob("step-*"):
        if path.name != f"step-{HALF:08d}":
            shutil.rmtree(path)
    shutil.rmtree(out / "model")


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param((2, ("--fsdp",)), (4, ("--vocab-parallel", 2)), id="two to four", marks=pytest.mark.slow),
        pytest.param((4, ("--fsdp", "--vocab-parallel", 4)), (1, ()), id="four to one process", marks=pytest.mark.slow),
        pytest.param((1, ()), (2, ("--fsdp", "--vocab-parallel", 2)), id="one process to two"),
    ],
)
def test_a_run_goes_on_on_another_number_of_ranks(
    one_rank_curve: list[dict[str, Any]],
    endpoint: str,
    start_world: StartWorld,
    start_student: Start,
    first: tuple[int, tuple[object, ...]],
    then: tuple[int, tuple[object, ...]],
) -> None:
    def train(size: int, flags: tuple[object, ...], *more: object) -> Path:
        # To the bit it is another run.
        common = ("--teacher", endpoint, "--checkpoint-every", HALF, "--deterministic", "false", *flags, *more)
        started = start_student(*settings(1, 1), *common) if size == 1 else start_world(*common, size=size)
        started.succeed()
        return Path(started.out)

    out = train(*first)
    keep_half(out)
    assert train(*then, "--resume") == out
    assert_same_curve(out, one_rank_curve)
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == [
        f"step-{step:08d}" for step in (HALF, NUM_STEPS)
    ]


def test_on_as_many_ranks_it_goes_on_to_the_bit(endpoint: str, start_world: StartWorld) -> None:
    flags = ("--teacher", endpoint, "--checkpoint-every", HALF, "--fsdp")
    world = start_world(*flags, size=2)
    world.succeed()
    whole = curve(world.out)
    keep_half(world.out)
    start_world(*flags, "--resume", size=2).succeed()
    assert curve(world.out) == whole


@pytest.mark.slow
def test_another_number_of_sequences_a_step_is_refused(endpoint: str, start_world: StartWorld) -> None:
    few = ("--teacher", endpoint, "--steps", 2, "--warmup-steps", 0)
    start_world(*few, size=2).succeed()
    again = start_world(*few, "--grad-accum", 2, "--resume", size=4)
    check_refusal(again.first, 2, "--batch-size x --grad-accum x ranks was 4 x 1 x 2, now 2 x 2 x 4")
    assert again.wait() == [2, 2, 2, 2]


def test_a_world_that_is_started_anew_goes_on_from_the_last_checkpoint(
    one_rank_curve: list[dict[str, Any]], endpoint: str, start_world: StartWorld
) -> None:
    """What torchrun says to a world that it starts for the second time."""
    flags = ("--teacher", endpoint, "--checkpoint-every", 2, "--fsdp")
    world = start_world(*flags, size=2, command=holding(CHECKPOINTED))
    world.first.until_held_at(CHECKPOINTED)
    assert world.first.checkpoints
    world.ranks[1].send(signal.SIGKILL)
    world.first.let_go()
    world.wait()
    again = start_world(*flags, size=2, restarts=1)
    again.succeed()
    assert_same_curve(again.out, one_rank_curve)
    assert "resuming from" in again.first.errors


def kill(world: World) -> None:
    """As torchrun does when one of them is gone."""
    for rank in world.ranks:
        rank.send(signal.SIGKILL)
    world.wait()


def test_fills_of_the_former_generation_are_refused(
    one_rank_curve: list[dict[str, Any]], endpoint: str, start_teacher: Start, start_world: StartWorld
) -> None:
    """One of two replicas goes on answering the ranks that were killed, rightly in all else."""
    confused = start_teacher(command=("tests.ranks.former_teacher",))
    flags = ("--teacher", confused.endpoint, endpoint, "--checkpoint-every", 2, "--fsdp", "--run-name", "job")
    world = start_world(*flags, size=2, command=holding(CHECKPOINTED))
    world.first.until_held_at(CHECKPOINTED)
    assert world.first.checkpoints
    kill(world)
    again = start_world(*flags, size=2, restarts=1, command=parking(HALF))
    again.first.until_parked_at(HALF)  # and the other one can't go on without it
    for rank in again:
        rank.until(lambda: f"replica up: {confused.endpoint}" in rank.errors, "both are there")  # noqa: B023
    for rank in again:
        rank.drive_on()
    again.succeed()
    assert_same_curve(again.out, one_rank_curve)
    assert again.summary["drops_by_cause"]["wrong_epoch"] > 0
    (said, *_) = (line for line in again.first.errors.splitlines() if "student epoch is" in line)
    assert confused.endpoint in said


@pytest.mark.parametrize("transport", ["zmq", pytest.param("shm", marks=pytest.mark.slow)])
def test_what_the_former_generation_asked_for_never_reaches_the_next_one(
    one_rank_curve: list[dict[str, Any]], start_teacher: Start, start_world: StartWorld, transport: str
) -> None:
    """A stopped teacher holds what it was asked for. When it wakes up, the next generation is there."""
    teacher = start_teacher(command=("tests.ranks.stopping_teacher", "12", "2"))
    flags = ("--teacher", teacher.endpoint, "--checkpoint-every", 2, "--transport", transport, "--run-name", "job")
    world = start_world(*flags, size=2)
    teacher.until_held()
    world.first.until(lambda: bool(world.first.checkpoints), "a checkpoint is there")
    kill(world)
    again = start_world(*flags, size=2, restarts=1)
    again.first.until(lambda: "started anew" in again.first.errors, "it is about to ask")
    teacher.send(signal.SIGCONT)
    again.succeed()
    assert_same_curve(again.out, one_rank_curve)
    assert again.summary["drops"] == 0


def test_a_restart_goes_on_with_no_run_but_its_own(endpoint: str, start_world: StartWorld) -> None:
    """The first start is refused, --out holds another run; torchrun's next one must be too."""
    flags = ("--teacher", endpoint, "--steps", 2, "--warmup-steps", 0)
    theirs = start_world(*flags, size=1, run_id="theirs")
    theirs.succeed()
    for restarts in (0, 1):
        ours = start_world(*flags, size=1, run_id="ours", restarts=restarts)
        check_refusal(ours.first, 2, "holds a run already")
    again = start_world(*flags, size=1, run_id="theirs", restarts=1)
    again.succeed()
    assert "resuming from" in again.first.errors


def test_shards_are_exported_as_the_model_that_the_run_ended_with(
    inputs: Inputs, endpoint: str, start_world: StartWorld, tmp_path: Path
) -> None:
    world = start_world("--teacher", endpoint, "--fsdp", "--vocab-parallel", 2, size=2)
    world.succeed()
    export = Command("bench.cli", "export", world.out, tmp_path / "exported", cwd=tmp_path)
    export.succeed()
    assert f"after step {NUM_STEPS}" in export.output
    auto: Any = transformers.AutoModelForCausalLM
    ours, theirs = (auto.from_pretrained(path).state_dict() for path in (world.out / "model", tmp_path / "exported"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    written, given = (
        json.loads((path / "generation_config.json").read_text()) for path in (world.out / "model", inputs.student)
    )
    assert written == given
    assert json.loads((world.out / "model/config.json").read_text())["dtype"] == "float32"
    torn = next((world.out / "checkpoints").glob(f"step-{NUM_STEPS:08d}/shards/*"))
    torn.write_bytes(torn.read_bytes()[:-1])
    refused = Command("bench.cli", "export", world.out, tmp_path / "other", cwd=tmp_path)
    assert refused.wait() == 2
    assert "no whole checkpoint" in refused.errors.splitlines()[-1]


def state_of(*generators: RngState) -> TrainState:
    return TrainState(step=8, position=64, config_hash="c", rng=generators)


def test_shards_that_cannot_be_read_are_refused_in_a_line(tmp_path: Path) -> None:
    """They were whole when rank 0 looked; a rank of another host may find them otherwise."""
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"no such thing")
    with pytest.raises(ConfigError, match="its shards can't be read") as refused:
        load_whole_model(Checkpoint(tmp_path, state_of()), torch.nn.Linear(2, 2))
    assert "Traceback" not in str(refused.value)
    (tmp_path / "shards" / "shard-00001-model-00001-of-00001.safetensors").unlink()
    save_file({"model/weight": torch.zeros(2, 2)}, tmp_path / "shards" / "model-00001-of-00001.safetensors")
    with pytest.raises(ConfigError, match=r"its shards can't be read.*bias") as refused:
        load_whole_model(Checkpoint(tmp_path, state_of()), torch.nn.Linear(2, 2))
    assert len(str(refused.value).splitlines()) == 1


def test_ranks_without_a_past_draw_what_no_other_rank_draws() -> None:
    before, drawn = capture_rng(), []
    try:
        for rank in range(5):
            restore_generators(state_of(before, before), rank=rank, seed=11)
            drawn.append((torch.rand(()).item(), random.random(), float(np.random.random())))
    finally:
        restore_rng(before)
    assert drawn[0] == drawn[1], "as they left their generators"
    assert all(len(set(numbers)) == 4 for numbers in zip(*drawn, strict=True))


@pytest.mark.slow
def test_torchrun_starts_a_world_anew_that_lost_a_rank(
    one_rank_curve: list[dict[str, Any]], inputs: Inputs, endpoint: str, tmp_path: Path
) -> None:
    """The real torchrun: it sees the death, ends the others, and starts all ranks again."""
    out = tmp_path / "out"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
        *("-m", *holding(CHECKPOINTED), *map(str, (*inputs.settings, *settings(2, 1)))),
        *("--teacher", endpoint, "--checkpoint-every", "2", "--fsdp", "--out", str(out)),
    ]
    log = tmp_path / "torchrun.log"
    with log.open("w") as file:
        agent = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=file, stderr=subprocess.STDOUT)
    try:
        killed = False
        while agent.poll() is None:
            if held := [rank for rank in children(agent.pid) if is_held(rank)]:
                if not killed:
                    killed = bool(list(out.glob("checkpoints/step-*")))
                    os.kill(children(agent.pid)[-1], signal.SIGKILL)
                for rank in held:
                    os.kill(rank, signal.SIGCONT)
            time.sleep(0.01)
        assert agent.wait() == 0, log.read_text()[-3000:]
    finally:
        agent.kill()
        agent.wait()
    assert killed
    assert "going on from the last checkpoint" in log.read_text()
    assert_same_curve(out, one_rank_curve)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
