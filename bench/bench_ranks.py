"""`python -m bench ranks`: what many ranks cost: the loss with its heads cut over a group, and a ring for every rank.

The loss: each of K processes has rows of its own and computes loss and gradients, once with whole heads and once with
1/K of both: the products are as many, so that the exchange is what is left. The rings: synthetic teachers that compute
nothing fill the rings of several trainer processes, which release each slot at once: what is left is the ring's cost.
A machine with fewer cores than processes measures its scheduler as well: the record says how many there were.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.multiprocessing.spawn import spawn

from bench.processes import teacher_process
from bench.records import RECORDS_DIR, Check, Record, Spread, write_record
from bench.report import console, exit_code, print_checks
from bench.synthetic_student import requests_of
from bench.synthetic_teacher import TOKEN_MAP_HASH
from ring.command import flag, parse, run
from ring.core.errors import ConfigError
from student.config import TrainConfig
from student.loss import Head, KDLoss
from student.parallel.ranks import Ranks
from student.train.teachers import connected

PROG = "bench.ranks"
#: Students x replicas.
RINGS = ((1, 1), (2, 1), (4, 1), (1, 2), (1, 8), (4, 8))
QUICK_RINGS = ((1, 1), (2, 2))
TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True, kw_only=True)
class RanksBenchConfig:
    """Raises ConfigError on construction: a value out of its range."""

    ranks: int = flag(2, "processes that share the heads of the loss")
    rows: int = flag(512, "rows of each of them, and of a fill")
    hidden_size: int = flag(512, "elements of a state, of both models")
    vocab_size: int = flag(32768, "columns of both heads")
    rounds: int = flag(5, "times that each is measured")
    fills: int = flag(200, "fills that each ring takes in a round")
    quick: bool = flag(False, "one round of few fills, to see that it runs")
    out: str = flag(str(RECORDS_DIR), "where the record is written", metavar="DIR")
    debug: bool = flag(False, "print tracebacks")

    def __post_init__(self) -> None:
        for name in ("rows", "hidden_size", "vocab_size", "rounds", "fills"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be >= 1, got {getattr(self, name)}")
        if self.ranks < 2:
            raise ConfigError(f"--ranks must be >= 2, got {self.ranks}")


@dataclass(frozen=True)
class RingTimes:
    """One trainer process: fills a second, the part of the time in which it waited, CPU seconds of a fill."""

    fills_per_s: float
    stall_frac: float
    cpu_s: float


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 1 if a measurement failed, 2 for bad usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    code = 0

    def command() -> None:
        nonlocal code
        config = parse(RanksBenchConfig, arguments, prog=PROG, description=(__doc__ or "").split("\n")[0])
        code = bench(config, console())

    return run(command, prog=PROG, debug="--debug" in arguments) or code


def bench(config: RanksBenchConfig, out: Console) -> int:
    """Measure, print, record; returns the exit code. Raises ConfigError."""
    rounds, fills = (1, 20) if config.quick else (config.rounds, config.fills)
    measured: dict[str, Spread] = {}
    whole_s, cut_s = loss_times(config, rounds)
    measured["loss, whole heads: s"] = Spread.of(whole_s)
    measured["loss, heads cut: s"] = Spread.of(cut_s)
    overhead = Spread.of([cut / whole for cut, whole in zip(cut_s, whole_s, strict=True)]).median
    checks = [Check(name=f"loss: heads cut over {config.ranks}, over whole heads", measured=overhead, unit="x")]
    moved = 0
    for num_students, num_replicas in QUICK_RINGS if config.quick else RINGS:
        times = ring_times(config, num_students, num_replicas, fills=fills)
        name = f"{num_students} ranks, {num_replicas} replicas"
        measured[f"{name}: stall_frac"] = Spread.of([t.stall_frac for t in times])
        measured[f"{name}: cpu_s"] = Spread.of([t.cpu_s for t in times])
        total = sum(t.fills_per_s for t in times)
        moved += num_students * fills * config.rows * config.hidden_size * 2
        cpu_ms = measured[f"{name}: cpu_s"].median * 1e3
        checks.append(Check(name=f"{name}: fills a second, all ranks", measured=total, at_most=False))
        checks.append(Check(name=f"{name}: CPU of a fill at the trainer", measured=cpu_ms, unit="ms"))
    record = Record(
        bench="ranks",
        case="loss and rings over ranks",
        settings={
            **{name: getattr(config, name) for name in ("ranks", "rows", "hidden_size", "vocab_size")},
            "rounds": rounds,
            "fills": fills,
            "cpus": len(os.sched_getaffinity(0)),
        },
        measured=measured,
        bytes_moved=moved,
        checks=tuple(checks),
    )
    print_checks(out, "many ranks", checks)
    out.print(f"record: {write_record(record, directory=Path(config.out))}", highlight=False)
    return exit_code(checks)


# ---- the loss ------------------------------------------------------------------------------------------------------


def loss_times(config: RanksBenchConfig, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of forward and backward on the slowest rank, a value a round: with whole heads, and with cut ones."""
    times: Any = multiprocessing.get_context("spawn").SimpleQueue()
    arguments = (config, rounds, _free_port(), times)
    spawn(_loss_rank, arguments, nprocs=config.ranks)  # type: ignore[no-untyped-call]
    whole_s, cut_s = times.get()
    return list(whole_s), list(cut_s)


