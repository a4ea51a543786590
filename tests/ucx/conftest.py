"""Tiny models and text for runs over UCX."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.tiny_models import build_tiny_checkpoint

REPOSITORY = Path(__file__).parents[2]
#: UCX's own ways within one host. Its shared memory is what it picks by itself.
UCX_WAYS = {"tcp": {"UCX_TLS": "tcp"}, "shared memory": {"UCX_TLS": "posix,sysv,cma"}}


@dataclass(frozen=True)
class Inputs:
    teacher: Path
    student: Path
    data: Path


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    root = tmp_path_factory.mktemp("inputs")
    texts = [f"Slot {i} holds {i * i} rows for the next step, and the ring turns." for i in range(30)]
    data = root / "train.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return Inputs(
        teacher=build_tiny_checkpoint(root / "teacher", "qwen3", seed=1, hidden_size=48),
        student=build_tiny_checkpoint(root / "student", "qwen3", seed=2),
        data=data,
    )
