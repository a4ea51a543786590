"""Bytes between teacher and trainer: exact for what the ring counts.

Letters: R rows that count, d_t the teacher's hidden size, b bytes of an element on the wire, V vocabulary, k kept ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.architecture import ModelShape

#: A kept logit and its token id.
VALUE_BYTES, ID_BYTES = 4, 4


@dataclass(frozen=True, kw_only=True)
class TokenBytes:
    """What one row that counts costs on the wire, by what is sent for it."""

    hidden: int
    logits: int
    topk: int
    k: int

    @property
    def logits_over_hidden(self) -> float:
        return self.logits / self.hidden

    @property
    def break_even_k(self) -> int:
        """With this many kept entries top-k costs as much as the whole state, which knows all of them."""
        return self.hidden // (VALUE_BYTES + ID_BYTES)


def token_bytes(teacher: ModelShape, *, wire_bytes: int, k: int) -> TokenBytes:
    """Logits in the wire's dtype, top-k as float32 values and int32 ids."""
    return TokenBytes(
        hidden=teacher.hidden_size * wire_bytes,
        logits=teacher.vocab_size * wire_bytes,
        topk=k * (VALUE_BYTES + ID_BYTES),
        k=k,
    )


def states_bytes(rows: int, hidden_size: int, wire_bytes: int) -> int:
    """Payload of a fill: what the ring counts as received for one microbatch."""
    return rows * hidden_size * wire_bytes


def head_bytes(vocab_size: int, hidden_size: int, element_bytes: int, *, has_bias: bool = False) -> int:
    """Payload of the teacher's head, fetched once at the start of each trainer."""
    return vocab_size * (hidden_size + int(has_bias)) * element_bytes


def run_bytes(
    *, rows: int, hidden_size: int, vocab_size: int, element_bytes: int, has_bias: bool = False, retried_rows: int = 0
) -> int:
    """All payload bytes that a run's ring receives: `rows` over all microbatches, those asked for ahead among them."""
    head = head_bytes(vocab_size, hidden_size, element_bytes, has_bias=has_bias)
    return head + states_bytes(rows + retried_rows, hidden_size, element_bytes)