def _loss_rank(rank: int, config: RanksBenchConfig, rounds: int, port: int, times: Any) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=config.ranks, timeout=TIMEOUT)
    group = dist.group.WORLD
    width = -(-config.vocab_size // config.ranks)
    start, stop = min(rank * width, config.vocab_size), min((rank + 1) * width, config.vocab_size)
    cut = {"vocab_group": group, "group_rows": [config.rows] * config.ranks}
    ways: list[tuple[int, int, dict[str, Any]]] = [(0, config.vocab_size, {}), (start, stop, cut)]
    found: list[list[float]] = [[], []]
    for _ in range(rounds + 1):
        for way, (first, last, options) in enumerate(ways):
            seconds = torch.tensor([_loss_s(config, first, last, options)])
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            found[way].append(float(seconds))
    if rank == 0:
        # Without the first, which touches its memory for the first time.
        times.put((found[0][1:], found[1][1:]))
    dist.destroy_process_group()


def _loss_s(config: RanksBenchConfig, first: int, last: int, options: dict[str, Any]) -> float:
    generator = torch.Generator().manual_seed(1)
    shape = (config.rows, config.hidden_size)
    student_NH = torch.randn(shape, generator=generator).to(torch.bfloat16).requires_grad_()
    teacher_NH = torch.randn(shape, generator=generator).to(torch.bfloat16)
    weight_VH = torch.randn(last - first, config.hidden_size, generator=generator) / 20
    labels_N = torch.randint(config.vocab_size, (config.rows,), generator=generator)
    heads = [Head(weight=w, vocab_start=first) for w in (weight_VH.clone().requires_grad_(), weight_VH)]
    loss = KDLoss(kd_weight=0.9, ce_weight=0.1, workspace_bytes=256 * 2**20)
    dist.barrier()
    begin_s = time.perf_counter()
    out = loss(student_NH, heads[0], teacher_NH, heads[1], labels_N, all_rows=True, **options)
    torch.autograd.backward(out.loss)
    return time.perf_counter() - begin_s


# ---- the rings -----------------------------------------------------------------------------------------------------


def ring_times(config: RanksBenchConfig, num_students: int, num_replicas: int, *, fills: int) -> list[RingTimes]:
    """Each trainer process's, while all of them ask all replicas."""
    cpus = sorted(os.sched_getaffinity(0))
    arguments = ["--rows", str(config.rows), "--hidden-size", str(config.hidden_size), "--vocab-size", "2048"]
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        endpoints = [
            stack.enter_context(
                teacher_process(
                    "bench.synthetic_teacher",
                    [*arguments, "--forward-s", "0"],
                    cpu=cpus[number % len(cpus)],
                    log=Path(scratch) / f"replica-{number}.log",
                )
            ).endpoint
            for number in range(num_replicas)
        ]
        times: Any = multiprocessing.get_context("spawn").SimpleQueue()
        world = (num_students, tuple(endpoints), config, fills, times)
        spawn(_ring_rank, world, nprocs=num_students)  # type: ignore[no-untyped-call]
        return [times.get() for _ in range(num_students)]


def _ring_rank(
    rank: int, num_students: int, endpoints: tuple[str, ...], config: RanksBenchConfig, fills: int, times: Any
) -> None:
    torch.set_num_threads(1)
    ranks = Ranks.alone(torch.device("cpu"))
    ranks.rank, ranks.world_size = rank, num_students
    train = TrainConfig(teacher=endpoints, ring_depth=4, run_name=f"bench-{secrets.token_hex(2)}")
    requests = requests_of(config.rows, 2048, num=8)
    with connected(
        train,
        token_map_hash=TOKEN_MAP_HASH,
        vocab_size=2048,
        max_rows=config.rows,
        max_tokens=config.rows,
        max_document_tokens=config.rows,
        ranks=ranks,
    ) as teachers:
        ring, asked = teachers.ring, 0
        begin_s, begin_cpu_s, before = time.perf_counter(), time.process_time(), ring.stats()
        for _ in range(fills):
            while asked < fills and ring.can_submit:
                ring.submit(asked, requests[asked % len(requests)])
                asked += 1
            ring.next_lease().release()
        wall_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
        stall_s = ring.stats().student_stall_s - before.student_stall_s
    times.put(RingTimes(fills / wall_s, stall_s / wall_s, cpu_s / fills))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
