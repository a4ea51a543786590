"""The student and its loss as one module, and the held-out cross entropy of it.

One module, because sharded training (FSDP2) gathers weights around the forward of the module it wraps: the loss reads
the head's weight inside of it. The teacher's head lies beside it, frozen and in no checkpoint.

Legend: B sequences, S tokens of a sequence, N = B * S, R rows that count, Hs / Ht hidden sizes, V head columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from planner.head_spec import HeadSpec
from ring.core.errors import ConfigError
from student.data.microbatch import MicroBatch
from student.load import LoadedStudent, init_student_from_config, load_student, states_of
from student.loss import FullLogitsLoss, Head, KDLoss, KDOutput
from student.loss.head import check_pair
from student.parallel.vocabulary import VocabShard
from student.probe import check_packing

__all__ = [
    "WEIGHT_DTYPES",
    "DistilledStudent",
    "Evaluation",
    "LoadedStudent",
    "Precision",
    "evaluate",
    "init_student_from_config",
    "load_student",
]

Precision = Literal["bf16", "fp32", "fp64"]
#: The dtype of the weights that are trained: bf16 is autocast over float32 weights.
WEIGHT_DTYPES: dict[Precision, torch.dtype] = {
    "bf16": torch.float32,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


class DistilledStudent(nn.Module):
    """A causal LM that returns its distillation loss instead of logits.

    `loss`: KDLoss, or FullLogitsLoss for the textbook baseline; with its kd_weight 0 there is no teacher, and
    `teacher_head` stays None. `packed`: sequences hold several documents, kept apart by their position ids. `vocab`:
    the model's head holds these columns of the vocabulary, and so does the teacher's; each forward is an exchange of
    the group, whose ranks bring rows of their own.

    Raises ConfigError: the two vocabularies don't fit, a KD term without a teacher's head, weights of another dtype
    than `precision` trains, a model that can't keep packed documents apart or recompute its activations.
    """

    def __init__(
        self,
        model: Any,
        head_spec: HeadSpec,
        *,
        loss: KDLoss | FullLogitsLoss,
        teacher_head: Head | None = None,
        precision: Precision = "bf16",
        packed: bool = False,
        gradient_checkpointing: bool = False,
        vocab: VocabShard | None = None,
    ) -> None:
        super().__init__()
        self.teacher_weight: Tensor | None
        self.teacher_bias: Tensor | None
        self.model: Any = model
        self.head_spec = head_spec
        self.precision: Precision = precision
        self.packed = packed
        self.loss = loss
        self._vocab = vocab
        self._label_loss = KDLoss.from_options(replace(loss.options, kd_weight=0.0, ce_weight=1.0))
        weight = model.get_output_embeddings().weight
        if weight.dtype != WEIGHT_DTYPES[precision]:
            raise ConfigError(
                f"student weights are {weight.dtype}; allowed with precision {precision}: {WEIGHT_DTYPES[precision]}"
            )
        self._teacher_head = self._keep_teacher_head(teacher_head) if loss.options.kd_weight > 0 else None
        if packed:
            self._check_packing()
        if gradient_checkpointing:
            # The name changed within the versions that are allowed.
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            try:
                enable({"use_reentrant": False})
            except ValueError as error:
                raise ConfigError(f"--gradient-checkpointing: {type(model).__name__}: {error}") from error

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor,
        row_index: Tensor,
        *,
        teacher_hidden: Tensor | None = None,
        teacher_row_scale: Tensor | None = None,
        num_rows: int | None = None,
        labels_only: bool = False,
    ) -> KDOutput:
        """The loss of one microbatch.

        The first four are a MicroBatch's, on the model's device. `teacher_hidden` [R, Ht]: the rows of `row_index`, in
        their order; only read. `num_rows`: rows of the whole step, over microbatches and ranks; None = R.
        `labels_only`: the plain cross entropy, without a teacher, whatever the loss; for evaluation. Its windows and
        products are those of the loss.

        With a vocabulary group the loss is that of all its ranks' rows, and so are kd and ce.

        Lifetime: `teacher_hidden` may be overwritten once the backward pass of this call is done.
        """
        group: dict[str, Any] = {}
        if self._vocab is not None:
            (counts,) = self._vocab.group.counts(row_index.numel())
            group = {"vocab_group": self._vocab.group.group, "group_rows": counts}
        device_type = input_ids.device.type
        with torch.autocast(device_type, dtype=torch.bfloat16, enabled=self.precision == "bf16"):
            states_BSH = states_of(self.model, input_ids, position_ids if self.packed else None)
        states_NH = states_BSH.flatten(0, 1)
        if self.precision == "bf16":
            # Norms with float32 weights promote their result; the loss's products are meant to be bf16 ones.
            states_NH = states_NH.to(torch.bfloat16)
        if labels_only:
            return self._label_loss(
                states_NH, self._student_head(), None, None, labels, row_index=row_index, num_rows=num_rows, **group
            )
        return self.loss(
            states_NH,
            self._student_head(),
            teacher_hidden,
            self._head_of_teacher(),
            labels,
            row_index=row_index,
            teacher_row_scale=teacher_row_scale,
            num_rows=num_rows,
            **group,
        )

    @property
    def num_copies_of_loss(self) -> int:
        """How many ranks get one and the same loss from a forward: those of a vocabulary group."""
        return 1 if self._vocab is None else self._vocab.group.size

    def _student_head(self) -> Head:
        head = self.model.get_output_embeddings()
        spec = self.head_spec
        return Head(
            weight=head.weight,
            bias=head.bias if spec.has_bias else None,
            logit_softcap=spec.logit_softcap,
            logit_scale=spec.logit_scale,
            real_vocab=spec.real_vocab,
            vocab_start=0 if self._vocab is None else self._vocab.start,
        )

    def _keep_teacher_head(self, head: Head | None) -> Head:
        if head is None:
            raise ConfigError("a KD term needs the teacher's head; without a teacher use --kd-weight 0")
        try:
            check_pair(self._student_head(), head, sharded=self._vocab is not None)
        except ValueError as error:
            raise ConfigError(f"teacher and student don't fit: {error}") from error
        # Buffers move with the module; not persistent: no checkpoint holds the teacher.
        self.register_buffer("teacher_weight", head.weight.detach(), persistent=False)
        self.register_buffer("teacher_bias", None if head.bias is None else head.bias.detach(), persistent=False)
        return head

    def _head_of_teacher(self) -> Head | None:
        if self._teacher_head is None or self.teacher_weight is None:
            return None
        return replace(self._teacher_head, weight=self.teacher_weight, bias=self.teacher_bias)

    def _check_packing(self) -> None:
        was_training = self.model.training
        self.model.eval()
        with torch.no_grad():
            check_packing(self.model, lambda ids_BS, positions_BS: states_of(self.model, ids_BS, positions_BS))
        self.model.train(was_training)


@dataclass(frozen=True)
class Evaluation:
    """`nats_per_row`: mean cross entropy of the labels, in nats a token that counts; NaN without any."""

    nats_per_row: float
    num_rows: int


def evaluate(
    student: nn.Module,
    microbatches: Iterable[MicroBatch],
    *,
    device: str | torch.device,
    sum_over_ranks: Callable[[float, int], tuple[float, int]] | None = None,
) -> Evaluation:
    """Held-out cross entropy: no teacher, no gradient, no full logits; the module's mode is restored.

    `student`: a DistilledStudent, wrapped or not. `sum_over_ranks`: nats and rows of this rank's microbatches in, those
    of all ranks out; every rank must bring as many microbatches.
    """
    was_training = student.training
    student.eval()
    total_nats = torch.zeros((), dtype=torch.float64, device=device)
    num_rows = 0
    try:
        with torch.no_grad():
            for batch in microbatches:
                # Divided by 1: sums add up over microbatches of any size.
                total_nats += student(**batch.inputs(device), num_rows=1, labels_only=True).ce.double()
                num_rows += batch.num_rows
    finally:
        student.train(was_training)
    nats = float(total_nats)
    if sum_over_ranks is not None:
        nats, num_rows = sum_over_ranks(nats, num_rows)
    return Evaluation(nats / num_rows if num_rows else float("nan"), num_rows)
