"""What the fused distillation loss costs: bytes and FLOPs of its two modes, and the choice between them.

keep: for a window of rows both models' logits of the whole vocabulary (of this rank's shard) are kept, and the
student's are turned into the gradient in place. Every product is made once, so the FLOPs are the least possible.

recompute: tiles of columns, windows of rows inside; the logits are made again for every pass. The workspace does not
grow with the vocabulary; the FLOPs do, by one evaluation of the logits (two for divergences that need a second pass).

Plain arithmetic in closed form: the loss allocates exactly `workspace_bytes`, a test holds the rest against what is
measured, and a planner can ask without any tensor library at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

Mode = Literal["keep", "recompute"]
ALIGN_BYTES = 64
# A weight of another dtype is cast by at least so many columns at a time.
MIN_CAST_COLUMNS = 256
# Blocks of more rows than this take one more buffer, for the products of row-wise dots.
MAX_DOT_ROWS = 8
# Without a stated workspace the kept window may take so much of the free memory.
KEEP_FREE_FRAC = 0.05


@dataclass(frozen=True, kw_only=True)
class LossTuning:
    """What a kind of device wants. keep_rows: the smallest window whose products run at full rate."""

    keep_rows: int
    recompute_rows: int
    tile_columns: int
    block_elements: int


# CPU: blocks of one to a few rows stay in the caches. CUDA: a block is a kernel launch, so few and large.
TUNING: Mapping[str, LossTuning] = MappingProxyType(
    {
        "cpu": LossTuning(keep_rows=128, recompute_rows=1024, tile_columns=2048, block_elements=200_000),
        "cuda": LossTuning(keep_rows=512, recompute_rows=4096, tile_columns=8192, block_elements=1 << 25),
    }
)


@dataclass(frozen=True, kw_only=True)
class LossShape:
    """A call of the loss in numbers.

    num_rows: counted rows. num_columns: real columns of this rank's vocabulary shard. teacher_hidden: 0 without a
    teacher. *_logit_bytes: bytes that one kept logit takes; *_logit_products: products a logit costs (2 where
    float32-grade logits are made of two 16-bit ones). state_bytes: an element of the product's operands; work_bytes:
    of the statistics; hidden_grad_bytes: of dX, in the dtype of the states as they come; casts_states: they are cast to
    the operands' dtype, a window at a time. num_block_buffers: block-sized buffers of the epilogue, the dots' aside, 0
    where kernels do its work; num_passes: passes before the gradient can be written.
    """

    num_rows: int
    num_columns: int
    student_hidden: int
    teacher_hidden: int
    student_logit_bytes: int = 4
    teacher_logit_bytes: int = 4
    student_logit_products: int = 1
    teacher_logit_products: int = 1
    state_bytes: int = 4
    work_bytes: int = 4
    hidden_grad_bytes: int = 4
    casts_states: bool = False
    num_block_buffers: int = 4
    num_passes: int = 1
    grad_hidden: bool = True
    grad_weight: bool = True


@dataclass(frozen=True, kw_only=True)
class LossPlan:
    """How a call is run. workspace_bytes is what the loss allocates for it beside statistics and gradients."""

    mode: Mode
    window_rows: int
    tile_columns: int
    block_rows: int
    state_cast_bytes: int
    student_plane_bytes: int
    teacher_plane_bytes: int
    scratch_bytes: int

    @property
    def workspace_bytes(self) -> int:
        return self.state_cast_bytes + self.student_plane_bytes + self.teacher_plane_bytes + self.scratch_bytes


def plan_window(shape: LossShape, mode: Mode, rows: int, columns: int, block_elements: int) -> LossPlan:
    """The plan that handles `rows` x `columns` logits at a time.

    The workspace is [cast states | student's logits | teacher's logits | block buffers]. Weight tiles are cast in the
    block buffers' place before the statistics run; results of products are staged in the place of the teacher's logits
    and the block buffers once the gradient is written: hence the maxima.
    """
    rows, columns = max(rows, 1), max(columns, 1)
    block_rows = min(rows, max(1, block_elements // columns))
    hidden = max(shape.student_hidden, shape.teacher_hidden)
    cast_columns = min(columns, MIN_CAST_COLUMNS)
    cast_bytes = aligned(cast_columns * hidden * shape.state_bytes)
    num_buffers = shape.num_block_buffers
    if num_buffers and shape.teacher_hidden and block_rows > MAX_DOT_ROWS:
        num_buffers += 1
    scratch_bytes = max(num_buffers * aligned(block_rows * columns * shape.work_bytes), cast_bytes)
    student_bytes = rows * columns * shape.student_logit_bytes
    teacher_bytes = rows * columns * shape.teacher_logit_bytes if shape.teacher_hidden else 0
    student_bytes, teacher_bytes = plane_bytes(student_bytes), plane_bytes(teacher_bytes)
    # Staged: the sum of dX in work precision, one product of it, and a tile of weight or of dW.
    staged_bytes = aligned(rows * hidden * shape.work_bytes) + aligned(rows * hidden * shape.state_bytes) + cast_bytes
    scratch_bytes = max(scratch_bytes, staged_bytes - teacher_bytes)
    state_cast_bytes = 0
    if shape.casts_states:
        widths = (shape.student_hidden, shape.teacher_hidden)
        state_cast_bytes = sum(aligned(rows * width * shape.state_bytes) for width in widths)
    return LossPlan(
        mode=mode,
        window_rows=rows,
        tile_columns=columns,
        block_rows=block_rows,
        state_cast_bytes=state_cast_bytes,
        student_plane_bytes=student_bytes,
        teacher_plane_bytes=teacher_bytes,
        scratch_bytes=aligned(scratch_bytes),
    )


def choose_mode(
    shape: LossShape, *, device: str, free_bytes: int | None = None, workspace_bytes: int | None = None
) -> Mode:
    """keep, if its smallest full-rate window takes at most workspace_bytes, or, where that is None, 5 % of free_bytes.

    free_bytes None: unknown, taken as enough. How many rows a call has plays no part: a run stays in one mode.
    """
    window = replace(shape, num_rows=TUNING.get(device, TUNING["cuda"]).keep_rows)
    limit_bytes = workspace_bytes
    if limit_bytes is None and free_bytes is not None:
        limit_bytes = int(free_bytes * KEEP_FREE_FRAC)
    fits = limit_bytes is None or make_plan(window, "keep", device=device).workspace_bytes <= limit_bytes
    return "keep" if fits else "recompute"


def make_plan(
    shape: LossShape,
    mode: Mode,
    *,
    device: str,
    workspace_bytes: int | None = None,
    window_rows: int | None = None,
) -> LossPlan:
    """The plan of a mode. recompute shrinks its tiles until they fit workspace_bytes; keep takes what it takes.

    window_rows: what recompute takes at most, and then only columns are shrunk: all ranks of a vocabulary group must
    cut the same windows, whatever their shards are. 0: what `most_window_rows` says where none fits.
    Raises ValueError: workspace_bytes is too small for any tile; says what the smallest takes.
    """
    tuning = TUNING.get(device, TUNING["cuda"])
    if mode == "keep":
        rows = min(shape.num_rows, tuning.keep_rows)
        return plan_window(shape, "keep", rows, shape.num_columns, tuning.block_elements)
    # Whether any window fits must not depend on how many rows a call has where others share its windows.
    num_rows = tuning.recompute_rows if window_rows == 0 else min(shape.num_rows, window_rows or shape.num_rows)
    rows, columns = min(num_rows, tuning.recompute_rows), min(shape.num_columns, tuning.tile_columns)
    may_shrink = not window_rows
    block_elements = tuning.block_elements
    while True:
        plan = plan_window(shape, "recompute", rows, columns, block_elements)
        if workspace_bytes is None or plan.workspace_bytes <= workspace_bytes:
            return plan
        # Rows first: a tile of weight is read once a window, so columns may stay wide until rows are few.
        if rows > 256 and may_shrink:
            rows = max(rows // 2, 256)
        elif columns > 512:
            columns = max(columns // 2, 512)
        elif rows > 16 and may_shrink:
            rows = max(rows // 2, 16)
        elif columns > 64:
            columns = max(columns // 2, 64)
        else:
            raise ValueError(
                f"workspace_bytes: got {workspace_bytes}; allowed: {plan.workspace_bytes} and more for states "
                f"{shape.student_hidden} (student) and {shape.teacher_hidden} (teacher) wide"
            )
        block_elements = min(block_elements, rows * columns)


def most_window_rows(shape: LossShape, *, device: str, workspace_bytes: int | None) -> int:
    """Rows of recompute's windows for a call of as many rows as there may be; 0: no window fits workspace_bytes."""
    full = replace(shape, num_rows=TUNING.get(device, TUNING["cuda"]).recompute_rows)
    try:
        return make_plan(full, "recompute", device=device, workspace_bytes=workspace_bytes).window_rows
    except ValueError:
        return 0


