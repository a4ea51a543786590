"""A ring for every rank: trainers that release each fill at once, and teachers that compute nothing.

What is left is what the ring, the transport and the control plane cost. All processes live as long as the bench, and
every round goes through all cases, so that a case meets the same machine as the one that it is compared with. In every
case each ring has four requests under way at least, and so has each replica: whoever has less to do goes to sleep after
each fill and is woken for the next, which costs it half as much again and says nothing of ranks and replicas.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn

from bench.processes import TeacherProcess, teacher_process
from bench.synthetic_student import requests_of
from bench.synthetic_teacher import TOKEN_MAP_HASH
from ring.core.errors import DisaggKDError
from ring.prefetch import Ring
from student.config import TrainConfig
from student.parallel.ranks import Ranks
from student.train.teachers import connected

VOCAB = 2048
#: Requests that each ring and each replica has under way, at least.
IN_FLIGHT = 4
#: Any stretch of a round takes a fraction of a second.
TIMEOUT_S = 300.0


class RankFailed(DisaggKDError):
    """A trainer process of the bench ended."""


@dataclass(frozen=True, kw_only=True)
class RingCase:
    """So many trainer processes, each with a ring to so many replicas."""

    ranks: int
    replicas: int

    @property
    def name(self) -> str:
        return f"{self.ranks} x {self.replicas}"

    @property
    def depth(self) -> int:
        """Of each ring."""
        return max(IN_FLIGHT, IN_FLIGHT * self.replicas // self.ranks)


@dataclass(frozen=True, kw_only=True)
class RingWork:
    """rows, hidden_size: of a fill. fills: that each ring takes in a round."""

    cases: Sequence[RingCase]
    rounds: int
    rows: int
    hidden_size: int
    fills: int


@dataclass(frozen=True, kw_only=True)
class RingTimes:
    """One case in one round. `stall_frac`: mean part of the time in which a rank waited; CPU seconds are of a fill,
    of the trainer's whole process and of all replicas."""

    fills_per_s: float
    stall_frac: float
    trainer_cpu_s: float
    teacher_cpu_s: float


def measure(work: RingWork) -> dict[RingCase, list[RingTimes]]:
    """Of each case, a value a round. Raises TeacherFailed, RankFailed: one of the processes ended."""
    cpus = sorted(os.sched_getaffinity(0))
    arguments = ["--rows", str(work.rows), "--hidden-size", str(work.hidden_size), "--vocab-size", str(VOCAB)]
    num_ranks = max(case.ranks for case in work.cases)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        replicas = [
            stack.enter_context(
                teacher_process(
                    "bench.synthetic_teacher",
                    [*arguments, "--forward-s", "0"],
                    cpu=cpus[number % len(cpus)],
                    log=Path(scratch) / f"replica-{number}.log",
                )
            )
            for number in range(max(case.replicas for case in work.cases))
        ]
        context = multiprocessing.get_context("spawn")
        found: Any = context.SimpleQueue()
        meeting = context.Barrier(num_ranks + 1, timeout=TIMEOUT_S)
        endpoints = tuple(replica.endpoint for replica in replicas)
        processes = spawn(  # type: ignore[no-untyped-call]
            _rank, (endpoints, work, meeting, found), nprocs=num_ranks, join=False
        )
        try:
            times = _rounds(work, replicas, meeting, found)
        except threading.BrokenBarrierError as error:
            # Raises what the rank that broke it had to say.
            processes.join(timeout=TIMEOUT_S)
            raise RankFailed("a rank of the bench did not come to a round") from error
        finally:
            meeting.abort()
        processes.join()
    return times


def _rounds(
    work: RingWork, replicas: Sequence[TeacherProcess], meeting: Any, found: Any
) -> dict[RingCase, list[RingTimes]]:
    times: dict[RingCase, list[RingTimes]] = {case: [] for case in work.cases}
    # The first round is not kept: memory is touched for the first time.
    for number in range(1 + work.rounds):
        for case in work.cases:
            meeting.wait()
            before_s = sum(replica.cpu_s() for replica in replicas)
            meeting.wait()
            meeting.wait()
            teacher_s = sum(replica.cpu_s() for replica in replicas) - before_s
            own = [found.get() for _ in range(case.ranks)]
            if number:
                times[case].append(
                    RingTimes(
                        fills_per_s=sum(work.fills / wall_s for wall_s, _, _ in own),
                        stall_frac=sum(stall_s / wall_s for wall_s, _, stall_s in own) / case.ranks,
                        trainer_cpu_s=sum(cpu_s for _, cpu_s, _ in own) / (case.ranks * work.fills),
                        teacher_cpu_s=teacher_s / (case.ranks * work.fills),
                    )
                )
    return times


def _rank(rank: int, endpoints: tuple[str, ...], work: RingWork, meeting: Any, found: Any) -> None:
    torch.set_num_threads(1)
    try:
        for _ in range(1 + work.rounds):
            for case in work.cases:
                if rank < case.ranks:
                    found.put(_in_case(rank, case, endpoints[: case.replicas], work, meeting))
                else:
                    for _ in range(3):
                        meeting.wait()
    except BaseException:
        meeting.abort()
        raise


def _in_case(
    rank: int, case: RingCase, endpoints: tuple[str, ...], work: RingWork, meeting: Any
) -> tuple[float, float, float]:
    """Wall time, CPU time of this process, and how long it waited for fills."""
    ranks = Ranks.alone(torch.device("cpu"))
    ranks.rank, ranks.world_size = rank, case.ranks
    train = TrainConfig(teacher=endpoints, ring_depth=case.depth, run_name=f"bench-{secrets.token_hex(2)}")
    with connected(
        train,
        token_map_hash=TOKEN_MAP_HASH,
        vocab_size=VOCAB,
        max_rows=work.rows,
        max_tokens=work.rows,
        max_document_tokens=work.rows,
        fingerprint=None,
        ranks=ranks,
    ) as teachers:
        meeting.wait()
        meeting.wait()
        times = _take(teachers.ring, work)
        meeting.wait()
    return times


def _take(ring: Ring, work: RingWork) -> tuple[float, float, float]:
    requests, asked = requests_of(work.rows, VOCAB, num=8), 0
    begin_s, begin_cpu_s, before = time.perf_counter(), time.process_time(), ring.stats()
    for _ in range(work.fills):
        while asked < work.fills and ring.can_submit:
            ring.submit(asked, requests[asked % len(requests)])
            asked += 1
        ring.next_lease().release()
    wall_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
    return wall_s, cpu_s, ring.stats().student_stall_s - before.student_stall_s
