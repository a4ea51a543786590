"""What training GPUs move between each other, by kind of group: weights, gradients, and a vocabulary group's rows.

Counted is what a rank receives at the least. A sum over ranks counts twice: parts are scattered and summed, and the
sums are gathered. A test holds the bytes against those of real collectives. What the ranks of a --student-tp group
move within each layer is not counted.

Letters: N parameters, N_root those of embedding, head and final norm, F ranks that share the state, D replicas of it, S
ranks of a vocabulary group, R rows that count, T tokens, d hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from planner.loss_costs import LossShape, Mode
from planner.memory import divided
from planner.trainer_memory import TrainerSetup, loss_plan, loss_shape
from planner.trainer_setup import REDUCED_BYTES

#: Numbers of a row that the loss exchanges in a vocabulary group's first pass.
ROW_STATISTICS = 7
#: A label, or a token id.
LABEL_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """num_bytes: that a rank receives, for a microbatch. span_gpus: GPUs from the first of a group to its last."""

    name: str
    num_bytes: int
    span_gpus: int
    formula: str

    def crosses_nodes(self, *, gpus: int, nodes: int) -> bool:
        """Whether any such group has members on two nodes of `gpus` each."""
        return nodes > 1 and (self.span_gpus > gpus or gpus % self.span_gpus != 0)


def exchanges_of(setup: TrainerSetup, *, num_trainers: int) -> tuple[Exchange, ...]:
    """Of a student that is trained on so many ranks; those that move nothing are left out."""
    found = [_gathering(setup), _scattering(setup), *_sums(setup, num_trainers)]
    if setup.vocab_shards > 1:
        found += [_rows(setup), _lookup(setup)]
    return tuple(exchange for exchange in found if exchange.num_bytes)


def teacher_gathering(setup: TrainerSetup) -> Exchange:
    """A colocated teacher's weights, for one pass."""
    count, element = setup.teacher.num_params, setup.teacher_bytes
    return Exchange(
        name="teacher's weights, gathered",
        num_bytes=gathered_bytes(count, shards=setup.shards, element_bytes=element),
        span_gpus=setup.shards * setup.tp,
        formula=f"{element} N_t (F - 1) / F = {element} x {count:,} x {setup.shards - 1} / {setup.shards}",
    )


def gathered_bytes(count: int, *, shards: int, element_bytes: int) -> int:
    """What a rank receives to have all of `count` parameters of which it keeps 1 / shards."""
    return element_bytes * count * (shards - 1) // shards


def _root_count(setup: TrainerSetup) -> int:
    student = setup.student
    return student.embedding.count + student.head.count + student.final_norm.count - setup.kept.count


def _gathering(setup: TrainerSetup) -> Exchange:
    """Layers let go of their weights between forward and backward pass, the root group does not."""
    root = _root_count(setup)
    layers = setup.student.num_params - setup.kept.count - root
    element = 4 if setup.arithmetic == "fp32" else 2
    count = divided(2 * layers + root, by=setup.tp)
    return Exchange(
        name="weights, gathered",
        num_bytes=gathered_bytes(count, shards=setup.shards, element_bytes=element),
        span_gpus=setup.shards * setup.tp,
        formula=f"{element} (2 N - N_root) (F - 1) / F = {element} x {count:,} x {setup.shards - 1} / {setup.shards}",
    )


def _scattering(setup: TrainerSetup) -> Exchange:
    """Of every microbatch, each rank is left with the sum of its part."""
    count = divided(setup.student.num_params - setup.kept.count, by=setup.tp)
    return Exchange(
        name="gradients, scattered",
        num_bytes=gathered_bytes(count, shards=setup.shards, element_bytes=REDUCED_BYTES),
        span_gpus=setup.shards * setup.tp,
        formula=f"{REDUCED_BYTES} N (F - 1) / F = {REDUCED_BYTES} x {count:,} x {setup.shards - 1} / {setup.shards}",
    )


def _sums(setup: TrainerSetup, num_trainers: int) -> list[Exchange]:
    """Once a step, over the ranks that hold the same part; they lie as far apart as the ranks do."""
    kept, parts = setup.kept.count, []
    for name, count, ranks in (
        ("gradients, summed over replicas", setup.student.num_params - kept, setup.shards),
        ("head's gradients, summed over vocabulary groups", kept, setup.vocab_shards),
    ):
        copies, own = num_trainers // ranks, divided(count, by=ranks * setup.tp)
        parts.append(
            Exchange(
                name=name,
                num_bytes=2 * gathered_bytes(own, shards=copies, element_bytes=REDUCED_BYTES) // setup.grad_accum,
                span_gpus=num_trainers * setup.tp,
                formula=f"2 x {REDUCED_BYTES} x {own:,} x {copies - 1} / {copies} / {setup.grad_accum} microbatches",
            )
        )
    return parts


def _rows(setup: TrainerSetup) -> Exchange:
    shape, ranks = loss_shape(setup), setup.vocab_shards
    each = row_bytes(shape, loss_plan(setup).mode, num_ranks=ranks, teacher_bytes=setup.wire_bytes)
    return Exchange(
        name="rows of the vocabulary group",
        num_bytes=int(shape.num_rows * each),
        span_gpus=ranks * setup.tp,
        formula=f"R S x {float(each):,.0f} = {setup.rows:,} x {ranks} x {float(each):,.0f}",
    )


def row_bytes(shape: LossShape, mode: Mode, *, num_ranks: int, teacher_bytes: int) -> Fraction:
    """For each row of a vocabulary group's `num_rows`, of all its ranks: states and labels are gathered (recompute: for
    the forward and for the backward pass), statistics of every shard too, and the row's owner gets its gradient."""
    given = shape.student_hidden * shape.hidden_grad_bytes + shape.teacher_hidden * teacher_bytes + LABEL_BYTES
    grad_hidden = shape.student_hidden * shape.work_bytes if shape.grad_hidden else 0
    meetings = 1 if mode == "keep" else 2
    statistics = (num_ranks - 1) * ROW_STATISTICS * shape.work_bytes
    return statistics + Fraction((meetings * given + grad_hidden) * (num_ranks - 1), num_ranks)


def _lookup(setup: TrainerSetup) -> Exchange:
    """A tied embedding is cut as the head is: ids are gathered, found rows go back, and so do their gradients."""
    ranks, width = setup.vocab_shards, 2 * setup.student.hidden_size * setup.element_bytes + LABEL_BYTES
    tokens = setup.tokens if setup.student.is_tied else 0
    return Exchange(
        name="rows of the tied embedding",
        num_bytes=(ranks - 1) * tokens * width,
        span_gpus=ranks * setup.tp,
        formula=f"(S - 1) T x {width:,} = {ranks - 1} x {tokens:,} x {width:,}",
    )
