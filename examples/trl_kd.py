"""The fused loss in TRL: its trainer for generalized knowledge distillation, with our loss in place of its own.

    python -m examples.trl_kd --teacher DIR --student DIR --data CHATS.jsonl --out DIR

CHATS.jsonl: `{"messages": [{"role": ..., "content": ...}, ...]}` a line. Everything else is TRL's: the collator,
learning from the student's own answers (lmbda), the teacher beside the student. Its own loss makes both logits
matrices.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import datasets
import torch
import transformers
from torch import Tensor, nn
from trl.experimental.gkd import GKDConfig, GKDTrainer

from examples.hf_trainer_kd import final_states, in_compute_dtype
from planner.token_map import num_tokens_of
from student.loss import KDLoss, head_of


def loss_of(beta: float) -> KDLoss:
    """TRL's divergence of that beta: the weight of the teacher in the mixture, with KL's two directions at its ends.
    TRL multiplies by no T^2, and adds no cross entropy."""
    divergence = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    teacher_weight = beta if divergence == "jsd" else 0.5
    return KDLoss(divergence, teacher_weight=teacher_weight, kd_weight=1.0, ce_weight=0.0, scale_t2=False)


def pad_alike(teacher: transformers.PreTrainedModel, student: transformers.PreTrainedModel, num_tokens: int) -> None:
    """Give the teacher the student's number of columns where both have all tokens and differ in padding: TRL wants
    equally many. A head that lacks tokens is left as it is, and refused."""
    sizes = [model.get_output_embeddings().weight.shape[0] for model in (student, teacher)]
    if sizes[0] != sizes[1] and min(sizes) >= num_tokens:
        teacher.resize_token_embeddings(sizes[0], mean_resizing=False)


class FusedGKDTrainer(GKDTrainer):
    """GKDTrainer, with the same loss in a fraction of its memory, and for heads that are padded to different sizes too:
    there the teacher gets the student's number of columns."""

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        teacher_model: transformers.PreTrainedModel,
        args: GKDConfig,
        *,
        processing_class: transformers.PreTrainedTokenizerBase,
        **kwargs: Any,
    ) -> None:
        self.num_tokens = num_tokens_of(processing_class.get_vocab())
        pad_alike(teacher_model, model, self.num_tokens)
        super().__init__(model, teacher_model, args, processing_class=processing_class, **kwargs)
        self.kd_loss = loss_of(self.beta)
        # Padding is no answer: an id from there would be no label.
        padding = list(range(self.num_tokens, model.get_output_embeddings().weight.shape[0]))
        if padding:
            self.generation_config.suppress_tokens = self.generation_kwargs["suppress_tokens"] = padding

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        student, teacher = (self.accelerator.unwrap_model(m) for m in (model, self.teacher_model))
        self.teacher_model.eval()
        with torch.no_grad():
            teacher_states = in_compute_dtype(final_states(self.teacher_model, inputs), self.args)
        student_states = in_compute_dtype(final_states(model, inputs), self.args)
        # Position i predicts token i + 1.
        labels = inputs["labels"][:, 1:].reshape(-1)
        out = self.kd_loss(
            student_states[:, :-1].reshape(labels.shape[0], -1),
            head_of(student, num_tokens=self.num_tokens),
            teacher_states[:, :-1].reshape(labels.shape[0], -1),
            head_of(teacher, num_tokens=self.num_tokens),
            labels,
            num_rows=num_items_in_batch,
        )
        return (out.loss, {"loss": out.loss}) if return_outputs else out.loss


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="examples.trl_kd", description=__doc__)
    for name in ("teacher", "student", "data", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--beta", type=float, default=0.5)
    parser.add_argument("--lmbda", type=float, default=0.0, help="part of the batches that the student answers itself")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--bf16", action="store_true", help="bf16 autocast over float32 weights")
    asked = parser.parse_args(argv)
    tokenizer = transformers.AutoTokenizer.from_pretrained(asked.student)
    load = transformers.AutoModelForCausalLM.from_pretrained
    # Weights in 16 bits would lose what a small step adds to them.
    student, teacher = load(asked.student, dtype=torch.float32), load(asked.teacher)
    settings = GKDConfig(
        output_dir=asked.out,
        max_steps=asked.steps,
        per_device_train_batch_size=asked.batch,
        beta=asked.beta,
        lmbda=asked.lmbda,
        max_length=asked.length,
        max_new_tokens=asked.new_tokens,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        bf16=asked.bf16,
        use_cpu=not torch.accelerator.is_available(),
    )
    chats = datasets.Dataset.from_json(asked.data)
    trainer = FusedGKDTrainer(student, teacher, settings, train_dataset=chats, processing_class=tokenizer)
    trainer.train()
    trainer.save_model(asked.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
