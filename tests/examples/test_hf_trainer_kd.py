"""The loss in a Hugging Face Trainer: the right loss, divided by the right count, and a run from files to files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from torch.nn import functional

from examples.hf_trainer_kd import DistillationTrainer, main
from tests.examples.noting_loss import NotingLoss
from tests.tiny_models import TOKENIZER_VOCAB, build_tiny_checkpoint, tiny_model, tiny_tokenizer

LENGTH = 12


def sequences(num: int, *, seed: int = 0) -> Dataset:
    """Of different lengths, so that microbatches hold different numbers of labels."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(num):
        ids = torch.randint(3, TOKENIZER_VOCAB, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[LENGTH - 2 * index :] = -100
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return Dataset.from_list(rows)


def trainer_of(
    tmp_path: Path,
    *,
    batch: int,
    accumulate: int,
    student: transformers.PreTrainedModel | None = None,
    teacher: transformers.PreTrainedModel | None = None,
    bf16: bool = False,
    processing_class: transformers.PreTrainedTokenizerBase | None = None,
    **loss: Any,
) -> DistillationTrainer:
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulate,
        learning_rate=1.0,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        report_to=[],
        save_strategy="no",
        remove_unused_columns=False,
        use_cpu=True,
        label_names=["labels"],
        bf16=bf16,
    )
    return DistillationTrainer(
        student or tiny_model("qwen3", seed=1),
        settings,
        teacher=teacher or tiny_model("llama", seed=2),
        kd_loss=NotingLoss("forward_kl", kd_weight=0.7, ce_weight=0.3, **loss),
        train_dataset=sequences(4),
        data_collator=transformers.default_data_collator,
        processing_class=processing_class,
    )


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_loss_is_the_textbooks_over_the_labels_that_count(temperature: float, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, batch=4, accumulate=1, temperature=temperature)
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    student, teacher = trainer.model, trainer.teacher
    with torch.no_grad():
        s_NV = student(batch["input_ids"]).logits[:, :-1].flatten(0, 1)
        t_NV = teacher(batch["input_ids"]).logits[:, :-1].flatten(0, 1)
        labels_N = batch["labels"][:, 1:].flatten()
        counts_N = labels_N != -100
        log_s_NV, log_t_NV = (functional.log_softmax(z_NV[counts_N] / temperature, -1) for z_NV in (s_NV, t_NV))
        kd = functional.kl_div(log_s_NV, log_t_NV, log_target=True, reduction="batchmean") * temperature**2
        wanted = 0.7 * kd + 0.3 * functional.cross_entropy(s_NV, labels_N)
        torch.testing.assert_close(trainer.compute_loss(student, batch), wanted, rtol=1e-4, atol=1e-5)
        # The count of the whole step is the divisor, not the microbatch's own.
        ours = trainer.compute_loss(student, batch, num_items_in_batch=torch.tensor(1000))
        torch.testing.assert_close(ours, wanted * counts_N.sum() / 1000, rtol=1e-4, atol=1e-6)


def test_microbatches_with_few_labels_count_no_more_than_in_one_batch(tmp_path: Path) -> None:
    trained = []
    for batch, accumulate in ((4, 1), (2, 2), (1, 4)):
        trainer = trainer_of(tmp_path, batch=batch, accumulate=accumulate)
        before = trainer.model.lm_head.weight.detach().clone()
        trainer.train()
        assert not torch.equal(trainer.model.lm_head.weight, before)
        trained.append([parameter.detach().clone() for parameter in trainer.model.parameters()])
    for other in trained[1:]:
        torch.testing.assert_close(other, trained[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("columns", [(384, 448), (448, 384)])
def test_heads_padded_to_different_sizes_train_on_the_tokens_alone(columns: tuple[int, int], tmp_path: Path) -> None:
    student, teacher = (tiny_model("qwen3", seed=seed, vocab_size=size) for seed, size in enumerate(columns))
    trainer = trainer_of(
        tmp_path, batch=4, accumulate=1, student=student, teacher=teacher, processing_class=tiny_tokenizer()
    )
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    with torch.no_grad():
        s_NV, t_NV = (m(batch["input_ids"]).logits[:, :-1, :TOKENIZER_VOCAB].flatten(0, 1) for m in (student, teacher))
        labels_N = batch["labels"][:, 1:].flatten()
        log_s_NV, log_t_NV = (functional.log_softmax(z_NV[labels_N != -100], -1) for z_NV in (s_NV, t_NV))
        kd = functional.kl_div(log_s_NV, log_t_NV, log_target=True, reduction="batchmean")
        wanted = 0.7 * kd + 0.3 * functional.cross_entropy(s_NV, labels_N)
        torch.testing.assert_close(trainer.compute_loss(student, batch), wanted, rtol=1e-4, atol=1e-5)
    trainer.train()
    assert all(parameter.isfinite().all() for parameter in student.parameters())


def test_under_bf16_the_loss_gets_states_in_bf16(tmp_path: Path) -> None:
    losses = []
    for bf16 in (False, True):
        trainer = trainer_of(tmp_path, batch=4, accumulate=1, bf16=bf16)
        losses.append(trainer.train().training_loss)
        assert trainer.kd_loss.dtypes == ((torch.bfloat16,) * 2 if bf16 else (torch.float32,) * 2)
        assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


def test_the_teacher_is_not_trained(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, batch=2, accumulate=1)
    before = [parameter.clone() for parameter in trainer.teacher.parameters()]
    trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.teacher.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in trainer.teacher.parameters())


@pytest.mark.parametrize("flags", [[], ["--bf16"]], ids=["fp32", "bf16"])
def test_it_trains_from_checkpoints_to_a_checkpoint(flags: list[str], tmp_path: Path) -> None:
    student = build_tiny_checkpoint(tmp_path / "student", "qwen3", seed=1, vocab_size=384, dtype=torch.bfloat16)
    teacher = build_tiny_checkpoint(tmp_path / "teacher", "gemma3", seed=2, vocab_size=448)
    (tmp_path / "text.txt").write_text("\n\n".join(f"The slot number {i} carries one request." for i in range(8)))
    arguments = ["--teacher", str(teacher), "--student", str(student), "--data", str(tmp_path / "text.txt")]
    arguments += ["--out", str(tmp_path / "out"), "--steps", "3", "--batch", "2", "--accumulate", "2", "--lr", "1e-2"]
    assert main([*arguments, *flags]) == 0
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert trained.dtype == torch.float32
    start = transformers.AutoModelForCausalLM.from_pretrained(student)
    assert not torch.equal(trained.get_output_embeddings().weight, start.get_output_embeddings().weight)
    assert all(parameter.isfinite().all() for parameter in trained.parameters())
