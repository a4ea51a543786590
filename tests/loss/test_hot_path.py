"""L2, L8, L9: no logits matrix, no copy of the teacher, no wait for a device, no 32-bit offset."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from planner.loss_costs import LossPlan, Mode, gradient_bytes, statistics_bytes
from student.loss import Head, KDLoss, LossOptions
from student.loss.call import LossCall
from student.loss.divergences import DIVERGENCES
from student.loss.epilogue import Epilogue
from student.loss.plan import loss_shape
from student.loss.products import Arena
from tests.loss.problems import PlannedLoss, Problem, planned_loss, random_problem

both_modes = pytest.mark.parametrize("mode", ["keep", "recompute"])

# What makes a host wait for a device: a value read back, or a shape that depends on values.
WAITS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.is_nonzero")


class Watch(TorchDispatchMode):
    """Sees every operation: counts waits, and the most bytes alive at once of storages made while it watches."""

    def __init__(self, known: tuple[torch.Tensor, ...] = ()) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.alive_bytes = 0
        self.peak_bytes = 0
        self.sizes: list[int] = []
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if str(func).startswith(WAITS):
            self.waits.append(str(func))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.alive_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes)
        self.sizes.append(num_bytes)
        weakref.finalize(storage, self._forget, key, num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        self.alive_bytes -= num_bytes
        self._seen.discard(key)


def run(problem: Problem, loss: KDLoss) -> None:
    arguments, keywords = problem.arguments()
    loss(*arguments, **keywords).loss.backward()


def tensors_of(problem: Problem) -> tuple[torch.Tensor, ...]:
    tensors = [*problem.leaves(), problem.teacher_hidden, problem.labels]
    if problem.teacher_head is not None:
        tensors.append(problem.teacher_head.weight)
    return tuple(tensor for tensor in tensors if tensor is not None)


def named_rows(problem: Problem) -> Problem:
    return replace(problem, call={"row_index": torch.tensor([0, 2, 5])})


@pytest.mark.parametrize("divergence", DIVERGENCES)
@both_modes
def test_host_known_rows_wait_for_nothing(divergence: str, mode: Mode) -> None:
    problem = random_problem(51, bias=True, logit_softcap=5.0)
    loss = planned_loss(LossOptions(divergence=divergence, temperature=2.0), mode)
    for known in (named_rows(problem), replace(problem, call={"all_rows": True, "num_rows": torch.tensor(9)})):
        with Watch() as watch:
            run(known, loss)
        assert watch.waits == []


@both_modes
def test_fp16_gradients_are_brought_into_range_without_a_wait(mode: Mode) -> None:
    problem = random_problem(54, dtype=torch.float16)
    problem.call = {"all_rows": True, "row_weights": torch.linspace(0.0, 500.0, 7), "num_rows": torch.tensor(0.5)}
    with Watch() as watch:
        run(problem, planned_loss(LossOptions(), mode))
    assert watch.waits == []
    assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in problem.leaves())


@both_modes
def test_rows_read_from_the_labels_cost_exactly_one_wait(mode: Mode) -> None:
    with Watch() as watch:
        run(random_problem(52), planned_loss(LossOptions(), mode))
    assert watch.waits == ["aten.nonzero.default"]


@pytest.mark.parametrize("divergence", DIVERGENCES)
@both_modes
def test_the_hot_path_runs_where_no_value_can_be_read(divergence: str, mode: Mode) -> None:
    loss = planned_loss(LossOptions(divergence=divergence), mode)
    with FakeTensorMode(allow_non_fake_inputs=False):
        problem = random_problem(53, dtype=torch.bfloat16)
        problem.call = {"all_rows": True}
        run(problem, loss)
    assert problem.student_weight.grad is not None
    assert problem.student_weight.grad.shape == problem.student_weight.shape


class MeasuredLoss(PlannedLoss):
    """Keeps the plan that it ran by, and what the closed forms say of it."""

    plan: LossPlan
    predicted_bytes: int

    def _plan(self, call: LossCall) -> tuple[LossPlan, Epilogue]:
        plan, epilogue = super()._plan(call)
        shape = loss_shape(call, epilogue)
        self.plan = plan
        self.predicted_bytes = plan.workspace_bytes + gradient_bytes(shape, plan.mode) + statistics_bytes(shape)
        return plan, epilogue


@both_modes
@pytest.mark.parametrize("divergence", ["forward_kl", "jsd", "skew_reverse_kl"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory_is_what_the_closed_forms_say(mode: Mode, divergence: str, dtype: torch.dtype) -> None:
    problem = random_problem(
        54, num_rows=256, student_width=32, teacher_width=48, num_columns=6000, dtype=dtype, masked_frac=0.0
    )
    problem.student_weight = problem.student_weight.detach().float().requires_grad_()
    problem.call = {"all_rows": True}
    loss = MeasuredLoss.from_options(LossOptions(divergence=divergence))
    loss.mode, loss.rows, loss.columns, loss.block_elements = mode, 64, 1024, 20_000
    with Watch(known=tensors_of(problem)) as watch:
        run(problem, loss)
    assert watch.peak_bytes >= loss.plan.workspace_bytes
    assert 0.9 * loss.predicted_bytes <= watch.peak_bytes <= 1.05 * loss.predicted_bytes
    # Nothing of the size of a float32 logits matrix.
    assert max(watch.sizes) < 256 * 6000 * 4


@pytest.mark.parametrize("rows", [256, 512, 1024])
@both_modes
def test_workspace_does_not_grow_with_rows(mode: Mode, rows: int) -> None:
    problem = random_problem(55, num_rows=rows, num_columns=3000, dtype=torch.float32, masked_frac=0.0)
    loss = MeasuredLoss.from_options(LossOptions())
    loss.mode, loss.rows, loss.columns, loss.block_elements = mode, 64, 512, 10_000
    run(problem, loss)
    small = random_problem(55, num_rows=64, num_columns=3000, dtype=torch.float32, masked_frac=0.0)
    same = MeasuredLoss.from_options(LossOptions())
    same.mode, same.rows, same.columns, same.block_elements = mode, 64, 512, 10_000
    run(small, same)
    assert loss.plan.workspace_bytes == same.plan.workspace_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.usefixtures("matrix_units")
def test_the_teacher_is_read_in_place_and_never_copied_or_cast_whole(dtype: torch.dtype) -> None:
    problem = random_problem(
        56, num_rows=600, student_width=4, teacher_width=512, num_columns=3000, dtype=dtype, masked_frac=0.0
    )
    assert problem.teacher_hidden is not None
    assert problem.teacher_head is not None
    # A head of another dtype, too: it is cast tile by tile.
    problem.teacher_head = Head(weight=problem.teacher_head.weight.float())
    problem.call = {"all_rows": True}
    loss = planned_loss(LossOptions(divergence="jsd"), "recompute", rows=16, columns=128, block_elements=2048)
    whole = (problem.teacher_hidden, problem.teacher_head.weight)
    with Watch(known=tensors_of(problem)) as watch:
        run(problem, loss)
    assert max(watch.sizes) < min(tensor.numel() * dtype.itemsize for tensor in whole)


@both_modes
def test_offsets_beyond_2_to_the_31_are_no_32_bit_numbers(mode: Mode) -> None:
    num_rows, num_columns = 14_135, 151_936
    assert num_rows * num_columns > 2**31 > (num_rows - 1) * num_columns
    # Shapes and offsets of every operation, without the memory.
    with FakeTensorMode(allow_non_fake_inputs=False):
        problem = random_problem(57, num_rows=1, dtype=torch.bfloat16)
        problem.student_hidden = torch.empty(num_rows, 8, dtype=torch.bfloat16, requires_grad=True)
        problem.student_weight = torch.empty(num_columns, 8, dtype=torch.bfloat16, requires_grad=True)
        problem.teacher_hidden = torch.empty(num_rows, 8, dtype=torch.bfloat16)
        problem.teacher_head = Head(weight=torch.empty(num_columns, 8, dtype=torch.bfloat16))
        problem.labels = torch.zeros(num_rows, dtype=torch.int64)
        problem.call = {"all_rows": True}
        sizes = {"rows": num_rows, "columns": num_columns, "block_elements": num_columns * 2000}
        run(problem, planned_loss(LossOptions(divergence="jsd"), mode, **sizes))
        assert problem.student_hidden.grad is not None


def test_rows_of_a_window_beyond_2_to_the_31_elements_lie_where_they_should() -> None:
    num_rows, num_columns = 14_135, 151_936
    arena = Arena(num_rows * num_columns * 2 + 64, torch.device("meta"))
    window_RC = arena.take((num_rows, num_columns), torch.bfloat16)
    assert window_RC[-1].storage_offset() == (num_rows - 1) * num_columns
    assert window_RC[-1, -1].storage_offset() == num_rows * num_columns - 1
    assert arena.num_free_bytes == 64
