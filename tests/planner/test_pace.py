"""The pipeline's closed form against a simulation of it: where it claims to hold it does, and where not, it is said."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import PlanError
from planner.models import find_model
from planner.pace import Stages, expected_largest, needed_depth, needed_replicas, pace, teacher_flops
from planner.simulate import Jitter, simulate

STAGES = st.builds(
    Stages,
    teacher_s=st.floats(0.01, 1),
    link_s=st.floats(0.001, 0.3),
    student_s=st.floats(0.05, 1),
    latency_s=st.floats(0, 0.05),
    num_replicas=st.integers(1, 5),
    num_trainers=st.sampled_from((1, 2, 4, 6, 8)),
    num_links=st.integers(1, 2),
    depth=st.integers(1, 8),
)


def test_stages_must_be_simulated_for_some_steps_and_not_for_ever() -> None:
    stages = Stages(teacher_s=1, link_s=1, student_s=1)
    for num_steps in (0, -3, 10**9):
        with pytest.raises(PlanError, match="allowed: 1 to"):
            simulate(stages, num_steps=num_steps)


def test_replicas_past_what_is_ever_asked_at_a_time_change_nothing_and_cost_no_time() -> None:
    """A billion of them is what a very slow teacher would take."""
    stages = {"teacher_s": 3.0, "link_s": 0.1, "student_s": 0.2, "num_trainers": 4, "depth": 3}
    jitter = Jitter(teacher_frac=0.5, link_frac=0.5, student_frac=0.5, in_step=True)
    enough, many = (simulate(Stages(**stages, num_replicas=count), jitter=jitter) for count in (4 * 3, 10**9))
    assert many.step_s == enough.step_s
    assert many.student_stall_frac == enough.student_stall_frac
    assert many.teacher_stall_frac > enough.teacher_stall_frac


@given(stages=STAGES)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_without_jitter_the_form_is_exact_for_one_trainer_at_any_depth(stages: Stages) -> None:
    stages = Stages(**(vars(stages) | {"num_trainers": 1, "num_links": 1}))
    steady, found = pace(stages), simulate(stages, num_steps=300, num_warmup=100)
    assert found.step_s == pytest.approx(steady.step_s, rel=0.01)
    assert found.student_stall_frac == pytest.approx(steady.student_stall_frac, abs=0.01)
    assert found.teacher_stall_frac == pytest.approx(steady.teacher_stall_frac, abs=0.02)


@given(stages=STAGES)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_without_jitter_several_trainers_keep_within_5_percent_where_the_ring_is_deep_enough(stages: Stages) -> None:
    deep = Stages(**(vars(stages) | {"depth": needed_depth(stages)}))
    assert simulate(deep, num_steps=300, num_warmup=100).step_s == pytest.approx(pace(deep).step_s, rel=0.05)


@given(stages=STAGES, seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_with_a_tenth_of_jitter_the_form_holds_within_5_percent_where_the_ring_is_deep_enough(
    stages: Stages, seed: int
) -> None:
    deep = Stages(**(vars(stages) | {"depth": needed_depth(stages, jitter_s=3 * 0.1 * stages.fetch_s)}))
    jitter = Jitter(teacher_frac=0.1, link_frac=0.1, student_frac=0.1)
    found = simulate(deep, jitter=jitter, num_steps=1500, seed=seed)
    assert found.step_s == pytest.approx(pace(deep).step_s, rel=0.05)


@pytest.mark.parametrize("num_trainers", [2, 4, 8, 32])
def test_trainers_that_step_together_take_as_long_as_the_slowest(num_trainers: int) -> None:
    stages = Stages(
        teacher_s=0.01,
        link_s=0.001,
        student_s=1.0,
        num_replicas=num_trainers,
        num_trainers=num_trainers,
        jitter_frac=0.1,
    )
    found = simulate(stages, jitter=Jitter(student_frac=0.1, in_step=True), num_steps=1000)
    assert found.step_s == pytest.approx(pace(stages).step_s, rel=0.05)
    assert found.step_s > 1.05


def test_a_shallow_ring_with_much_jitter_is_slower_than_the_form_says() -> None:
    """Where it does not hold: the docs say so."""
    stages = Stages(teacher_s=0.9, link_s=0.01, student_s=1.0, depth=2)
    found = simulate(stages, jitter=Jitter(teacher_frac=0.8, student_frac=0.8), num_steps=3000)
    assert found.step_s > 1.2 * pace(stages).step_s


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    stages, jitter = Stages(teacher_s=0.5, link_s=0.1, student_s=0.6), Jitter(teacher_frac=0.2)
    assert simulate(stages, jitter=jitter, seed=3) == simulate(stages, jitter=jitter, seed=3)
    assert simulate(stages, jitter=jitter, seed=3) != simulate(stages, jitter=jitter, seed=4)


def test_each_stage_can_be_the_one_that_decides() -> None:
    slow = {"teacher_s": 0.1, "link_s": 0.1, "student_s": 0.1, "depth": 8}
    assert pace(Stages(**(slow | {"teacher_s": 1.0}))).bottleneck == "teacher"
    assert pace(Stages(**(slow | {"link_s": 1.0}))).bottleneck == "link"
    assert pace(Stages(**(slow | {"student_s": 1.0}))).bottleneck == "student"
    assert pace(Stages(**(slow | {"depth": 1}))).bottleneck == "depth"


def test_the_needed_depth_is_the_least_that_hides_the_fetch() -> None:
    stages = Stages(teacher_s=2.5, link_s=0.4, student_s=1.0, num_replicas=3)
    needed = needed_depth(stages)
    assert needed == 4
    assert pace(Stages(**(vars(stages) | {"depth": needed}))).step_s == 1.0
    assert pace(Stages(**(vars(stages) | {"depth": needed - 1}))).step_s > 1.0


def test_replicas_balance_the_trainers() -> None:
    assert needed_replicas(teacher_s=0.5, student_s=1.0, num_trainers=8) == 4
    assert needed_replicas(teacher_s=0.01, student_s=1.0, num_trainers=1) == 1


def test_expected_largest_is_that_of_normal_draws() -> None:
    # Tabulated means of the largest of 2, 4, 8 standard normal draws.
    for num, mean in ((1, 0.0), (2, 0.5642), (4, 1.0294), (8, 1.4236)):
        assert expected_largest(num) == pytest.approx(mean, rel=0.05)


def test_a_token_of_a_mixture_costs_the_flops_of_its_active_parameters() -> None:
    shape = find_model("Qwen3.5-35B-A3B", flag="--teacher")
    flops = teacher_flops(shape, sequence_tokens=1)
    assert flops == pytest.approx(2 * shape.active_body, rel=0.05)
    assert teacher_flops(shape, sequence_tokens=32_768) > flops
