"""Fetching the teacher's head through ordinary slots, before the first microbatch.

The head may be larger than a slot, so it comes in pieces of at most one. They are requests like any other, with
negative seqs, so that retries, deadlines and fencing hold for them too.
"""

from __future__ import annotations

import hashlib

import torch

from ring.core.config import Expectation
from ring.core.errors import RemoteProtocolError
from ring.core.messages import HEAD_DIGEST_BYTES, HeadInfo, HeadRequest
from ring.dtypes import TORCH_DTYPES
from ring.prefetch import Ring
from transport.memory import as_bytes, check_free_memory


def fetch_head(ring: Ring, *, columns: tuple[int, int] | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The head: weight [vocab, hidden] and bias [vocab] or None, in the head's dtype, owned by the caller.

    columns: first and last + 1 of those that are wanted; None: all.
    Call it after `ring.open` and before the first `ring.submit`. Raises ConfigError: not that much memory is free.
    Raises RemoteProtocolError: the bytes do not hash to what the teacher announced (of some columns: to what it says of
    them), or are no finite numbers. Raises TeacherLost."""
    head = ring.welcome.head
    start, stop = columns or (0, head.vocab_size)
    columns_bytes = columns_num_bytes(head, stop - start)
    if columns_bytes == 0:
        return split_head(torch.empty(0, dtype=torch.uint8), head, num_columns=0)
    # The announced hash is over the whole head. Behind the bytes of some columns the teacher sends their own.
    num_bytes = columns_bytes + (0 if columns is None else HEAD_DIGEST_BYTES)
    check_free_memory(
        num_bytes,
        purpose=f"{stop - start} columns of the teacher's head",
        remedy="give it more, or use --vocab-parallel",
    )
    fetched = torch.empty(num_bytes, dtype=torch.uint8)
    target = as_bytes(fetched)
    offsets = range(0, num_bytes, ring.slot_bytes)
    asked = 0
    for offset in offsets:
        while asked < len(offsets) and ring.can_submit:
            piece = (offsets[asked], min(offsets[asked] + ring.slot_bytes, num_bytes))
            _ask(ring, head, (start, stop), piece, seq=asked - len(offsets))
            asked += 1
        lease = ring.next_lease()
        target[offset : offset + lease.header.num_bytes] = lease.raw()
        lease.release()
    announced = head.sha256 if columns is None else bytes(target[columns_bytes:]).hex()
    digest = hashlib.sha256(target[:columns_bytes]).hexdigest()
    if digest != announced:
        raise RemoteProtocolError(f"the teacher's head hashes to {digest}; it announced {announced}")
    weight, bias = split_head(fetched[:columns_bytes], head, num_columns=stop - start)
    _check_finite(weight[: max(0, head.real_vocab - start)])
    return weight, bias


def _check_finite(weight_VH: torch.Tensor) -> None:
    """Columns that are padding may hold anything. Raises RemoteProtocolError: a NaN, or something infinite."""
    # The two ends tell: both are NaN where one number is. No copy is made, as `isfinite` of all would.
    if weight_VH.numel() and not torch.stack(torch.aminmax(weight_VH)).isfinite().all():
        raise RemoteProtocolError(
            "the teacher's head holds numbers that are not finite: no loss could be learned from it"
        )


def columns_num_bytes(head: HeadInfo, num_columns: int) -> int:
    """The size of so many columns: their weight, and their bias behind it."""
    return num_columns * (head.hidden_size + int(head.has_bias)) * head.dtype.itemsize_bytes


def split_head(
    whole: torch.Tensor, head: HeadInfo, *, num_columns: int | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Views of the weight and the bias in the bytes of so many of the head's columns (None: all), `whole` uint8."""
    count = head.vocab_size if num_columns is None else num_columns
    dtype = TORCH_DTYPES[head.dtype]
    weight_bytes = count * head.hidden_size * head.dtype.itemsize_bytes
    weight = whole[:weight_bytes].view(dtype).view(count, head.hidden_size)
    bias = whole[weight_bytes:].view(dtype) if head.has_bias else None
    return weight, bias


def _ask(ring: Ring, head: HeadInfo, columns: tuple[int, int], piece: tuple[int, int], *, seq: int) -> None:
    (start, stop), (first, end) = columns, piece
    num_bytes = end - first
    # Echoed by the fill, so that one piece can't be taken for another.
    name = f"head {start}:{stop} bytes {first}:{end}".encode()
    input_hash = hashlib.blake2b(name, digest_size=16).digest()
    request = HeadRequest(vocab_start=start, vocab_end=stop, offset=first, num_bytes=num_bytes, input_hash=input_hash)
    expect = Expectation(num_rows=0, dtype=head.dtype, num_bytes=num_bytes, input_hash=input_hash, cost_tokens=0)
    ring.ask(seq, request, expect)
