"""The output head of a model: everything between its final hidden states and its logits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Head:
    """logits = softcap(logit_scale * (hidden @ weight.T + bias)), where softcap(z) = c * tanh(z / c) if a cap c is
    given.

    weight [V, H], bias [V]. Columns at and past real_vocab are padding: they carry no probability and get no gradient.
    In a vocabulary group weight and bias are this rank's columns, vocab_start is the first one's index, and real_vocab
    counts the columns of the whole vocabulary.

    main_grad [V, H]: a gradient in float32 (float64 with float64 states) that dW is added to in backward; autograd then
    gets none for the weight. Without it dW, summed in float32 either way, is handed to autograd in the weight's dtype.

    Raises ValueError: a shape, number or dtype that can't be a head's.
    """

    weight: Tensor
    bias: Tensor | None = None
    logit_softcap: float | None = None
    logit_scale: float = 1.0
    real_vocab: int | None = None
    vocab_start: int = 0
    main_grad: Tensor | None = None

    def __post_init__(self) -> None:
        if self.weight.dim() != 2 or not self.weight.is_floating_point():
            raise ValueError(
                f"head weight: got shape {tuple(self.weight.shape)} of {self.weight.dtype}; allowed: a floating [V, H]"
            )
        if self.bias is not None and self.bias.shape != (self.weight.shape[0],):
            raise ValueError(
                f"head bias: got {tuple(self.bias.shape)}; allowed: [{self.weight.shape[0]}], one per column"
            )
        if self.main_grad is not None and self.main_grad.shape != self.weight.shape:
            raise ValueError(f"main_grad: got {tuple(self.main_grad.shape)}; allowed: {tuple(self.weight.shape)}")
        if self.logit_softcap is not None and not self.logit_softcap > 0:
            raise ValueError(f"logit_softcap: got {self.logit_softcap}; allowed: None or above 0")
        if self.logit_scale == 0:
            raise ValueError("logit_scale: got 0; allowed: any other number")
        if self.vocab_start < 0:
            raise ValueError(f"vocab_start: got {self.vocab_start}; allowed: 0 and more")
        if self.real_vocab is not None and self.real_vocab < 1:
            raise ValueError(f"real_vocab: got {self.real_vocab}; allowed: None or 1 and more")

    def detached(self) -> Head:
        """The same head without ties to autograd."""
        return replace(self, weight=self.weight.detach(), bias=None if self.bias is None else self.bias.detach())

    @property
    def num_real_columns(self) -> int:
        """How many of this shard's leading columns are real; 0 where the shard holds padding only."""
        num_columns = self.weight.shape[0]
        if self.real_vocab is None:
            return num_columns
        return min(max(self.real_vocab - self.vocab_start, 0), num_columns)


def check_pair(student: Head, teacher: Head, *, sharded: bool) -> None:
    """Refuse two heads that don't describe the same columns.

    Raises ValueError: with both sizes, and what would say which columns are real.
    """
    if student.vocab_start != teacher.vocab_start:
        raise ValueError(
            f"vocab_start: student {student.vocab_start}, teacher {teacher.vocab_start}; allowed: the same on both"
        )
    if not sharded:
        for side, head in (("student", student), ("teacher", teacher)):
            if head.vocab_start != 0:
                raise ValueError(f"{side} vocab_start: got {head.vocab_start} without a vocab_group; allowed: 0")
            if head.real_vocab is not None and head.real_vocab > head.weight.shape[0]:
                raise ValueError(
                    f"{side} real_vocab: got {head.real_vocab}; allowed: at most its {head.weight.shape[0]} columns"
                )
    if student.num_real_columns != teacher.num_real_columns:
        raise ValueError(
            f"vocabulary: {student.num_real_columns} columns of the student's {student.weight.shape[0]} count, of the "
            f"teacher's {teacher.weight.shape[0]} {teacher.num_real_columns}; allowed: equally many. Where the token "
            f"map is the same and the rest is padding, say so with real_vocab"
        )
