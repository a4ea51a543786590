"""The planner's model of the pipeline against the pipeline: real service, ring and transport, real times.

What the machine does meanwhile adds to the times, and how much, nobody can say: no test here asks how long something
took. What is certain is that the pipeline keeps the order that the model says it keeps. So the times that each step's
stages took are recorded, and the model's timeline of just these times is computed event by event: nothing may be done
earlier. The closed form has to be that timeline's pace. Whether a step takes as long as the form says, within a tenth,
is measured by `python -m bench report`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch

from bench.bench_pipeline import TOKEN_MAP_HASH
from bench.processes import TeacherProcess, choose_cores, teacher_process
from bench.synthetic_student import requests_of
from planner.pace import Stages, pace
from ring.prefetch import Ring
from student.config import TrainConfig
from student.parallel.ranks import Ranks
from student.train.teachers import connected

ROWS, HIDDEN, VOCABULARY = 64, 64, 128
TEACHER_S = 0.06
NUM_STEPS = 20
#: No wait here takes a tenth of it.
HANG_GUARD_S = 120.0
#: Of two clocks' readings, and of sums of them.
ROUNDING_S = 1e-6


@dataclass(frozen=True)
class Step:
    """`asked_s`, `done_s`: when its request went out and when the trainer was done with it, on this process's clock.
    `teacher_s`, `student_s`: how long both took."""

    asked_s: float
    done_s: float
    teacher_s: float
    student_s: float


def timeline(steps: Sequence[tuple[float, float]], *, depth: int) -> list[float]:
    """When the trainer is done with each step at the earliest, event by event; the first `depth` are asked for at 0.

    steps: seconds of teacher and trainer. One pass at a time; steps in order; a slot is asked for again when read."""
    computed_s = 0.0
    done_s: list[float] = []
    for number, (teacher_s, student_s) in enumerate(steps):
        asked_s = done_s[number - depth] if number >= depth else 0.0
        computed_s = max(asked_s, computed_s) + teacher_s
        done_s.append(max(computed_s, done_s[-1] if done_s else 0.0) + student_s)
    return done_s


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TeacherProcess]:
    log = tmp_path_factory.mktemp("teacher") / "log"
    arguments = [str(number) for number in (TEACHER_S, ROWS, HIDDEN, VOCABULARY)]
    with teacher_process("tests.planner.sleeping_teacher", arguments, cpu=choose_cores().teacher, log=log) as process:
        yield process


@pytest.fixture
def ring(teacher: TeacherProcess, depth: int) -> Iterator[Ring]:
    """The trainer's own connection. However late the machine is, no request is asked a second time."""
    config = TrainConfig(
        teacher=(teacher.endpoint,),
        transport="shm",
        ring_depth=depth,
        run_name="pace",
        **dict.fromkeys(("peer_timeout", "request_timeout", "teacher_timeout"), HANG_GUARD_S),
    )
    with connected(
        config,
        token_map_hash=TOKEN_MAP_HASH,
        vocab_size=VOCABULARY,
        max_rows=ROWS,
        max_tokens=ROWS,
        max_document_tokens=ROWS,
        fingerprint=None,
        ranks=Ranks.alone(torch.device("cpu")),
    ) as teachers:
        yield teachers.ring


def run_pipeline(ring: Ring, *, student_s: float, depth: int) -> list[Step]:
    """Steps of a trainer that sleeps, and asks for the next request when it has read a slot, as the real one does."""
    requests = requests_of(ROWS, VOCABULARY, num=4)
    asked_s: list[float] = []
    steps: list[Step] = []

    def ask() -> None:
        asked_s.append(time.monotonic())
        ring.submit(len(asked_s) - 1, requests[len(asked_s) % len(requests)])

    for _ in range(depth):
        ask()
    while len(steps) < NUM_STEPS:
        lease = ring.next_lease(timeout_s=HANG_GUARD_S)
        began_s = time.monotonic()
        time.sleep(student_s)
        done_s = time.monotonic()
        steps.append(Step(asked_s[lease.seq], done_s, lease.header.forward_s, done_s - began_s))
        lease.release()
        ask()
    for _ in range(depth):
        ring.next_lease(timeout_s=HANG_GUARD_S).release()
    return steps


def form(teacher_s: float, student_s: float, depth: int) -> float:
    """The planner's time of a step."""
    return pace(Stages(teacher_s=teacher_s, link_s=0.0, student_s=student_s, depth=depth)).step_s


@pytest.mark.slow
@pytest.mark.parametrize(
    ("student_s", "depth", "bottleneck"),
    [(0.12, 3, "student"), (0.02, 3, "teacher"), (0.06, 1, "depth"), (0.12, 2, "student")],
    ids=["trainer decides", "teacher decides", "ring decides", "two slots are enough"],
)
def test_the_pipeline_keeps_the_order_whose_pace_the_planner_tells(
    ring: Ring, student_s: float, depth: int, bottleneck: str
) -> None:
    assert pace(Stages(teacher_s=TEACHER_S, link_s=0.0, student_s=student_s, depth=depth)).bottleneck == bottleneck
    steps = run_pipeline(ring, student_s=student_s, depth=depth)
    took_s = [step.done_s - steps[0].asked_s for step in steps]
    recorded = [(step.teacher_s, step.student_s) for step in steps]

    # Slower is the machine's; earlier is a pipeline that does what the model says can't be done.
    for number, (found_s, model_s) in enumerate(zip(took_s, timeline(recorded, depth=depth), strict=True)):
        assert found_s >= model_s - ROUNDING_S, f"step {number}: done after {found_s} s, by the model {model_s}"
    # The form, of the shortest times that were seen: a step takes no less. The first `depth` were asked for together.
    shortest = [min(times) for times in zip(*recorded, strict=True)]
    assert took_s[-1] >= (NUM_STEPS - depth) * form(*shortest, depth) - ROUNDING_S

    # The form is the timeline's pace, whichever of these stages decides.
    long = 2000
    for times in recorded:
        done_s = timeline([times] * long, depth=depth)
        assert (done_s[-1] - done_s[long // 2 - 1]) / (long // 2) == pytest.approx(form(*times, depth), rel=0.01)
