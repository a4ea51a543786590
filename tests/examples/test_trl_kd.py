"""Our loss in TRL's trainer: the same numbers as TRL's own, and a run from files to files."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from datasets import Dataset
from trl.experimental.gkd import GKDConfig, GKDTrainer

from examples.trl_kd import FusedGKDTrainer, main
from tests.examples.noting_loss import NotingLoss
from tests.tiny_models import TOKENIZER_VOCAB, build_tiny_checkpoint, tiny_model, tiny_tokenizer

CHATS = [
    {"messages": [{"role": "user", "content": f"What is slot {i}?"}, {"role": "assistant", "content": "A place. " * i}]}
    for i in range(1, 5)
]


@pytest.fixture(autouse=True)
def nothing_goes_on_behind_a_test() -> Iterator[None]:
    """A trainer of TRL reports to the hub from a thread, unless tests/conftest.py has said that there is no hub."""
    before = set(threading.enumerate())
    yield
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not any("telemetry" in name for name in left), left  # others, of pools and of progress bars, ask nobody


def gradients(trainer: GKDTrainer, num_items: int | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    batch = trainer.data_collator(CHATS)
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model.train(), batch, num_items_in_batch=num_items)
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_it_is_trls_own_loss(beta: float, tmp_path: Path) -> None:
    found = []
    for trainer_class in (GKDTrainer, FusedGKDTrainer):
        settings = GKDConfig(
            output_dir=str(tmp_path), beta=beta, lmbda=0.0, max_length=64, report_to=[], use_cpu=True, bf16=False
        )
        trainer = trainer_class(
            tiny_model("qwen3", seed=1),
            tiny_model("qwen3", seed=2),
            settings,
            train_dataset=Dataset.from_list(CHATS),
            processing_class=tiny_tokenizer(),
        )
        found.append((gradients(trainer, None), gradients(trainer, 123)))
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("columns", [(384, 448), (448, 384)])
def test_heads_padded_to_different_sizes_train_on_the_tokens_alone(columns: tuple[int, int], tmp_path: Path) -> None:
    student, teacher = (tiny_model("qwen3", seed=seed, vocab_size=size) for seed, size in enumerate(columns))
    settings = GKDConfig(
        output_dir=str(tmp_path), beta=0.3, lmbda=0.0, max_length=64, report_to=[], use_cpu=True, bf16=False
    )
    trainer = FusedGKDTrainer(
        student, teacher, settings, train_dataset=Dataset.from_list(CHATS), processing_class=tiny_tokenizer()
    )
    batch = trainer.data_collator(CHATS)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    with torch.no_grad():
        logits = [
            m(ids, attention_mask=mask).logits[:, :-1, :TOKENIZER_VOCAB] for m in (student, trainer.teacher_model)
        ]
        wanted = GKDTrainer.generalized_jsd_loss(*logits, labels=batch["labels"][:, 1:], beta=0.3)
    torch.testing.assert_close(trainer.compute_loss(student, batch), wanted, rtol=1e-4, atol=1e-6)


def test_under_bf16_the_loss_gets_states_in_bf16(tmp_path: Path) -> None:
    settings = GKDConfig(output_dir=str(tmp_path), max_length=64, report_to=[], use_cpu=True, bf16=True)
    models = (tiny_model("qwen3", seed=seed) for seed in (1, 2))
    trainer = FusedGKDTrainer(
        *models, settings, train_dataset=Dataset.from_list(CHATS), processing_class=tiny_tokenizer()
    )
    trainer.kd_loss = NotingLoss("jsd")
    # As train() does: under bf16 it is accelerate's wrapping that makes float32 of the states.
    student = trainer.accelerator.prepare_model(trainer.model)
    trainer.compute_loss(student, trainer.data_collator(CHATS)).backward()
    assert trainer.kd_loss.dtypes == (torch.bfloat16, torch.bfloat16)


def test_a_teacher_that_lacks_tokens_is_refused(tmp_path: Path) -> None:
    settings = GKDConfig(output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False)
    student, teacher = (tiny_model("qwen3", vocab_size=size) for size in (384, TOKENIZER_VOCAB - 8))
    with pytest.raises(ValueError, match="vocab_size"):
        FusedGKDTrainer(
            student, teacher, settings, train_dataset=Dataset.from_list(CHATS), processing_class=tiny_tokenizer()
        )


def test_it_trains_on_given_and_on_own_answers(tmp_path: Path) -> None:
    student = build_tiny_checkpoint(tmp_path / "student", "qwen3", seed=1, vocab_size=384)
    teacher = build_tiny_checkpoint(tmp_path / "teacher", "qwen3", seed=2, vocab_size=448)
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, CHATS)))
    for lmbda, flags in (("0.0", ["--bf16"]), ("1.0", [])):
        out = tmp_path / f"out{lmbda}"
        arguments = ["--teacher", str(teacher), "--student", str(student), "--data", str(tmp_path / "chats.jsonl")]
        arguments += ["--out", str(out), "--steps", "2", "--batch", "2", "--length", "64", "--new-tokens", "4"]
        assert main([*arguments, *flags, "--lmbda", lmbda]) == 0
        trained = transformers.AutoModelForCausalLM.from_pretrained(out)
        assert all(parameter.isfinite().all() for parameter in trained.parameters())
