"""The matrix products of the loss: logits from states, dX and dW from the gradient of the logits.

They run in the states' dtype, and from 16-bit states float32-grade logits are made in one of three ways. On CUDA the
product itself writes float32. On a CPU with matrix units for 16 bits a second product gives the part that the first
one's rounding lost (`low = x w - high`), so that high + low errs by 1e-4 where high alone errs by 5e-2. On other CPUs a
16-bit product is no cheaper than a float32 one (measured without AMX, 128 rows x 32k columns, widths 64 to 2048: 70-80
GFLOP/s against 100-130): there the window's states are cast to float32, the weight tile by tile, and every product runs
in float32. A weight of another dtype is cast tile by tile anyway.

Legend: R rows of a window, C columns of a tile, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from planner.loss_costs import aligned

# dW is staged and weights are cast by so many columns at most: more would leave the caches without a faster product.
STAGED_COLUMNS = 2048
CAST_COLUMNS = 8192


class Arena:
    """One allocation that everything transient of a call lives in, handed out front to back."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._offset = 0

    @property
    def num_free_bytes(self) -> int:
        return self._bytes.shape[0] - aligned(self._offset)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised room, on a cache line of its own."""
        num_bytes = math.prod(shape) * dtype.itemsize
        start = aligned(self._offset)
        self._offset = start + num_bytes
        assert self._offset <= self._bytes.shape[0], "the plan's closed form is wrong"
        return self._bytes[start : self._offset].view(dtype).view(*shape)

    def since(self, offset: int) -> Arena:
        """The room from `offset` on, to be used a second time when what lives there is dead."""
        rest = object.__new__(Arena)
        rest._bytes, rest._offset = self._bytes[offset:], 0
        return rest


@lru_cache
def has_matrix_units(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of a 16-bit dtype at more than twice the rate of float32 ones, so that even
    two such products are the cheaper way to a float32-grade logit. A property of the processor, not a measurement: a
    run repeats itself."""
    # Named with an underscore in torch, but the one place that also asks the kernel for leave to use the units.
    if dtype == torch.bfloat16:
        return bool(torch.cpu._is_amx_tile_supported())
    return bool(dtype == torch.float16 and torch.cpu._is_amx_fp16_supported())


def plane_dtypes(operand_dtype: torch.dtype, *, device_type: str, precision: str) -> tuple[torch.dtype, ...]:
    """What logits are kept in, for products of such operands: one plane, or two 16-bit ones that add up to
    float32-grade logits."""
    if operand_dtype.itemsize > 2 or precision == "fast":
        return (operand_dtype,)
    return (torch.float32,) if device_type == "cuda" else (operand_dtype, operand_dtype)


def product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype that products with these states run in: theirs (the weight's for states that travelled in 8 bits), or
    float32 on a CPU that is no faster with 16 bits, where even "fast" has nothing to gain from rounding."""
    dtype = hidden.dtype if hidden.dtype.itemsize > 1 else weight.dtype
    is_slow = dtype.itemsize == 2 and hidden.device.type == "cpu" and not has_matrix_units(dtype)
    return torch.float32 if is_slow else dtype


def cast_tiles(
    weight_VH: Tensor, start: int, stop: int, dtype: torch.dtype, room: Arena
) -> Iterator[tuple[int, int, Tensor]]:
    """Columns start..stop of a weight in `dtype`: in one piece where they are, else cast into `room` piece by piece."""
    if weight_VH.dtype == dtype:
        yield start, stop, weight_VH[start:stop]
        return
    row_bytes = weight_VH.shape[1] * dtype.itemsize
    num_columns = min(max(room.num_free_bytes // row_bytes, 1), CAST_COLUMNS, stop - start)
    tile_CH = room.take((num_columns, weight_VH.shape[1]), dtype)
    for first in range(start, stop, num_columns):
        last = min(first + num_columns, stop)
        yield first, last, tile_CH[: last - first].copy_(weight_VH[first:last])


def write_logits(
    hidden_RH: Tensor, weight_VH: Tensor, start: int, stop: int, planes_RC: Sequence[Tensor], room: Arena
) -> None:
    """hidden @ weight[start:stop].T into the planes, in the states' dtype; see plane_dtypes."""
    dtype = hidden_RH.dtype
    for first, last, weight_CH in cast_tiles(weight_VH, start, stop, dtype, room):
        high_RC = planes_RC[0][:, first - start : last - start]
        if high_RC.dtype != dtype:
            _wide_product(hidden_RH, weight_CH.T, high_RC)
            continue
        torch.mm(hidden_RH, weight_CH.T, out=high_RC)
        for low_RC in planes_RC[1:]:
            torch.addmm(high_RC, hidden_RH, weight_CH.T, beta=-1, out=low_RC[:, first - start : last - start])


def add_hidden_gradient(
    total_RH: Tensor, grad_RC: Tensor, weight_VH: Tensor, start: int, stop: int, room: Arena, *, fresh: bool
) -> None:
    """total (+)= grad @ weight[start:stop], summed in total's dtype; `fresh` overwrites what total held."""
    staged_RH = None
    if total_RH.dtype != grad_RC.dtype:
        wide = total_RH.dtype if total_RH.device.type == "cuda" else grad_RC.dtype
        staged_RH = room.take(total_RH.shape, wide)
    for first, last, weight_CH in cast_tiles(weight_VH, start, stop, grad_RC.dtype, room):
        _add_product(total_RH, grad_RC[:, first - start : last - start], weight_CH, staged_RH, fresh=fresh)
        fresh = False


def add_weight_gradient(total_CH: Tensor, grad_RC: Tensor, hidden_RH: Tensor, room: Arena, *, fresh: bool) -> None:
    """total (+)= grad.T @ hidden, summed in total's dtype; `fresh` overwrites what total held."""
    if total_CH.dtype == grad_RC.dtype:
        _add_product(total_CH, grad_RC.T, hidden_RH, None, fresh=fresh)
        return
    num_columns, width = total_CH.shape
    wide = total_CH.dtype if total_CH.device.type == "cuda" else grad_RC.dtype
    num_staged = min(max(room.num_free_bytes // (width * wide.itemsize), 1), STAGED_COLUMNS, num_columns)
    staged_CH = room.take((num_staged, width), wide)
    for first in range(0, num_columns, num_staged):
        last = min(first + num_staged, num_columns)
        _add_product(total_CH[first:last], grad_RC[:, first:last].T, hidden_RH, staged_CH[: last - first], fresh=fresh)


def _add_product(total: Tensor, left: Tensor, right: Tensor, staged: Tensor | None, *, fresh: bool) -> None:
    if staged is None:
        torch.addmm(total, left, right, beta=0 if fresh else 1, out=total)
        return
    # 16-bit sums over windows lose digits with every window, so each product is staged and joins a float32 sum.
    if staged.dtype != left.dtype:
        _wide_product(left, right, staged)
    else:
        torch.mm(left, right, out=staged)
    if fresh:
        total.copy_(staged)
    else:
        total.add_(staged)


def _wide_product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """left @ right of 16-bit operands, written in float32 (CUDA only)."""
    if out.is_contiguous():
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:
        out.copy_(torch.mm(left, right, out_dtype=out.dtype))
