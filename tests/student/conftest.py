"""Fixtures of the student's tests: data files, and samples made of given numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from student.data import DataSettings, TokenDataset, load_data
from tests.tiny_models import TOKENIZER_VOCAB, tiny_tokenizer

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
