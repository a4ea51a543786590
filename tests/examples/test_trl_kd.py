"""Our loss in TRL's trainer: the same numbers as TRL's own, and a run from files to files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from datasets import Dataset
from trl.experimental.gkd import GKDConfig, GKDTrainer

from examples.trl_kd import FusedGKDTrainer, main
from tests.tiny_models import build_tiny_checkpoint, tiny_model, tiny_tokenizer

CHATS = [
    {"messages": [{"role": "user", "content": f"What is slot {i}?"}, {"role": "assistant", "content": "A place. " * i}]}
    for i in range(1, 5)
]


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


def test_it_trains_on_given_and_on_own_answers(tmp_path: Path) -> None:
    student = build_tiny_checkpoint(tmp_path / "student", "qwen3", seed=1)
    teacher = build_tiny_checkpoint(tmp_path / "teacher", "qwen3", seed=2)
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, CHATS)))
    for lmbda in ("0.0", "1.0"):
        out = tmp_path / f"out{lmbda}"
        arguments = ["--teacher", str(teacher), "--student", str(student), "--data", str(tmp_path / "chats.jsonl")]
        arguments += ["--out", str(out), "--steps", "2", "--batch", "2", "--length", "64", "--new-tokens", "4"]
        assert main([*arguments, "--lmbda", lmbda]) == 0
        trained = transformers.AutoModelForCausalLM.from_pretrained(out)
        assert all(parameter.isfinite().all() for parameter in trained.parameters())
