"""The pipeline simulated event by event, to say where the closed form of planner.pace holds and where it does not.

Trainers with a ring each, replicas with a queue each, links that neighbouring trainers share. A trainer reads its fills
in order, and asks for the next microbatch when it is done with one. Times are drawn around their means; the same seed,
the same run.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass
from typing import Literal

from planner.errors import PlanError
from planner.pace import Stages

Kind = Literal["asked", "computed", "arrived", "stepped"]
#: More events than this take longer than anyone waits for a plan.
MAX_STEPS = 1_000_000
#: Some seconds.
MAX_TRAINER_STEPS = 500_000


@dataclass(frozen=True, kw_only=True)
class Jitter:
    """Relative standard deviation of each stage's time (lognormal, so never negative).

    in_step: the trainers wait for each other after every microbatch, as data-parallel ranks do."""

    teacher_frac: float = 0.0
    link_frac: float = 0.0
    student_frac: float = 0.0
    in_step: bool = False


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Means over the measured microbatches of all trainers."""

    step_s: float
    student_stall_frac: float
    teacher_stall_frac: float
    link_busy_frac: float
    num_steps: int


class _Run:
    def __init__(self, stages: Stages, jitter: Jitter, rng: random.Random) -> None:
        self.stages, self.jitter, self.rng = stages, jitter, rng
        self.events: list[tuple[float, int, Kind, int, int]] = []
        self.num_events = 0
        # When each is free, as a heap. More than there are requests at a time never work: as many give the same times.
        self.replica_free_s = [0.0] * min(stages.num_replicas, stages.num_trainers * stages.depth)
        self.link_free_s = [0.0] * stages.num_links
        self.teacher_busy_s = self.link_busy_s = 0.0
        trainers = range(stages.num_trainers)
        self.next_seq = [stages.depth for _ in trainers]
        self.wanted = [0 for _ in trainers]
        self.arrived: list[set[int]] = [set() for _ in trainers]
        self.idle_since_s: list[float | None] = [0.0 for _ in trainers]
        self.stall_s = [0.0 for _ in trainers]
        self.at_barrier: list[int] = []

    def draw(self, mean_s: float, frac: float) -> float:
        if frac == 0 or mean_s == 0:
            return mean_s
        variance = math.log(1 + frac * frac)
        return mean_s * self.rng.lognormvariate(-variance / 2, math.sqrt(variance))

    def push(self, at_s: float, kind: Kind, trainer: int, seq: int) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (at_s, self.num_events, kind, trainer, seq))

    def on_asked(self, now_s: float, trainer: int, seq: int) -> None:
        took_s = self.draw(self.stages.teacher_s, self.jitter.teacher_frac)
        done_s = max(now_s, self.replica_free_s[0]) + took_s
        heapq.heapreplace(self.replica_free_s, done_s)
        self.teacher_busy_s += took_s
        self.push(done_s, "computed", trainer, seq)

    def on_computed(self, now_s: float, trainer: int, seq: int) -> None:
        took_s = self.draw(self.stages.link_s, self.jitter.link_frac)
        link = trainer // math.ceil(self.stages.num_trainers / self.stages.num_links)
        done_s = max(now_s, self.link_free_s[link]) + took_s
        self.link_free_s[link] = done_s
        self.link_busy_s += took_s
        self.push(done_s + self.stages.latency_s / 2, "arrived", trainer, seq)

    def on_arrived(self, now_s: float, trainer: int, seq: int) -> None:
        self.arrived[trainer].add(seq)
        if self.idle_since_s[trainer] is not None:
            self.try_step(now_s, trainer)

    def try_step(self, now_s: float, trainer: int) -> None:
        """Begin the next step, if its states are there."""
        idle_since_s = self.idle_since_s[trainer]
        if idle_since_s is None or self.wanted[trainer] not in self.arrived[trainer]:
            return
        self.stall_s[trainer] += now_s - idle_since_s
        self.idle_since_s[trainer] = None
        took_s = self.draw(self.stages.student_s, self.jitter.student_frac)
        self.push(now_s + took_s, "stepped", trainer, self.wanted[trainer])

    def on_stepped(self, now_s: float, trainer: int, seq: int) -> None:
        self.arrived[trainer].discard(seq)
        self.wanted[trainer] = seq + 1
        self.push(now_s + self.stages.latency_s / 2, "asked", trainer, self.next_seq[trainer])
        self.next_seq[trainer] += 1
        if not self.jitter.in_step:
            self.idle_since_s[trainer] = now_s
            self.try_step(now_s, trainer)
            return
        self.at_barrier.append(trainer)
        if len(self.at_barrier) == self.stages.num_trainers:
            waiting, self.at_barrier = self.at_barrier, []
            for each in waiting:
                self.idle_since_s[each] = now_s
                self.try_step(now_s, each)


def simulate(
    stages: Stages, *, jitter: Jitter | None = None, num_steps: int = 400, num_warmup: int = 40, seed: int = 0
) -> Simulated:
    """Run every trainer for num_warmup and then num_steps microbatches.

    Raises PlanError: no step to measure, or more than anyone waits for."""
    if not 1 <= num_steps <= MAX_STEPS:
        raise PlanError(f"a simulation of {num_steps} steps; allowed: 1 to {MAX_STEPS}")
    most = MAX_TRAINER_STEPS // (num_steps + num_warmup)
    if stages.num_trainers > most:
        raise PlanError(
            f"a simulation of {stages.num_trainers:,} trainers; allowed: at most {most:,}, or the closed form"
        )
    if stages.num_trainers * stages.depth > MAX_TRAINER_STEPS:
        deepest = MAX_TRAINER_STEPS // stages.num_trainers
        raise PlanError(
            f"a simulation of {stages.num_trainers:,} trainers with {stages.depth:,} slots each; allowed: at most "
            f"{deepest:,} slots, or the closed form"
        )
    run = _Run(stages, jitter or Jitter(), random.Random(seed))
    for trainer in range(stages.num_trainers):
        for seq in range(stages.depth):
            run.push(stages.latency_s / 2, "asked", trainer, seq)
    handlers = {
        "asked": run.on_asked,
        "computed": run.on_computed,
        "arrived": run.on_arrived,
        "stepped": run.on_stepped,
    }
    begins_at = num_warmup * stages.num_trainers
    ends_at = begins_at + num_steps * stages.num_trainers
    steps, began_s, before = 0, 0.0, (0.0, 0.0, 0.0)
    while True:
        now_s, _, kind, trainer, seq = heapq.heappop(run.events)
        handlers[kind](now_s, trainer, seq)
        if kind != "stepped":
            continue
        steps += 1
        if steps == begins_at:
            began_s, before = now_s, (sum(run.stall_s), run.teacher_busy_s, run.link_busy_s)
        if steps == ends_at:
            break
    passed_s = now_s - began_s
    stall_s, teacher_s, link_s = (
        after - earlier
        for after, earlier in zip((sum(run.stall_s), run.teacher_busy_s, run.link_busy_s), before, strict=True)
    )
    return Simulated(
        step_s=passed_s / num_steps,
        student_stall_frac=stall_s / (passed_s * stages.num_trainers),
        teacher_stall_frac=max(0.0, 1 - teacher_s / (passed_s * stages.num_replicas)),
        link_busy_frac=min(1.0, link_s / (passed_s * stages.num_links)),
        num_steps=num_steps,
    )
