"""How a call will run: the planner's closed forms choose, by the call's numbers and together with the other ranks."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from planner.loss_costs import LossPlan, LossShape, Mode, choose_mode, make_plan, most_window_rows
from student.loss.call import LossCall, work_dtype
from student.loss.divergences import DIVERGENCES, Divergence
from student.loss.epilogue import Epilogue
from student.loss.head import Head
from student.loss.products import plane_dtypes, product_dtype

_LOG = logging.getLogger(__name__)

_MEMINFO = Path("/proc/meminfo")


def logit_planes(call: LossCall, hidden: Tensor, head: Head) -> tuple[torch.dtype, ...]:
    """The dtypes that one side's logits are kept in."""
    dtype = product_dtype(hidden, head.weight)
    return plane_dtypes(dtype, device_type=hidden.device.type, precision=call.options.precision)


def make_epilogue(call: LossCall, mode: Mode) -> Epilogue:
    """The call's epilogue. Only a window that holds the whole vocabulary is finished on one load, so only there may the
    kept logits be worked on in place."""
    options, dtype = call.options, work_dtype(call.student_hidden)
    has_teacher = call.teacher_hidden is not None and call.teacher_head is not None
    entry = DIVERGENCES[options.divergence] if has_teacher else None
    student_planes = logit_planes(call, call.student_hidden, call.student_head)
    teacher_planes: tuple[torch.dtype, ...] = ()
    if call.teacher_hidden is not None and call.teacher_head is not None:
        teacher_planes = logit_planes(call, call.teacher_hidden, call.teacher_head)
    kind = _epilogue_class(call, entry)
    fused = mode == "keep" and call.vocab_group is None
    operand_dtype = product_dtype(call.student_hidden, call.student_head.weight)
    return kind(
        entry=entry,
        mix=entry.mix(options) if entry else 0.0,
        temperature=options.temperature if entry else 1.0,
        dtype=dtype,
        has_labels=call.labels is not None,
        has_ce_grad=call.labels is not None and options.ce_weight > 0,
        student_head=call.student_head,
        teacher_head=call.teacher_head,
        num_planes=max(len(student_planes), len(teacher_planes)),
        in_place_student=fused and student_planes == (dtype,) and operand_dtype == dtype,
        in_place_teacher=fused and teacher_planes == (dtype,),
    )


def has_kernels(device: torch.device) -> bool:
    """Whether our GPU kernels run there. (A CUDA build of torch brings triton.)"""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def _epilogue_class(call: LossCall, entry: Divergence | None) -> type[Epilogue]:
    """Kernels where they are, and where they do all that is asked: they neither work in float64 nor sum the gradient of
    a bias."""
    bias = call.student_head.bias
    sums_bias = bias is not None and bias.requires_grad
    if not has_kernels(call.student_hidden.device) or sums_bias or work_dtype(call.student_hidden) != torch.float32:
        return Epilogue
    # Brings in triton, which whoever has no GPU need not wait for, or have.
    from student.loss.triton_kernels import KERNEL_DIVERGENCES, TritonEpilogue

    return TritonEpilogue if entry is None or entry.name in KERNEL_DIVERGENCES else Epilogue


def loss_shape(call: LossCall, epilogue: Epilogue) -> LossShape:
    """The call in the planner's numbers."""
    student_planes = logit_planes(call, call.student_hidden, call.student_head)
    teacher_planes: tuple[torch.dtype, ...] = ()
    given_bytes = call.student_hidden.dtype.itemsize
    state_bytes = product_dtype(call.student_hidden, call.student_head.weight).itemsize
    casts_states = state_bytes != given_bytes
    if call.teacher_hidden is not None and call.teacher_head is not None:
        teacher_planes = logit_planes(call, call.teacher_hidden, call.teacher_head)
        teacher_dtype = product_dtype(call.teacher_hidden, call.teacher_head.weight)
        state_bytes = max(state_bytes, teacher_dtype.itemsize)
        casts_states |= teacher_dtype != call.teacher_hidden.dtype
    return LossShape(
        num_rows=call.rows.count,
        num_columns=call.student_head.num_real_columns,
        student_hidden=call.student_hidden.shape[1],
        teacher_hidden=0 if call.teacher_hidden is None else call.teacher_hidden.shape[1],
        student_logit_bytes=sum(dtype.itemsize for dtype in student_planes),
        teacher_logit_bytes=sum(dtype.itemsize for dtype in teacher_planes),
        student_logit_products=len(student_planes),
        teacher_logit_products=max(len(teacher_planes), 1),
        state_bytes=state_bytes,
        hidden_grad_bytes=given_bytes,
        casts_states=casts_states,
        work_bytes=epilogue.dtype.itemsize,
        num_block_buffers=epilogue.num_buffers,
        num_passes=epilogue.entry.num_passes if epilogue.entry else 1,
        grad_hidden=call.student_hidden.requires_grad,
        grad_weight=call.student_head.weight.requires_grad,
    )


