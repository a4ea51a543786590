"""What a trainer's memory follows from: the models, the microbatch, and how ranks share them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from planner.activations import Arithmetic
from planner.architecture import ModelShape, Params
from planner.memory import divided

Layout = Literal["disagg", "colocated"]
Loss = Literal["fused", "full"]
#: A logit of the full loss costs at its peak: both models' logits in float32, both log softmaxes, and what the
#: divergence holds. The least that a careful implementation does with, and what this project's textbook takes.
CAREFUL_LOGIT_BYTES = 18
TEXTBOOK_LOGIT_BYTES = 37
#: Ranks sum gradients in float32, whatever dtype they were made in.
REDUCED_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class TrainerSetup:
    """One trainer device and its microbatch.

    shards: ranks that share weights, gradients and optimizer state (FSDP, ZeRO-3). tp: ranks that share each layer.
    vocab_shards: ranks that share both heads' columns. element_bytes: of the weights that are trained. rows: tokens
    that count. pass_tokens: tokens of the colocated teacher's pass. matrix_units: of a CPU, for 16-bit products.
    free_bytes: what the loss finds free when it chooses its mode; None: enough.
    """

    student: ModelShape
    teacher: ModelShape
    layout: Layout = "disagg"
    loss: Loss = "fused"
    tokens: int
    rows: int
    sequence_tokens: int
    pass_tokens: int = 0
    arithmetic: Arithmetic = "bf16"
    element_bytes: int = 4
    is_8bit: bool = False
    shards: int = 1
    tp: int = 1
    vocab_shards: int = 1
    checkpointing: bool = True
    grad_accum: int = 1
    device: Literal["cuda", "cpu"] = "cuda"
    matrix_units: bool = False
    has_delta_kernel: bool = True
    wire_bytes: int = 2
    teacher_bytes: int = 2
    ring_depth: int = 3
    ring_spares: int = 2
    slots_on_device: bool = True
    workspace_bytes: int | None = None
    free_bytes: int | None = None
    full_logit_bytes: int = CAREFUL_LOGIT_BYTES

    @property
    def columns(self) -> int:
        """Vocabulary columns on this rank."""
        return divided(self.student.vocab_size, by=self.vocab_shards)

    @property
    def kept(self) -> Params:
        """Of a vocabulary group: the head (the embedding too, where they are one) is cut over the group instead of over
        all ranks, and never gathered."""
        if self.vocab_shards == 1:
            return Params()
        return self.student.embedding if self.student.is_tied else self.student.head
