"""Fetching the teacher's head through ordinary slots, before the first microbatch.

The head may be larger than a slot, so it comes in pieces of at most one. They are requests like any other, with
negative seqs, so that retries, deadlines and fencing hold for them too.
"""

from __future__ import annotations

import hashlib

import torch

from ring.core.config import Expectation
from ring.core.errors import RemoteProtocolError
from ring.core.messages import HeadInfo, HeadRequest
from ring.prefetch import TORCH_DTYPES, Ring
from transport.memory import as_bytes


def fetch_head(ring: Ring) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The whole head: weight [vocab, hidden] and bias [vocab] or None, in the head's dtype, owned by the caller.

    Call it after `ring.open` and before the first `ring.submit`. Raises RemoteProtocolError: the bytes do not hash to
    what the teacher announced. Raises TeacherLost."""
    head, slot_bytes = ring.welcome.head, ring.slot_bytes
    whole = torch.empty(head.num_bytes, dtype=torch.uint8)
    target = as_bytes(whole)
    offsets = range(0, head.num_bytes, slot_bytes)
    asked = 0
    for offset in offsets:
        while asked < len(offsets) and ring.can_submit:
            _ask(ring, head, offsets[asked], seq=asked - len(offsets))
            asked += 1
        lease = ring.next_lease()
        target[offset : offset + lease.header.num_bytes] = lease.raw()
        lease.release()
    digest = hashlib.sha256(target).hexdigest()
    if digest != head.sha256:
        raise RemoteProtocolError(f"the teacher's head hashes to {digest}; it announced {head.sha256}")
    return split_head(whole, head)


def split_head(whole: torch.Tensor, head: HeadInfo) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Views of the weight and the bias in the head's bytes, `whole` [num_bytes] uint8."""
    dtype = TORCH_DTYPES[head.dtype]
    weight_bytes = head.vocab_size * head.hidden_size * head.dtype.itemsize_bytes
    weight = whole[:weight_bytes].view(dtype).view(head.vocab_size, head.hidden_size)
    bias = whole[weight_bytes:].view(dtype) if head.has_bias else None
    return weight, bias


def _ask(ring: Ring, head: HeadInfo, offset: int, *, seq: int) -> None:
    num_bytes = min(ring.slot_bytes, head.num_bytes - offset)
    # Echoed by the fill, so that one piece can't be taken for another.
    name = f"head 0:{head.vocab_size} bytes {offset}:{offset + num_bytes}".encode()
    input_hash = hashlib.blake2b(name, digest_size=16).digest()
    request = HeadRequest(
        vocab_start=0, vocab_end=head.vocab_size, offset=offset, num_bytes=num_bytes, input_hash=input_hash
    )
    expect = Expectation(num_rows=0, dtype=head.dtype, num_bytes=num_bytes, input_hash=input_hash, cost_tokens=0)
    ring.ask(seq, request, expect)
