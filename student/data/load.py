"""Reads the files of `--data` through `datasets` and makes one data set of samples of them."""

from __future__ import annotations

import contextlib
import errno
import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ring.core.errors import ConfigError
from student.data.dataset import DataReport, DocumentStore, LongDocuments, TokenDataset, Windows, cut_into_windows
from student.data.documents import RecordFile, cache_refusal, record_kind, tokenize_records

#: Errors of writing that name no file.
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})
_JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
_COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
# A sample needs a token and the one after it.
MIN_LENGTH = 2


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Which data, and how it becomes samples.

    `files`: names or glob patterns. JSON Lines (one document a line) and Parquet go by their suffix; any other file is
    text, one document. `max_length`: tokens of the longest sample. `long_documents`: what becomes of longer ones:
    "split" into samples that overlap by one token, "truncate" or "error"; "auto" = split text and ids, truncate
    messages.
    `append_eos`: end plain text with the tokenizer's end-of-text token. `cache_dir`: where `datasets` keeps what it
    has read and tokenized; None = its own default.

    Raises ConfigError: no files, a `max_length` below 2, an unknown `long_documents`.
    """

    files: tuple[str, ...]
    max_length: int
    long_documents: LongDocuments | Literal["auto"] = "auto"
    append_eos: bool = True
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        if not self.files:
            raise ConfigError("no data files given; allowed: JSON Lines, Parquet or text files")
        if self.max_length < MIN_LENGTH:
            raise ConfigError(f"max_length must be >= {MIN_LENGTH}, got {self.max_length}")
        if self.long_documents not in ("auto", *get_args(LongDocuments)):
            allowed = ", ".join(("auto", *get_args(LongDocuments)))
            raise ConfigError(f"long_documents {self.long_documents!r}; allowed: {allowed}")


def load_data(
    settings: DataSettings, tokenizer: Any | None, *, vocab_size: int, progress: bool = False
) -> TokenDataset:
    """All samples of the files, in their order.

    `tokenizer`: None is enough for files of token ids. `vocab_size`: ids must be below it; the smaller one of teacher
    and student. `progress`: let `datasets` draw its bars.

    Raises ConfigError, in one line: a file that is missing, unreadable, or without usable columns or records; a token
    id outside of the vocabulary; a document too long where that is an error; nothing left to train on.
    """
    parts: list[tuple[DocumentStore, Windows]] = []
    report = DataReport()
    with _quiet_datasets(progress=progress):
        for file in _read_files(settings):
            kind = record_kind(file.records.column_names, file.name_record(0))
            store = tokenize_records(
                file, kind, tokenizer=tokenizer, append_eos=settings.append_eos, vocab_size=vocab_size
            )
            by_kind: LongDocuments = "truncate" if kind == "messages" else "split"
            long_documents = by_kind if settings.long_documents == "auto" else settings.long_documents
            windows, part = cut_into_windows(
                store,
                max_length=settings.max_length,
                long_documents=long_documents,
                name_document=file.name_record,
            )
            parts.append((store, windows))
            report += part
    if not report.num_samples:
        raise ConfigError(f"no data to train on in {_name_files(settings.files)}: {report.line()}")
    return TokenDataset(parts, report)


def _read_files(settings: DataSettings) -> Iterator[RecordFile]:
    """One entry for each JSON or Parquet file, which may all have other columns; one for each run of text files."""
    text_files: list[str] = []
    for name in _expand(settings.files):
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"{name}: not a file; allowed: JSON Lines, Parquet or text files")
        builder = _builder_of(path)
        if builder == "text":
            text_files.append(name)
            continue
        if text_files:
            yield _read("text", text_files, settings.cache_dir)
            text_files = []
        if path.stat().st_size:
            yield _read(builder, [name], settings.cache_dir)
    if text_files:
        yield _read("text", text_files, settings.cache_dir)


def _expand(names: Sequence[str]) -> Iterator[str]:
    """Patterns become the files they match, sorted; a name that exists is a name, whatever characters it has."""
    for name in names:
        if Path(name).exists():
            yield name
            continue
        matches = sorted(found for found in glob.glob(name, recursive=True) if Path(found).is_file())
        if not matches:
            raise ConfigError(f"{name}: no such file; allowed: files, or patterns that match some")
        yield from matches


def _builder_of(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED_SUFFIXES:
        suffixes.pop()
    if suffixes and suffixes[-1] in _JSON_SUFFIXES:
        return "json"
    return "parquet" if suffixes and suffixes[-1] == ".parquet" else "text"


def _read(builder: str, names: Sequence[str], cache_dir: str | None) -> RecordFile:
    import datasets

    options = {"sample_by": "document"} if builder == "text" else {}
    try:
        records = datasets.load_dataset(
            builder,
            # A name with brackets or stars is a name, not a pattern.
            data_files=[glob.escape(str(Path(name).resolve())) for name in names],
            split="train",
            cache_dir=cache_dir,
            **options,
        )
    except (datasets.exceptions.DatasetsError, OSError, ValueError, TypeError) as error:
        # The library wraps what ends the making of its cache.
        for cause in (error, error.__cause__):
            if isinstance(cause, OSError) and _is_of_writing(cause, names):
                raise cache_refusal(cause) from error
        lines = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
        culprit = _first_undecodable(names) if builder == "text" else names[0]
        raise ConfigError(f"{culprit}: can't be read as {builder}: {lines[0]}") from error
    label = names[0] if len(names) == 1 else f"{len(names)} files"
    if builder == "text":
        return RecordFile(label, records, lambda index: names[index])
    return RecordFile(label, records, lambda index: f"{names[0]}, record {index + 1}")


def _is_of_writing(error: OSError, names: Sequence[str]) -> bool:
    """Whether it is about the cache, not about the files that are read."""
    if error.errno in _NO_ROOM:
        return True
    return error.filename is not None and str(Path(error.filename)) not in {str(Path(n).resolve()) for n in names}


def _first_undecodable(names: Sequence[str]) -> str:
    """Which of several text files made reading fail: the library names none."""
    for name in names:
        try:
            Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return name
    return _name_files(names)


def _name_files(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


@contextlib.contextmanager
def _quiet_datasets(*, progress: bool) -> Iterator[None]:
    """Errors of `datasets` reach the user as our one line; its bars only where someone watches."""
    import datasets

    verbosity = datasets.logging.get_verbosity()
    bars_shown = not datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if bars_shown and not progress:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if bars_shown and not progress:
            datasets.enable_progress_bars()