@dataclass(frozen=True)
class _Choice:
    """What is chosen once for a kind of call. window_rows: of a vocabulary group in recompute; None: as fits."""

    mode: Mode
    window_rows: int | None


class Planner:
    """Chooses a mode once for each kind of call, remembers it, and logs it once.

    The first call of a kind asks how much memory is free (and, in a vocabulary group, what the other ranks chose: their
    exchanges must match); later ones ask nobody. A stated workspace makes the choice independent of the machine's load.
    """

    def __init__(self) -> None:
        self._choices: dict[tuple[object, ...], _Choice] = {}

    def plan(self, call: LossCall) -> tuple[LossPlan, Epilogue]:
        """The plan and the epilogue of a call. Raises ValueError: the stated workspace is too small for any tile."""
        key = _plan_key(call)
        device, wanted_bytes = call.student_hidden.device, call.options.workspace_bytes
        choice = self._choices.get(key)
        if choice is None:
            shape = loss_shape(call, make_epilogue(call, "keep"))
            free_bytes = _free_bytes(device) if wanted_bytes is None else None
            mode = choose_mode(shape, device=device.type, free_bytes=free_bytes, workspace_bytes=wanted_bytes)
            choice = _agreed(mode, call)
        epilogue = make_epilogue(call, choice.mode)
        plan = make_plan(
            loss_shape(call, epilogue),
            choice.mode,
            device=device.type,
            workspace_bytes=wanted_bytes,
            window_rows=choice.window_rows,
        )
        if all(choice.mode != other.mode for other in self._choices.values()):
            _LOG.info(
                "distillation loss (%s): %s, workspace %d bytes", call.options.divergence, plan, plan.workspace_bytes
            )
        self._choices[key] = choice
        return plan, epilogue


def _plan_key(call: LossCall) -> tuple[object, ...]:
    """What the choice depends on. All ranks of a group meet a new key at the same call."""
    hidden, teacher = call.student_hidden, call.teacher_hidden
    return (
        (hidden.shape[1], hidden.dtype, hidden.device),
        None if teacher is None else (teacher.shape[1], teacher.dtype),
        call.student_head.num_real_columns,
        call.labels is None,
        call.vocab_group,
    )


def _agreed(mode: Mode, call: LossCall) -> _Choice:
    """keep only where every rank of the group can, else the smallest of their windows: each is an exchange that all
    must take part in."""
    group, device = call.vocab_group, call.student_hidden.device
    if group is None:
        return _Choice(mode, None)
    shape, wanted_bytes = loss_shape(call, make_epilogue(call, "recompute")), call.options.workspace_bytes
    own_rows = most_window_rows(shape, device=device.type, workspace_bytes=wanted_bytes)
    least = torch.tensor([int(mode == "keep"), own_rows], dtype=torch.int64, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    can_keep, rows = least.tolist()
    if can_keep:
        return _Choice("keep", None)
    if not rows and own_rows:
        raise ValueError(
            f"workspace_bytes: got {wanted_bytes}, too little on another rank of the vocabulary group; allowed: what "
            "it says itself"
        )
    return _Choice("recompute", rows)


def _free_bytes(device: torch.device) -> int | None:
    """Memory that may be taken now; None where nobody knows."""
    if device.type == "cuda" and torch.cuda.is_available():
        free_bytes, _ = torch.cuda.mem_get_info(device)
        cached_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free_bytes + cached_bytes
    if device.type == "cpu":
        with contextlib.suppress(OSError):  # another system, or no descriptor is left: no reason to end a step
            fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines() if ":" in line)
            return int(fields["MemAvailable"].split()[0]) * 1024
    return None
