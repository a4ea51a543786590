"""How fast each stage of the pipeline is, which one decides, and how deep the ring must be.

Three stages work at the same time: teachers together, the link, trainers together. In the steady state the slowest
sets the pace and the others wait for it. A ring that is too shallow is a fourth limit: a slot is asked for, filled, and
read before it is asked for again, so that K slots give at most K microbatches in the time of one such round.

planner.simulate holds all this against a simulation. Without jitter it is exact for one trainer at any depth. For
several, and at jitter of 10 %, it holds within 5 % where the ring is as deep as `needed_depth` says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from planner.architecture import ModelShape
from planner.loss_costs import LossShape, loss_flops

Stage = Literal["teacher", "link", "student", "depth"]


@dataclass(frozen=True, kw_only=True)
class StudentFlops:
    """FLOPs of one token of training, by part."""

    body: float
    attention: float
    loss: float

    @property
    def total(self) -> float:
        return self.body + self.attention + self.loss


def attention_flops(model: ModelShape, *, sequence_tokens: int) -> float:
    """Of one token's forward pass: scores and their product with the values, causal (half of the pairs); a delta rule
    reads and writes its state."""
    total = 0.0
    for layer in model.layers:
        attention = layer.attention
        if attention.kind == "delta":
            total += layer.count * 8.0 * attention.state_width
            continue
        seen = sequence_tokens / 2
        if attention.kind == "sliding" and attention.window_tokens is not None:
            seen = min(seen, float(attention.window_tokens))
        total += layer.count * 2.0 * seen * (attention.query_width + attention.output_width)
    return total


def teacher_flops(model: ModelShape, *, sequence_tokens: int) -> float:
    """Of one token's pass: two for each parameter that it meets; no head."""
    return 2.0 * model.active_body + attention_flops(model, sequence_tokens=sequence_tokens)


def student_flops(
    model: ModelShape, shape: LossShape, *, tokens: int, sequence_tokens: int, checkpointing: bool, mode: str
) -> StudentFlops:
    """Of one token of training: forward, twice that backward, and once more where activations are recomputed.

    shape: the loss's call for a microbatch of `tokens`."""
    passes = 4.0 if checkpointing else 3.0
    return StudentFlops(
        body=passes * 2.0 * model.active_body,
        attention=passes * attention_flops(model, sequence_tokens=sequence_tokens),
        loss=loss_flops(shape, "keep" if mode == "keep" else "recompute") / tokens,
    )


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Seconds that each stage takes for one microbatch of one trainer.

    teacher_s: one replica's pass; num_replicas, num_trainers: how many there are of each. link_s: on one of num_links,
    each of which the trainers of a node share; latency_s: a round trip. depth: slots of each trainer's ring.
    jitter_frac: relative standard deviation of a trainer's step where trainers wait for each other after each.
    """

    teacher_s: float
    link_s: float
    student_s: float
    latency_s: float = 0.0
    num_replicas: int = 1
    num_trainers: int = 1
    num_links: int = 1
    depth: int = 3
    jitter_frac: float = 0.0

    @property
    def slowest_student_s(self) -> float:
        """Mean of the slowest trainer's step: of several that jitter, the mean of the largest."""
        return self.student_s * (1 + self.jitter_frac * expected_largest(self.num_trainers))

    @property
    def busiest_link_s(self) -> float:
        """Of a microbatch of each trainer on the link that most of them share."""
        return self.link_s * math.ceil(self.num_trainers / self.num_links)

    @property
    def fetch_s(self) -> float:
        """From the request to the fill, with nothing in the way."""
        return self.latency_s + self.teacher_s + self.link_s


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The steady state. step_s: between two microbatches of one trainer. by_stage_s: what it would be if only that
    stage counted. *_stall_frac: part of the time that a side waits for the other; not trainers for each other."""

    step_s: float
    by_stage_s: dict[Stage, float]
    bottleneck: Stage
    margin: float
    student_stall_frac: float
    teacher_stall_frac: float
    link_busy_frac: float


def expected_largest(num: int) -> float:
    """Mean of the largest of `num` standard normal draws (Blom's approximation, within 5 %)."""
    return 0.0 if num < 2 else NormalDist().inv_cdf((num - 0.375) / (num + 0.25))


def pace(stages: Stages) -> Pace:
    """margin: the slowest stage's time over the next one's."""
    trainers = stages.num_trainers
    by_stage: dict[Stage, float] = {
        "teacher": stages.teacher_s * trainers / stages.num_replicas,
        "link": stages.busiest_link_s,
        "student": stages.slowest_student_s,
        "depth": (stages.fetch_s + stages.slowest_student_s) / stages.depth,
    }
    ordered = sorted(by_stage, key=lambda stage: by_stage[stage], reverse=True)
    step_s = by_stage[ordered[0]]
    # Between stages; the ring's depth is a setting.
    real = sorted((by_stage["teacher"], by_stage["link"], by_stage["student"]), reverse=True)
    return Pace(
        step_s=step_s,
        by_stage_s=by_stage,
        bottleneck=ordered[0],
        margin=real[0] / real[1] if real[1] else math.inf,
        student_stall_frac=1 - stages.slowest_student_s / step_s,
        teacher_stall_frac=1 - by_stage["teacher"] / step_s,
        link_busy_frac=by_stage["link"] / step_s,
    )


def needed_depth(stages: Stages, *, jitter_s: float = 0.0) -> int:
    """Slots that hide a fetch, and its jitter, behind the steps: one is read while the others are on their way.

    Where trainers share teachers and link, a fetch also waits for theirs: one slot more."""
    trainers = stages.num_trainers
    busiest_s = max(stages.slowest_student_s, stages.teacher_s * trainers / stages.num_replicas, stages.busiest_link_s)
    slots = (stages.fetch_s + jitter_s + stages.slowest_student_s) / busiest_s
    return max(1, math.ceil(slots - 1e-9)) + int(trainers > 1)


def needed_replicas(*, teacher_s: float, student_s: float, num_trainers: int) -> int:
    """Replicas that keep all trainers busy."""
    return max(1, math.ceil(teacher_s * num_trainers / student_s - 1e-9))


def needed_bytes_per_s(*, microbatch_bytes: int, step_s: float, num_trainers: int) -> float:
    """What all trainers together receive."""
    return microbatch_bytes * num_trainers / step_s
