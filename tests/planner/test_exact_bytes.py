"""Bytes that the planner must know exactly: state of real models, slots of a real arena, payload of a real run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.families import shape_of
from planner.traffic import head_bytes, run_bytes, states_bytes, token_bytes
from planner.trainer_memory import TrainerSetup, trainer_memory
from student.config import TrainConfig
from student.optim import StudentOptimizer
from student.train.run import train
from tests.tiny_models import build_tiny_checkpoint, tiny_model
from transport.memory import SlotArena

FAMILIES = ("qwen3", "qwen3_5", "qwen3_5_moe", "llama", "gemma3", "granite")


def shape_of_model(model: Any) -> Any:
    return shape_of(model.config.to_dict(), name="tiny")


def terms_of(model: Any, **changes: Any) -> dict[str, int]:
    shape = shape_of_model(model)
    setup = TrainerSetup(
        student=shape, teacher=shape, tokens=8, rows=8, sequence_tokens=8, arithmetic="fp32", device="cpu", **changes
    )
    return {term.name: term.num_bytes for term in trainer_memory(setup).bound}


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_gradients_and_optimizer_state_are_known_to_the_byte(family: str) -> None:
    model = tiny_model(family)
    optimizer = StudentOptimizer(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    optimizer.step(lr=1e-3)
    terms = terms_of(model)
    assert terms["weights"] == sum(parameter.nbytes for parameter in model.parameters())
    assert terms["gradients"] == sum(gradient.nbytes for gradient in gradients)
    assert terms["optimizer_state"] == sum(tensor.nbytes for tensor in optimizer.state_tensors().values())


@pytest.mark.parametrize("rows", [1, 63, 1000])
@pytest.mark.parametrize("spares", [0, 2])
def test_slots_of_the_ring_are_known_to_the_byte(rows: int, spares: int) -> None:
    model = tiny_model("qwen3", hidden_size=36)
    shape = shape_of_model(model)
    setup = TrainerSetup(
        student=shape, teacher=shape, tokens=rows, rows=rows, sequence_tokens=8, ring_depth=3, ring_spares=spares
    )
    (predicted,) = (term.num_bytes for term in trainer_memory(setup).bound if term.name == "ring_slots")
    arena = SlotArena(num_slots=3 + spares, slot_bytes=rows * 36 * 2)
    try:
        assert predicted == arena.total_bytes
    finally:
        arena.close()


def test_bytes_that_a_run_receives_are_known_to_the_byte(tmp_path: Path) -> None:
    """A real run: its ring counts every payload byte, the head's among them."""
    build_tiny_checkpoint(tmp_path / "teacher", "qwen3", seed=1, hidden_size=48)
    build_tiny_checkpoint(tmp_path / "student", "qwen3", seed=2)
    data = tmp_path / "data.jsonl"
    texts = [f"Slot {i} holds {i * i} rows." * (1 + i % 3) for i in range(14)]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train(
        TrainConfig(
            student=str(tmp_path / "student"),
            teacher=(str(tmp_path / "teacher"),),
            layout="colocated",
            data=(str(data),),
            cache_dir=str(tmp_path / "cache"),
            max_length=48,
            batch_size=4,
            epochs=1,
            precision="fp32",
            threads=1,
            device="cpu",
            out=str(tmp_path / "run"),
        )
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = sum(step["rows"] for step in steps)
    assert summary["retries"] == 0
    assert summary["bytes_received"] == run_bytes(rows=rows, hidden_size=48, vocab_size=320, element_bytes=4)
    largest = max(step["rows"] for step in steps)
    # Slots hold the largest microbatch that there can be, not only the largest that came.
    assert summary["slots_bytes"] >= 5 * states_bytes(largest, 48, 4)


def test_traffic_of_a_row_is_what_the_design_says() -> None:
    shape = shape_of(
        {
            "model_type": "llama",
            "vocab_size": 248_320,
            "hidden_size": 2048,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 16,
        },
        name="wide",
    )
    each = token_bytes(shape, wire_bytes=2, k=64)
    assert (each.hidden, each.logits, each.topk, each.break_even_k) == (4096, 496_640, 512, 512)
    assert each.logits_over_hidden == 121.25
    assert head_bytes(248_320, 2048, 2) == 1_017_118_720
    assert head_bytes(10, 4, 2, has_bias=True) == 100
