"""The fused loss in a Hugging Face `Trainer`: the teacher beside the student, neither logits matrix in memory.

    python -m examples.hf_trainer_kd --teacher DIR --student DIR --data FILE.txt --out DIR

What to take from it is DistillationTrainer, which needs nothing of this project but `student.loss` and a function of
`planner`. It runs on one device or under DDP; under FSDP the student and the loss have to be one module, as in
`student.train`.
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

from planner.token_map import num_tokens_of
from student.loss import KDLoss, head_of


def final_states(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """What the head reads [B, T, H], through the forward of whatever wraps the model; the head's own work is one
    position long."""
    wanted = {name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs}
    out = model(**wanted, use_cache=False, output_hidden_states=True, logits_to_keep=1)
    states: Tensor = out.hidden_states[-1]
    return states


def in_compute_dtype(states: Tensor, settings: transformers.TrainingArguments) -> Tensor:
    """The states as the model made them: under bf16 or fp16 accelerate hands its outputs on in float32, and the loss
    would multiply in float32, at a fraction of the speed and twice the memory."""
    if settings.bf16 or settings.fp16:
        return states.to(torch.bfloat16 if settings.bf16 else torch.float16)
    return states


class DistillationTrainer(transformers.Trainer):
    """A Trainer whose loss is distillation from a teacher plus cross entropy, over the labels that are not -100.

    teacher: a causal LM with the same token map; it is moved to the device, and never trained. processing_class: the
    tokenizer; it says which columns of the two heads are tokens, for models of one family are padded to different
    sizes. Without it all are, and the heads must have equally many."""

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        args: transformers.TrainingArguments,
        *,
        teacher: transformers.PreTrainedModel,
        kd_loss: KDLoss,
        processing_class: transformers.PreTrainedTokenizerBase | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, args, processing_class=processing_class, **kwargs)
        self.teacher: nn.Module = teacher.eval().requires_grad_(False)
        self.teacher.to(self.args.device)
        self.kd_loss = kd_loss
        self.num_tokens = None if processing_class is None else num_tokens_of(processing_class.get_vocab())
        # Asks the Trainer to count the labels of a step over microbatches and ranks. With that count as the divisor no
        # microbatch counts more for being short, and the Trainer does not divide by their number.
        self.model_accepts_loss_kwargs = True

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        student, teacher = self.accelerator.unwrap_model(model), self.teacher
        with torch.no_grad(), self.accelerator.autocast():
            teacher_states = in_compute_dtype(final_states(teacher, inputs), self.args)
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
        loss = out.loss
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            # The count is over all ranks, and DDP averages gradients over them.
            loss = loss * self.accelerator.num_processes
        return (loss, {"loss": loss, "kd": out.kd, "ce": out.ce}) if return_outputs else loss


def read_texts(path: str, tokenizer: Any, length: int) -> datasets.Dataset:
    """Token sequences of a text file, a paragraph each."""
    with open(path) as file:
        paragraphs = [text for text in file.read().split("\n\n") if text.strip()]
    encoded = tokenizer(paragraphs, truncation=True, max_length=length)["input_ids"]
    return datasets.Dataset.from_dict({"input_ids": [ids for ids in encoded if len(ids) > 1]})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="examples.hf_trainer_kd", description=__doc__)
    for name in ("teacher", "student", "data", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--bf16", action="store_true", help="bf16 autocast over float32 weights")
    asked = parser.parse_args(argv)
    tokenizer = transformers.AutoTokenizer.from_pretrained(asked.student)
    load = transformers.AutoModelForCausalLM.from_pretrained
    # Weights in 16 bits would lose what a small step adds to them.
    student, teacher = load(asked.student, dtype=torch.float32), load(asked.teacher)
    settings = transformers.TrainingArguments(
        output_dir=asked.out,
        max_steps=asked.steps,
        per_device_train_batch_size=asked.batch,
        gradient_accumulation_steps=asked.accumulate,
        learning_rate=asked.lr,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        remove_unused_columns=False,
        label_names=["labels"],
        bf16=asked.bf16,
        use_cpu=not torch.accelerator.is_available(),
    )
    trainer = DistillationTrainer(
        student,
        settings,
        teacher=teacher,
        processing_class=tokenizer,
        kd_loss=KDLoss("forward_kl", kd_weight=0.9, ce_weight=0.1),
        train_dataset=read_texts(asked.data, tokenizer, asked.length),
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    trainer.save_model(asked.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
