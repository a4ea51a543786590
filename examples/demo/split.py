"""Holding out part of a user's text: every document goes to one side by the hash of its text."""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import datasets

from ring.core.errors import ConfigError

HELD_OUT_OF = 20


def split_held_out(files: Sequence[str], out: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(train files, held-out files), JSON Lines, from JSONL, Parquet or text files.

    Raises ConfigError: a file is missing or unreadable, or there is too little to hold any out."""
    out.mkdir(parents=True, exist_ok=True)
    train, held_out = out / "train.jsonl", out / "held-out.jsonl"
    counts = [0, 0]
    with train.open("w", encoding="utf-8") as train_file, held_out.open("w", encoding="utf-8") as held_file:
        for number, record in enumerate(_records(files)):
            line = json.dumps(record, ensure_ascii=False, default=list)
            is_held = int(hashlib.sha1(line.encode()).hexdigest(), 16) % HELD_OUT_OF == 0
            # With few documents the hash may hold none out: the first one is then as good as any.
            is_held = is_held or number == 0
            (held_file if is_held else train_file).write(line + "\n")
            counts[is_held] += 1
    if not all(counts):
        raise ConfigError(f"DATA has {sum(counts)} documents; allowed: at least 2, to hold one out")
    return (str(train),), (str(held_out),)


def _records(files: Sequence[str]) -> Iterator[dict[str, object]]:
    names = [name for pattern in files for name in (sorted(glob.glob(pattern)) or [pattern])]
    for name in names:
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"DATA {name}: no such file")
        try:
            if path.suffix in (".jsonl", ".json", ".ndjson"):
                with path.open(encoding="utf-8") as file:
                    yield from (json.loads(line) for line in file if line.strip())
            elif path.suffix == ".parquet":
                yield from (dict(row) for row in datasets.Dataset.from_parquet(name))
            else:
                yield from _paragraphs(path.read_text(encoding="utf-8"), single=len(names) == 1)
        except (ValueError, OSError) as error:
            raise ConfigError(f"DATA {name}: {type(error).__name__}: {error}") from error


def _paragraphs(text: str, *, single: bool) -> Iterator[dict[str, object]]:
    """A text file is one document; when it is the only one, every sixteen paragraphs are, so that some are left."""
    if not single:
        yield {"text": text}
        return
    parts = text.split("\n\n")
    for start in range(0, len(parts), 16):
        yield {"text": "\n\n".join(parts[start : start + 16])}
