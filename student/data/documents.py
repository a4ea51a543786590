"""One file of records to documents of token ids and ranges of counted rows, cached by `datasets`.

The cache is keyed by the file (path, size, time), the tokenizer's whole content, and the settings that matter here, so
that a changed tokenizer or template can never meet old ids. Checks that depend on the models (vocabulary, length) come
after the cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ring.core.errors import ConfigError
from student.data.chat import ChatEncoder
from student.data.dataset import DocumentStore

logger = logging.getLogger(__name__)

RecordKind = Literal["ids", "messages", "text"]
# Raised whenever the same records would give other documents.
_FORMAT = 1
# A tokenizer holds some 100 bytes for each token of a batch, and documents may be long: few at a time.
_BATCH_RECORDS = 128
#: Whoever waits for a large file hears this often how far it is.
_PROGRESS_S = 30.0
_MAX_ID = 2**32 - 1


@dataclass(frozen=True)
class RecordFile:
    """Records read by `datasets`, and how to name one of them to a person."""

    label: str
    records: Any
    name_record: Callable[[int], str]


@dataclass(frozen=True)
class _Document:
    """ids: its tokens. target: of the same length, which of them count when they are predicted; None = all of them."""

    ids: npt.NDArray[Any]
    target: npt.NDArray[np.bool_] | None


def record_kind(columns: Sequence[str], name: str) -> RecordKind:
    """What the records hold: ready ids before messages before text, where a file has several.

    Raises ConfigError: none of these columns.
    """
    if "input_ids" in columns or "token_ids" in columns:
        return "ids"
    if "messages" in columns:
        return "messages"
    if "text" in columns:
        return "text"
    found = ", ".join(columns) or "none"
    raise ConfigError(f"{name}: found columns {found}; allowed: text, messages, or input_ids (token_ids)")


def tokenize_records(
    file: RecordFile, kind: RecordKind, *, tokenizer: Any | None, append_eos: bool, vocab_size: int
) -> DocumentStore:
    """The documents of a file, one a record, in order; a record without text is an empty document.

    `append_eos`: plain text gets the tokenizer's end-of-text token behind it.

    Raises ConfigError: a record that is not what its column says, a token id of `vocab_size` or more, no tokenizer or
    chat template where one is needed, a cache that can't be written.
    """
    if kind != "ids" and tokenizer is None:
        raise ConfigError(f"{file.name_record(0)} holds {kind}, which need a tokenizer; found none beside the student")
    encode_record = _record_encoder(file, kind, tokenizer, append_eos)
    said_s = time.monotonic()

    def encode_batch(batch: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        nonlocal said_s
        if time.monotonic() >= said_s + _PROGRESS_S:
            said_s = time.monotonic()
            logger.info("reading and tokenizing: %d of %d records (%s)", indices[0], len(file.records), file.label)
        columns: dict[str, list[Any]] = {"token_ids": [], "row_ranges": [], "max_id": []}
        for document in encode_record(batch, indices):
            columns["token_ids"].append(document.ids.astype(np.uint32))
            columns["row_ranges"].append(_row_ranges(document))
            columns["max_id"].append(int(document.ids.max(initial=0)))
        return columns

    import datasets

    features = datasets.Features(
        {
            "token_ids": datasets.List(datasets.Value("uint32")),
            "row_ranges": datasets.List(datasets.Value("uint32")),
            "max_id": datasets.Value("int64"),
        }
    )
    try:
        documents = file.records.map(
            encode_batch,
            batched=True,
            batch_size=_BATCH_RECORDS,
            with_indices=True,
            remove_columns=file.records.column_names,
            features=features,
            new_fingerprint=_fingerprint(file.records, kind, tokenizer, append_eos),
            desc="tokenize",
        )
    except OSError as error:
        # The records are in memory by now: only what is made of them is written.
        raise cache_refusal(error) from error
    max_ids = documents.data.column("max_id").to_numpy()
    if len(max_ids) and int(max_ids.max()) >= vocab_size:
        first = int(np.argmax(max_ids >= vocab_size))
        raise ConfigError(
            f"{file.name_record(first)}: token id {int(max_ids[first])}; allowed: 0 to {vocab_size - 1} (vocabulary)"
        )
    return DocumentStore(documents.data.column("token_ids").chunks, documents.data.column("row_ranges").chunks)


def cache_refusal(error: OSError) -> ConfigError:
    """Why tokenized data could not be kept."""
    return ConfigError(
        f"the cache of tokenized data can't be written: {error}; allowed: --cache-dir DIR, or HF_HOME, somewhere that "
        f"can"
    )


def _fingerprint(records: Any, kind: RecordKind, tokenizer: Any | None, append_eos: bool) -> str:
    parts: list[Any] = [_FORMAT, records._fingerprint, kind, append_eos]
    if kind != "ids" and tokenizer is not None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        content = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
        parts += [type(tokenizer).__name__, content, tokenizer.special_tokens_map, tokenizer.chat_template]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _row_ranges(document: _Document) -> npt.NDArray[np.uint32]:
    """Flat bounds of the runs of rows that count: row i counts if token i + 1 is a target."""
    num_rows = max(len(document.ids) - 1, 0)
    if document.target is None:
        return np.array([0, num_rows] if num_rows else [], dtype=np.uint32)
    edges = np.diff(document.target[1:].astype(np.int8), prepend=0, append=0)
    return np.flatnonzero(edges).astype(np.uint32)


_EncodeRecords = Callable[[Mapping[str, list[Any]], list[int]], "list[_Document]"]


def _record_encoder(file: RecordFile, kind: RecordKind, tokenizer: Any, append_eos: bool) -> _EncodeRecords:
    if kind == "ids":
        return lambda batch, indices: _encode_ids(file, batch, indices)
    if kind == "text":
        return lambda batch, indices: _encode_text(file, batch["text"], indices, tokenizer, append_eos)
    try:
        encoder = ChatEncoder(tokenizer)
    except ValueError as error:
        raise ConfigError(f"{file.name_record(0)}: {error}") from error
    return lambda batch, indices: _encode_messages(file, batch, indices, encoder)


def _encode_text(
    file: RecordFile, texts: list[Any], indices: list[int], tokenizer: Any, append_eos: bool
) -> list[_Document]:
    for index, text in zip(indices, texts, strict=True):
        if text is not None and not isinstance(text, str):
            raise ConfigError(f"{file.name_record(index)}: `text` is {type(text).__name__}; allowed: a string")
    # A tokenizer that adds a beginning-of-text token would make one-token documents of empty texts.
    filled = [place for place, text in enumerate(texts) if text and not text.isspace()]
    plain = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
    encoded = tokenizer([texts[place] for place in filled], **plain)["input_ids"] if filled else []
    documents = [_Document(np.empty(0, dtype=np.int64), None)] * len(texts)
    eos_id = tokenizer.eos_token_id if append_eos else None
    for place, ids in zip(filled, encoded, strict=True):
        if eos_id is not None and ids[-1:] != [eos_id]:
            ids = [*ids, eos_id]
        documents[place] = _Document(np.array(ids, dtype=np.int64), None)
    return documents


def _encode_messages(
    file: RecordFile, batch: Mapping[str, list[Any]], indices: list[int], encoder: ChatEncoder
) -> list[_Document]:
    import jinja2

    documents = []
    for place, index in enumerate(indices):
        messages = batch["messages"][place]
        if not messages:
            documents.append(_Document(np.empty(0, dtype=np.int64), None))
            continue
        tools = batch["tools"][place] if "tools" in batch else None
        try:
            tools = json.loads(tools) if isinstance(tools, str) else tools
            ids, mask = encoder.encode(messages, tools)
        except (ValueError, TypeError, jinja2.TemplateError) as error:
            raise ConfigError(f"{file.name_record(index)}: {_first_line(error)}") from error
        documents.append(_Document(np.array(ids, dtype=np.int64), mask))
    return documents


def _encode_ids(file: RecordFile, batch: Mapping[str, list[Any]], indices: list[int]) -> list[_Document]:
    column = "input_ids" if "input_ids" in batch else "token_ids"
    documents = []
    for place, index in enumerate(indices):
        ids = _integers(file, index, column, batch[column][place])
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) <= _MAX_ID:
            bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise ConfigError(f"{file.name_record(index)}: token id {bad}; allowed: 0 to {_MAX_ID}")
        target = np.ones(len(ids), dtype=bool)
        for name in ("labels", "loss_mask", "attention_mask"):
            if batch.get(name) is None or batch[name][place] is None:
                continue
            values = _integers(file, index, name, batch[name][place])
            if len(values) != len(ids):
                raise ConfigError(f"{file.name_record(index)}: {len(ids)} {column} but {len(values)} {name}")
            target &= _targets_by_labels(file, index, ids, values) if name == "labels" else values != 0
        if batch.get("attention_mask") is not None and batch["attention_mask"][place] is not None:
            # Padding that was stored with the ids is no part of the document.
            kept = np.asarray(batch["attention_mask"][place]) != 0
            ids, target = ids[kept], target[kept]
        documents.append(_Document(ids, target))
    return documents


def _targets_by_labels(
    file: RecordFile, index: int, ids: npt.NDArray[np.int64], labels: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Labels stand at their own token, unshifted, as Hugging Face models take them; negative ones do not count."""
    counted: npt.NDArray[np.bool_] = labels >= 0
    differ = counted & (labels != ids)
    if differ.any():
        first = int(np.argmax(differ))
        raise ConfigError(
            f"{file.name_record(index)}: label {int(labels[first])} stands at token {int(ids[first])} (place {first}); "
            "allowed: the token itself, or -100"
        )
    return counted


def _integers(file: RecordFile, index: int, column: str, values: Any) -> npt.NDArray[np.int64]:
    if values is None:
        return np.empty(0, dtype=np.int64)
    if isinstance(values, list) and all(isinstance(value, int) for value in values):
        return np.array(values, dtype=np.int64)
    raise ConfigError(f"{file.name_record(index)}: `{column}` must be a list of integers")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
