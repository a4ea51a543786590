"""Bytes between teacher and trainer, and inside the groups of each: exact for what the ring counts.

Letters: R rows that count, d_t the teacher's hidden size, b bytes of an element on the wire, V vocabulary, k kept ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.architecture import ModelShape
from planner.loss_costs import LossShape, group_bytes_per_row

#: A kept logit and its token id.
VALUE_BYTES, ID_BYTES = 4, 4
TOKEN_ID_BYTES = 4
#: Numbers of a row that the loss exchanges in a vocabulary group's first pass.
ROW_STATISTICS = 7


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


def request_bytes(tokens: int) -> int:
    """Token ids of a microbatch, without the few bytes for each document and row range."""
    return TOKEN_ID_BYTES * tokens


def vocab_group_bytes(shape: LossShape, *, num_ranks: int) -> int:
    """Per row and rank of a vocabulary group, when its ranks hold different microbatches: both sides' states are
    gathered, statistics are exchanged, dX is summed."""
    if num_ranks == 1:
        return 0
    states = (shape.student_hidden + shape.teacher_hidden) * 2 * (num_ranks - 1) // num_ranks
    return states + group_bytes_per_row(shape, num_ranks, num_statistics=ROW_STATISTICS)


def sharding_bytes(model: ModelShape, *, shards: int, element_bytes: int, num_passes: int) -> int:
    """What one rank receives to gather a sharded model `num_passes` times, or sends to scatter its gradients once."""
    return num_passes * element_bytes * model.num_params * (shards - 1) // shards