def loss_flops(shape: LossShape, mode: Mode) -> int:
    """FLOPs of the products of one forward and backward (two a multiply-add)."""
    logits = shape.student_logit_products * shape.student_hidden + shape.teacher_logit_products * shape.teacher_hidden
    needs_grad = shape.grad_hidden or shape.grad_weight
    evaluations = 1 if mode == "keep" else shape.num_passes + int(needs_grad)
    gradients = (int(shape.grad_hidden) + int(shape.grad_weight)) * shape.student_hidden
    return 2 * shape.num_rows * shape.num_columns * (evaluations * logits + gradients)


def floor_flops(shape: LossShape) -> int:
    """The least FLOPs that any way to this loss takes: each logit once, each gradient once."""
    gradients = (int(shape.grad_hidden) + int(shape.grad_weight)) * shape.student_hidden
    return 2 * shape.num_rows * shape.num_columns * (shape.student_hidden + shape.teacher_hidden + gradients)


def statistics_bytes(shape: LossShape) -> int:
    """An upper bound of the running statistics and row scalars: at most 32 numbers a counted row."""
    return 32 * shape.num_rows * max(shape.work_bytes, 8)


def gradient_bytes(shape: LossShape, mode: Mode) -> int:
    """The gradients themselves: dX (in recompute also summed in work precision) and dW in work precision."""
    grad_hidden = shape.num_rows * shape.student_hidden * shape.hidden_grad_bytes if shape.grad_hidden else 0
    if mode == "recompute" and shape.grad_hidden:
        grad_hidden += shape.num_rows * shape.student_hidden * shape.work_bytes
    grad_weight = shape.num_columns * shape.student_hidden * shape.work_bytes if shape.grad_weight else 0
    return grad_hidden + grad_weight


def aligned(num_bytes: int) -> int:
    """Rounded up to a cache line."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def plane_bytes(num_bytes: int) -> int:
    """Room for a side's logits; where they are kept as two 16-bit planes each starts on a cache line of its own."""
    return aligned(num_bytes) + (ALIGN_BYTES if num_bytes else 0)
