"""A teacher whose states are not finite for one token, as after an overflow, and data that has this token once."""

from __future__ import annotations

import json
import random
from pathlib import Path

import safetensors.torch

from tests.tiny_models import TOKENIZER_VOCAB, build_tiny_checkpoint

NUM_SAMPLES = 24
#: No text of the teacher's self-test has it.
POISON = 301
POISONED_SAMPLE = 13


def build_poisoned_teacher(directory: Path) -> Path:
    root = build_tiny_checkpoint(directory, "qwen3", seed=1, hidden_size=48, tie_word_embeddings=False)
    (file,) = root.glob("*.safetensors")
    tensors = safetensors.torch.load_file(file)
    tensors["model.embed_tokens.weight"][POISON] = float("nan")
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    return root


def write_poisoned_data(path: Path) -> Path:
    rng = random.Random(5)
    documents = [[rng.randrange(20, POISON) for _ in range(12)] for _ in range(NUM_SAMPLES)]
    documents[POISONED_SAMPLE][5] = POISON
    assert POISON < TOKENIZER_VOCAB
    path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in documents))
    return path
