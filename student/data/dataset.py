"""Documents of token ids, cut into the samples that training counts in.

Tokenized documents stay where `datasets` put them (memory-mapped files); a sample is a window on one document. What
the samples are therefore depends on no cache: another `max_length` re-uses the same tokenization.

Legend: D documents, W windows, G ranges of counted rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ring.core.errors import ConfigError

Int64Array = npt.NDArray[np.int64]
# Enough to notice any edit of a whole file, at the cost of a fraction of a second.
_HASHED_SAMPLES = 4096
LongDocuments = Literal["split", "truncate", "error"]


class DocumentStore:
    """Token ids and counted rows of many documents, read in place from the columns of an Arrow table.

    Both are the chunks of a column of Arrow lists. `token_chunks`: lists of uint32, a document each. `range_chunks`:
    for each document a flat list of bounds start, end, start, end...: half-open ranges of the rows that count,
    ascending and apart; a row never is the last token of its document. Lifetime: keeps the Arrow buffers alive.
    """

    def __init__(self, token_chunks: Sequence[Any], range_chunks: Sequence[Any]) -> None:
        # `values` ignores where a chunk begins in its buffers, and `offsets` counts from there: they belong together.
        self._values = [chunk.values.to_numpy(zero_copy_only=True) for chunk in token_chunks]
        self._offsets = [chunk.offsets.to_numpy() for chunk in token_chunks]
        chunk_sizes = np.array([len(chunk) for chunk in token_chunks], dtype=np.int64)
        self._first_in_chunk = np.concatenate([[0], np.cumsum(chunk_sizes)]).astype(np.int64)
        self.lengths = _concatenate([np.diff(offsets) for offsets in self._offsets])
        bounds = [
            chunk.values.to_numpy(zero_copy_only=True)[chunk.offsets[0].as_py() : chunk.offsets[-1].as_py()]
            for chunk in range_chunks
        ]
        self.ranges = _concatenate(bounds).reshape(-1, 2)
        num_bounds_D = _concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in range_chunks])
        self.first_range = np.concatenate([[0], np.cumsum(num_bounds_D // 2)]).astype(np.int64)

    @property
    def num_documents(self) -> int:
        return len(self.lengths)

    def tokens(self, document: int, start: int, end: int) -> npt.NDArray[np.uint32]:
        """Tokens `[start, end)` of a document: a read-only view."""
        chunk = int(np.searchsorted(self._first_in_chunk, document, side="right")) - 1
        base = int(self._offsets[chunk][document - self._first_in_chunk[chunk]])
        view: npt.NDArray[np.uint32] = self._values[chunk][base + start : base + end]
        return view

    def row_ranges(self, document: int) -> Int64Array:
        """The ranges of counted rows of a document, [its ranges, 2]."""
        return self.ranges[self.first_range[document] : self.first_range[document + 1]]


@dataclass(frozen=True)
class Windows:
    """Samples of one store, all [W]: tokens `[starts, ends)` of `documents`; `row_counts` of their rows count."""

    documents: Int64Array
    starts: Int64Array
    ends: Int64Array
    row_counts: Int64Array


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """What became of the data; counts of whole data sets, printed once at start."""

    num_documents: int = 0
    num_empty_documents: int = 0
    num_split_documents: int = 0
    num_truncated_documents: int = 0
    num_cut_tokens: int = 0
    num_samples_without_target: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_rows: int = 0

    def __add__(self, other: DataReport) -> DataReport:
        return DataReport(**{name: count + getattr(other, name) for name, count in vars(self).items()})

    def line(self) -> str:
        """One line for a person; what did not happen is left out."""
        parts = [f"{self.num_documents} documents -> {self.num_samples} samples, {self.num_tokens} tokens"]
        parts.append(f"{self.num_rows} rows count")
        for count, what in (
            (self.num_split_documents, "split"),
            (self.num_truncated_documents, f"truncated ({self.num_cut_tokens} tokens lost)"),
            (self.num_empty_documents, "empty: dropped"),
            (self.num_samples_without_target, "samples without a target: dropped"),
        ):
            if count:
                parts.append(f"{count} {what}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Sample:
    """`token_ids` [its tokens] uint32, read-only. `row_ranges`: half-open ranges of its rows that count, ascending."""

    token_ids: npt.NDArray[np.uint32]
    row_ranges: tuple[tuple[int, int], ...]


def cut_into_windows(
    store: DocumentStore, *, max_length: int, long_documents: LongDocuments, name_document: Callable[[int], str]
) -> tuple[Windows, DataReport]:
    """The samples of a store: every document that fits, and what `long_documents` makes of the others.

    Split windows overlap by one token: the last token of one is the first of the next, so that every target of the
    document counts exactly once. Empty documents and windows in which no row counts are dropped, and counted.

    Raises ConfigError: a longer document where `long_documents` is "error".
    """
    lengths_D = store.lengths
    long_D = lengths_D > max_length
    if long_documents == "error" and long_D.any():
        first = int(np.argmax(long_D))
        raise ConfigError(
            f"{name_document(first)}: {int(lengths_D[first])} tokens; allowed: {max_length} (--max-length), or "
            "--long-documents split or truncate"
        )
    if long_documents == "split":
        windows_D = np.where(long_D, -(-(lengths_D - 1) // (max_length - 1)), (lengths_D > 0).astype(np.int64))
    else:
        windows_D = (lengths_D > 0).astype(np.int64)
    document_W = np.repeat(np.arange(len(lengths_D)), windows_D)
    turn_W = np.arange(len(document_W)) - np.repeat(np.cumsum(windows_D) - windows_D, windows_D)
    start_W = turn_W * (max_length - 1)
    end_W = np.minimum(start_W + max_length, lengths_D[document_W])
    rows_W = _rows_in_windows(store, document_W, start_W, end_W)
    kept_W = rows_W > 0
    windows = Windows(document_W[kept_W], start_W[kept_W], end_W[kept_W], rows_W[kept_W])
    num_long = int(long_D.sum())
    truncated = long_documents == "truncate"
    report = DataReport(
        num_documents=len(lengths_D),
        num_empty_documents=int((lengths_D == 0).sum()),
        num_split_documents=0 if truncated else num_long,
        num_truncated_documents=num_long if truncated else 0,
        num_cut_tokens=int((lengths_D - max_length)[long_D].sum()) if truncated else 0,
        num_samples_without_target=int((~kept_W).sum()),
        num_samples=len(windows.documents),
        num_tokens=int((windows.ends - windows.starts).sum()),
        num_rows=int(windows.row_counts.sum()),
    )
    return windows, report


def _rows_in_windows(
    store: DocumentStore, document_W: Int64Array, start_W: Int64Array, end_W: Int64Array
) -> Int64Array:
    """How many rows count in `[start, end - 1)` of each window: its last token has no target in it, [W]."""
    if not len(store.ranges):
        return np.zeros(len(document_W), dtype=np.int64)
    base_D = np.cumsum(store.lengths) - store.lengths
    base_G = np.repeat(base_D, np.diff(store.first_range))
    starts_G, ends_G = store.ranges[:, 0] + base_G, store.ranges[:, 1] + base_G
    before_G = np.concatenate([[0], np.cumsum(ends_G - starts_G)])

    def counted_before(place_W: Int64Array) -> Int64Array:
        """Counted rows of the whole store at places below the given ones."""
        begun_W = np.searchsorted(starts_G, place_W, side="left")
        last_end_W = np.where(begun_W > 0, ends_G[np.maximum(begun_W - 1, 0)], 0)
        counted_W: Int64Array = before_G[begun_W] - np.maximum(last_end_W - place_W, 0)
        return counted_W

    return counted_before(base_D[document_W] + end_W - 1) - counted_before(base_D[document_W] + start_W)


class TokenDataset:
    """All samples of a run, by id: 0 to `num_samples - 1`, in the order of files, documents and windows.

    `lengths` and `row_counts`, [num_samples] int64: tokens and counted rows of each sample, known before any is read.
    """

    def __init__(self, parts: Sequence[tuple[DocumentStore, Windows]], report: DataReport) -> None:
        self.report = report
        self._parts = list(parts)
        sizes = [len(windows.documents) for _, windows in parts]
        self._first_in_part = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.lengths = _concatenate([windows.ends - windows.starts for _, windows in parts])
        self.row_counts = _concatenate([windows.row_counts for _, windows in parts])

    @property
    def num_samples(self) -> int:
        return len(self.lengths)

    def content_hash(self) -> str:
        """Tells two data sets apart: 32 hex digits over all lengths and row counts, and the ids of some samples.

        For a resume: a position means nothing in other data. The samples are evenly spread; names and times of files
        play no part.
        """
        digest = hashlib.blake2b(digest_size=16)
        digest.update(self.lengths.astype("<i8").tobytes())
        digest.update(self.row_counts.astype("<i8").tobytes())
        stride = -(-self.num_samples // _HASHED_SAMPLES) or 1
        for sample_id in range(0, self.num_samples, stride):
            digest.update(self.sample(sample_id).token_ids.astype("<u4").tobytes())
        return digest.hexdigest()

    def sample(self, sample_id: int) -> Sample:
        """Raises IndexError: no such sample."""
        if not 0 <= sample_id < self.num_samples:
            raise IndexError(f"sample {sample_id}; allowed: 0 to {self.num_samples - 1}")
        part = int(np.searchsorted(self._first_in_part, sample_id, side="right")) - 1
        store, windows = self._parts[part]
        index = sample_id - int(self._first_in_part[part])
        document, start, end = (int(a[index]) for a in (windows.documents, windows.starts, windows.ends))
        ranges = np.clip(store.row_ranges(document), start, end - 1) - start
        kept = tuple((int(first), int(last)) for first, last in ranges if first < last)
        return Sample(store.tokens(document, start, end), kept)


def _concatenate(arrays: Sequence[npt.NDArray[np.generic]]) -> Int64Array:
    return np.concatenate([np.empty(0, dtype=np.int64), *arrays]).astype(np.int64)
