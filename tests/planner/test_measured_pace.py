"""A step's time from measured stage times, against the measured pipeline: real service, ring and transport.

The stages sleep for far longer than anything else here takes, so that the figure is the pipeline's and not the
machine's; and of a few rounds, all of which are made, the median counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

import pytest

from bench.bench_pipeline import PipelineConfig, connected_ring
from bench.processes import TeacherProcess, choose_cores, teacher_process
from bench.synthetic_student import Feeder, requests_of
from planner.pace import Stages, pace

ROWS, HIDDEN, VOCABULARY = 64, 64, 128
TEACHER_S = 0.15
NUM_STEPS, NUM_ROUNDS = 10, 3
TOLERANCE_FRAC = 0.10


class SleepingStudent:
    """Takes its time over each microbatch, and notes how long that was."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.took_s: list[float] = []

    def backward(self, states_NH: object) -> None:
        start_s = time.perf_counter()
        time.sleep(self.step_s)
        self.took_s.append(time.perf_counter() - start_s)

    def update(self) -> None:
        pass


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TeacherProcess]:
    log = tmp_path_factory.mktemp("teacher") / "log"
    arguments = [str(number) for number in (TEACHER_S, ROWS, HIDDEN, VOCABULARY)]
    with teacher_process("tests.planner.sleeping_teacher", arguments, cpu=choose_cores().teacher, log=log) as process:
        yield process


@pytest.mark.slow
@pytest.mark.parametrize(
    ("student_s", "depth", "bottleneck"),
    [(0.25, 3, "student"), (0.05, 3, "teacher"), (0.15, 1, "depth"), (0.25, 2, "student")],
    ids=["trainer decides", "teacher decides", "ring decides", "two slots are enough"],
)
def test_step_time_from_stage_times_is_that_of_the_pipeline(
    teacher: TeacherProcess, student_s: float, depth: int, bottleneck: str
) -> None:
    config = PipelineConfig(rows=ROWS, hidden_size=HIDDEN, vocab_size=VOCABULARY, depth=depth)
    off: list[float] = []
    with connected_ring(config, teacher) as teachers:
        feeder = Feeder(teachers.ring, requests_of(ROWS, VOCABULARY, num=4), depth=depth)
        for _ in range(NUM_ROUNDS):
            student = SleepingStudent(student_s)
            times = feeder.pipeline(student, NUM_STEPS, teacher=teacher)  # type: ignore[arg-type]
            stages = Stages(
                teacher_s=times.forward_s, link_s=0.0, student_s=sum(student.took_s) / len(student.took_s), depth=depth
            )
            predicted = pace(stages)
            assert predicted.bottleneck == bottleneck
            off.append(times.step.wall_s / predicted.step_s - 1)
    assert abs(median(off)) <= TOLERANCE_FRAC, off
