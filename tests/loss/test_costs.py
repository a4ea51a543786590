"""The closed forms of the loss's cost, against themselves and against what the loss does."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from planner.loss_costs import (
    KEEP_FREE_FRAC,
    LossPlan,
    LossShape,
    Mode,
    choose_mode,
    floor_flops,
    gradient_bytes,
    loss_flops,
    make_plan,
)
from student.loss import KDLoss, LossOptions
from student.loss.call import LossCall
from student.loss.divergences import DIVERGENCES
from student.loss.epilogue import Epilogue
from student.loss.plan import loss_shape
from tests.limits import descriptors_below
from tests.loss.problems import PlannedLoss, assert_equal_answers, random_problem

# The case of the benchmark: bf16, one token's two logits kept as high and low part.
LARGE = LossShape(
    num_rows=2048,
    num_columns=151_936,
    student_hidden=1024,
    teacher_hidden=2048,
    student_logit_products=2,
    teacher_logit_products=2,
    state_bytes=2,
    hidden_grad_bytes=2,
    num_block_buffers=4,
    num_passes=2,
)


def test_keep_takes_about_its_two_windows_of_logits_and_recompute_tens_of_megabytes() -> None:
    keep, recompute = (make_plan(LARGE, mode, device="cpu") for mode in ("keep", "recompute"))
    assert keep.window_rows == 128
    assert 2 * 128 * 151_936 * 4 <= keep.workspace_bytes <= 1.06 * 2 * 128 * 151_936 * 4
    assert recompute.workspace_bytes <= 64 << 20


def test_recomputes_workspace_does_not_grow_with_the_vocabulary() -> None:
    sizes = [
        make_plan(LossShape(**(vars(LARGE) | {"num_columns": columns})), "recompute", device="cpu").workspace_bytes
        for columns in (8192, 151_936, 1_000_000)
    ]
    assert len(set(sizes)) == 1


def test_keep_is_chosen_where_it_takes_at_most_5_percent_of_free_memory() -> None:
    needed = make_plan(LARGE, "keep", device="cpu").workspace_bytes
    assert choose_mode(LARGE, device="cpu", free_bytes=int(needed / KEEP_FREE_FRAC) + 1) == "keep"
    assert choose_mode(LARGE, device="cpu", free_bytes=int(needed / KEEP_FREE_FRAC) - 100) == "recompute"
    assert choose_mode(LARGE, device="cpu", free_bytes=0, workspace_bytes=needed) == "keep"
    assert choose_mode(LARGE, device="cpu", workspace_bytes=needed - 1) == "recompute"
    assert make_plan(LARGE, "keep", device="cuda").window_rows == 512


@given(
    limit=st.integers(1 << 20, 1 << 28),
    columns=st.integers(1, 300_000),
    rows=st.integers(1, 5000),
    widths=st.tuples(st.integers(1, 2048), st.integers(0, 2048)),
    buffers=st.integers(1, 7),
)
def test_a_stated_workspace_is_never_exceeded(
    limit: int, columns: int, rows: int, widths: tuple[int, int], buffers: int
) -> None:
    shape = LossShape(
        num_rows=rows,
        num_columns=columns,
        student_hidden=widths[0],
        teacher_hidden=widths[1],
        num_block_buffers=buffers,
    )
    mode = choose_mode(shape, device="cpu", workspace_bytes=limit)
    # Room for a few rows and cast columns of the widest states is all that the smallest tile asks for.
    if mode == "keep" or limit >= 64 * max(widths) * 256:
        assert make_plan(shape, mode, device="cpu", workspace_bytes=limit).workspace_bytes <= limit


def test_a_workspace_too_small_for_anything_says_what_the_smallest_takes() -> None:
    with pytest.raises(ValueError, match=r"workspace_bytes: got 1000; allowed: (\d+) and more") as caught:
        make_plan(LARGE, "recompute", device="cpu", workspace_bytes=1000)
    smallest = int(str(caught.value).split("allowed: ")[1].split()[0])
    assert make_plan(LARGE, "recompute", device="cpu", workspace_bytes=smallest).workspace_bytes <= smallest


class CountedLoss(PlannedLoss):
    shape: LossShape

    def _plan(self, call: LossCall) -> tuple[LossPlan, Epilogue]:
        plan, epilogue = super()._plan(call)
        self.shape = loss_shape(call, epilogue)
        return plan, epilogue


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("mode", ["keep", "recompute"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.usefixtures("matrix_units")
def test_flops_are_what_the_closed_form_says(divergence: str, mode: Mode, dtype: torch.dtype, frozen: bool) -> None:
    problem = random_problem(61, num_rows=24, num_columns=200, dtype=dtype, masked_frac=0.0)
    problem.student_weight.requires_grad_(not frozen)
    arguments, keywords = problem.arguments()
    loss = CountedLoss.from_options(LossOptions(divergence=divergence))
    loss.mode, loss.rows, loss.columns, loss.block_elements = mode, 10, 64, 400
    with FlopCounterMode(display=False) as counter:
        loss(*arguments, **keywords).loss.backward()
    assert counter.get_total_flops() == loss_flops(loss.shape, mode)
    if mode == "keep" and dtype == torch.float32:
        assert counter.get_total_flops() == floor_flops(loss.shape)


@pytest.mark.parametrize("mode", ["keep", "recompute"])
@pytest.mark.parametrize("precision", ["fp32", "fast"])
def test_the_workspace_is_the_closed_form_on_either_kind_of_cpu(mode: Mode, precision: str, matrix_units: bool) -> None:
    problem = random_problem(64, num_rows=24, num_columns=200, dtype=torch.bfloat16, masked_frac=0.0)
    arguments, keywords = problem.arguments()
    loss = CountedLoss.from_options(LossOptions(divergence="jsd", precision=precision))
    loss.mode, loss.rows, loss.columns, loss.block_elements = mode, 10, 64, 400
    loss(*arguments, **keywords).loss.backward()
    has_two_planes = precision == "fp32" and matrix_units
    casts = not matrix_units
    assert loss.shape.student_logit_bytes == (2 if precision == "fast" and matrix_units else 4)
    assert loss.shape.student_logit_products == (2 if has_two_planes else 1)
    assert (loss.shape.casts_states, loss.shape.state_bytes) == (casts, 4 if casts else 2)
    # dX is made in the states' dtype whatever the products run in.
    assert loss.shape.hidden_grad_bytes == 2


def test_frozen_sides_cost_no_gradient_memory() -> None:
    frozen = LossShape(**(vars(LARGE) | {"grad_weight": False, "grad_hidden": False}))
    assert gradient_bytes(frozen, "keep") == 0
    assert gradient_bytes(LARGE, "keep") == 2048 * 1024 * 2 + 151_936 * 1024 * 4


def test_the_closed_forms_need_no_tensor_library() -> None:
    code = "import planner.loss_costs, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_stated_workspace_changes_the_mode_and_not_the_answer(
    divergence: str, caplog: pytest.LogCaptureFixture
) -> None:
    problem = random_problem(62, num_rows=40, num_columns=5000)
    options = LossOptions(divergence=divergence, workspace_bytes=1 << 20)
    loss = KDLoss.from_options(options)
    wanted = problem.solve_exactly(options)
    with caplog.at_level(logging.INFO, logger="student.loss.plan"):
        for _ in range(3):
            assert_equal_answers(problem.solve(loss), wanted)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "recompute" in said[0]


def test_the_mode_is_kept_by_default_where_there_is_room(caplog: pytest.LogCaptureFixture) -> None:
    problem = random_problem(63)
    with caplog.at_level(logging.INFO, logger="student.loss.plan"):
        problem.solve(KDLoss())
    assert "mode='keep'" in caplog.records[0].getMessage()


def test_a_process_without_descriptors_left_computes_its_loss() -> None:
    """How much memory is free is a hint, and looking for it no reason to end a step."""
    problem = random_problem(64)
    wanted = problem.solve(KDLoss())
    with descriptors_below(0):
        assert_equal_answers(problem.solve(KDLoss()), wanted)


def test_the_loss_brings_in_neither_the_ring_nor_a_model_library() -> None:
    code = "import student.loss, sys; print(sorted({m.partition('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    others = ("ring", "transport", "teacher", "bench", "zmq", "transformers", "triton", "liger_kernel", "trl")
    assert not [name for name in others if f"'{name}'" in loaded]
    assert "'planner'" in loaded
