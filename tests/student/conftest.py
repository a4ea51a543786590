"""Fixtures of the student's tests: data files, and samples made of given numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from student.data import DataSettings, MicroBatch, TokenDataset, load_data
from student.load import LoadedStudent, prepare_student
from student.loss import Head
from tests.tiny_models import TOKENIZER_VOCAB, tiny_model, tiny_tokenizer

WriteLines = Callable[..., str]
Load = Callable[..., TokenDataset]


@pytest.fixture
def write_lines(tmp_path: Path) -> WriteLines:
    """Writes records as JSON Lines into a new file; gives its name."""

    def write(records: Sequence[dict[str, Any]], name: str = "data.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Loads files with the tiny tokenizer and a cache of this test alone."""

    def load_files(
        *names: str, max_length: int = 64, tokenizer: Any = None, vocab_size: int = TOKENIZER_VOCAB, **settings: Any
    ) -> TokenDataset:
        return load_data(
            DataSettings(files=names, max_length=max_length, cache_dir=str(tmp_path / "cache"), **settings),
            tiny_tokenizer() if tokenizer is None else tokenizer,
            vocab_size=vocab_size,
        )

    return load_files


@pytest.fixture
def ids_dataset(write_lines: WriteLines, load: Load) -> Callable[..., TokenDataset]:
    """A data set of ready token ids: one record a document, given as ids or as a whole record."""

    def make(*documents: Sequence[int] | dict[str, Any], **options: Any) -> TokenDataset:
        records = [document if isinstance(document, dict) else {"input_ids": list(document)} for document in documents]
        return load(write_lines(records), **options)

    return make


def student_in_memory(family: str = "qwen3", *, dtype: torch.dtype = torch.float32, **options: Any) -> LoadedStudent:
    """A tiny random model, prepared as `load_student` prepares one from disk."""
    return prepare_student(tiny_model(family, dtype=dtype, **options), tiny_tokenizer(), source=family)


def teacher_head(
    hidden_size: int = 48, *, seed: int = 9, dtype: torch.dtype = torch.float32, vocab_size: int = TOKENIZER_VOCAB
) -> Head:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocab_size, hidden_size, generator=generator, dtype=torch.float64) / hidden_size**0.5
    return Head(weight=weight.to(dtype), real_vocab=TOKENIZER_VOCAB)


def teacher_states(batch: MicroBatch, hidden_size: int = 48, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """States [R, hidden_size] that depend on the document and the row alone, as a teacher's do."""
    codes = torch.from_numpy(batch.token_ids.astype("int64"))
    rows = torch.cat(
        [torch.arange(start, end) for start, end in batch.row_ranges] or [torch.empty(0, dtype=torch.int64)]
    )
    steps = torch.arange(1, hidden_size + 1, dtype=torch.float64)
    return torch.sin(codes[rows, None] * steps * 0.37 + steps).to(dtype)
