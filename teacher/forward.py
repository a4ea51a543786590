"""Requests in, final states out: one forward pass answers many requests, and only rows that count come back.

A `TeacherModel` is a frozen causal LM. The service and the colocated layout call it from one thread; it holds no queue,
no socket and no state between calls but hashes of its head, so the same request always gets the same states (to the bit
with `deterministic=True` and `ring.determinism`, to rounding otherwise: a kernel's sums depend on what shares its
batch).

Shapes: B rows of a batch (one document each), S padded tokens, R rows that count, H hidden, V head columns, C columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from planner.head_spec import HeadSpec
from ring.core.errors import LocalProtocolError, RemoteProtocolError
from ring.core.messages import HEAD_DIGEST_BYTES, HeadInfo, HeadRequest, TokenRequest, WireDtype
from ring.determinism import fix_kernels
from ring.dtypes import TORCH_DTYPES
from teacher.batching import Span, plan_passes
from teacher.body import SplitModel
from teacher.fingerprint import head_sha256

__all__ = ["TeacherModel", "fix_kernels"]

# A wire dtype may drop digits if the user says so, but never range: a bf16 state of 70144 would be inf in fp16.
_WIRE_DTYPES: dict[WireDtype, tuple[WireDtype, ...]] = {
    WireDtype.BF16: (WireDtype.BF16, WireDtype.FP32),
    WireDtype.FP16: (WireDtype.FP16, WireDtype.FP32, WireDtype.BF16),
    WireDtype.FP32: (WireDtype.FP32, WireDtype.BF16),
    WireDtype.FP64: (WireDtype.FP64,),
}

#: Ranges of head columns whose sha256 is kept: a vocabulary cut over so many ranks is hashed once.
MAX_DIGESTS = 256


@dataclass(frozen=True)
class _Rows:
    """Rows of one document that count: tokens `[start, end)` of the document."""

    document: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, eq=False)
class TeacherModel:
    """A frozen causal LM and all that a handshake says about it. Made by `teacher.load`.

    `max_positions`: longest document, in tokens (None: no bound). `num_ids`: token ids below this have an embedding.
    `length_thresholds`: documents on different sides of one of these lengths never share a pass, because the model
    chooses its rotary frequencies by the longest row of a batch (longrope)."""

    name: str
    split: SplitModel
    head_spec: HeadSpec
    token_map_hash: str
    fingerprint: str
    head_sha256: str
    max_positions: int | None
    num_ids: int
    length_thresholds: tuple[int, ...] = ()
    _digests: dict[tuple[int, int], str] = field(default_factory=dict, init=False, repr=False)

    @property
    def dtype(self) -> WireDtype:
        return WireDtype(self.head_spec.dtype)

    @property
    def device(self) -> torch.device:
        return self.split.weight_VH.device

    @property
    def wire_dtypes(self) -> tuple[WireDtype, ...]:
        """What states may travel as; the first is the head's own dtype: nothing lost."""
        return _WIRE_DTYPES[self.dtype]

    def head_info(self) -> HeadInfo:
        """For WELCOME."""
        spec = self.head_spec
        return HeadInfo(
            hidden_size=spec.hidden_size,
            vocab_size=spec.vocab_size,
            real_vocab=spec.real_vocab,
            has_bias=spec.has_bias,
            logit_softcap=spec.logit_softcap,
            logit_scale=spec.logit_scale,
            dtype=self.dtype,
            num_bytes=(spec.hidden_size + spec.has_bias) * spec.vocab_size * self.dtype.itemsize_bytes,
            sha256=self.head_sha256,
        )

    def check_request(self, request: TokenRequest, *, max_batch_tokens: int | None = None) -> None:
        """Raises RemoteProtocolError: this model can't answer the request; repeating it elsewhere won't help."""
        if len(request.token_ids) % 4:
            raise RemoteProtocolError(f"token_ids: {len(request.token_ids)} bytes; allowed: a multiple of 4 (uint32)")
        ids = _ids(request)
        lengths = request.doc_lengths
        if min(lengths, default=0) < 1 or sum(lengths) != len(ids):
            raise RemoteProtocolError(
                f"doc_lengths: {len(lengths)} documents of {sum(lengths)} tokens in all, the shortest of "
                f"{min(lengths, default=0)}, for {len(ids)} token ids; allowed: one or more, each >= 1, adding up"
            )
        for bound, what in ((self.max_positions, "positions of the model"), (max_batch_tokens, "--max-batch-tokens")):
            if bound is not None and max(lengths) > bound:
                raise RemoteProtocolError(f"document of {max(lengths)} tokens; allowed: at most {bound} ({what})")
        if ids.max() >= self.num_ids:
            raise RemoteProtocolError(f"token id {ids.max()}; allowed: 0..{self.num_ids - 1} ({self.name})")
        previous_end = 0
        for start, end in request.row_ranges:
            if not previous_end <= start < end <= len(ids):
                raise RemoteProtocolError(
                    f"row range [{start}, {end}) after {previous_end}; allowed: not empty, ascending, "
                    f"not overlapping, within {len(ids)} tokens"
                )
            previous_end = end

    def forward_requests(
        self,
        requests: Sequence[TokenRequest],
        *,
        wire_dtypes: Sequence[WireDtype] | None = None,
        max_batch_tokens: int | None = None,
        deterministic: bool = False,
    ) -> list[list[Tensor]]:
        """The states of every request, in the given order; see `iter_forward`."""
        answers: list[list[Tensor]] = [[] for _ in requests]
        for index, pieces in self.iter_forward(
            requests, wire_dtypes=wire_dtypes, max_batch_tokens=max_batch_tokens, deterministic=deterministic
        ):
            answers[index] = pieces
        return answers

    def iter_forward(
        self,
        requests: Sequence[TokenRequest],
        *,
        wire_dtypes: Sequence[WireDtype] | None = None,
        max_batch_tokens: int | None = None,
        deterministic: bool = False,
    ) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield (index of the request, pieces) as soon as the request's last pass is done; each request once.

        Pieces: contiguous [R, H] tensors on the model's device, in row order; joined they are the request's rows. A row
        range gives one piece for each document that it touches. `wire_dtypes`: one for each request (default: the
        head's own dtype). `max_batch_tokens`: bound of one pass, padding counted; None: no bound.
        `deterministic`: no pass is shared between requests.

        Raises RemoteProtocolError, before anything is computed: a request is bad (`check_request` finds which).
        Raises LocalProtocolError likewise: a wire dtype that is not in `self.wire_dtypes`, or not one for each request.
        Lifetime: where no cast is needed and half of a pass's output or more was asked for, pieces are slices of that
        output and keep all of it alive. So what is kept is never more than twice the pieces."""
        if wire_dtypes is None:
            wire_dtypes = [self.dtype] * len(requests)
        if len(wire_dtypes) != len(requests) or not set(wire_dtypes) <= set(self.wire_dtypes):
            raise LocalProtocolError(
                f"wire dtypes {[w.value for w in wire_dtypes]} for {len(requests)} requests; allowed: one for each, "
                f"of {', '.join(w.value for w in self.wire_dtypes)}"
            )
        for request in requests:
            self.check_request(request, max_batch_tokens=max_batch_tokens)
        return self._run(requests, [TORCH_DTYPES[w] for w in wire_dtypes], max_batch_tokens, deterministic)

    def _run(
        self,
        requests: Sequence[TokenRequest],
        dtypes: Sequence[torch.dtype],
        max_batch_tokens: int | None,
        deterministic: bool,
    ) -> Iterator[tuple[int, list[Tensor]]]:
        ids = [_ids(request) for request in requests]
        rows = [_rows_by_document(request) for request in requests]
        spans = [span for index, request in enumerate(requests) for span in self._spans(index, request, rows[index])]
        pending = [0] * len(requests)
        for span in spans:
            pending[span.request] += 1
        done: list[dict[int, list[Tensor]]] = [{} for _ in requests]
        for index in range(len(requests)):
            if not pending[index]:
                yield index, []
        for one_pass in plan_passes(spans, max_batch_tokens=max_batch_tokens, deterministic=deterministic):
            # A function of its own, so that this frame keeps no hold on the output while the pieces are being sent.
            pieces = self._one_pass(one_pass, ids, rows, dtypes)
            for span, document_pieces in zip(one_pass, pieces, strict=True):
                done[span.request][span.document] = document_pieces
                pending[span.request] -= 1
            del pieces, document_pieces
            for index in dict.fromkeys(span.request for span in one_pass):
                if not pending[index]:
                    yield index, _joined(done, index)

    def _one_pass(
        self,
        spans: Sequence[Span],
        ids: Sequence[npt.NDArray[np.uint32]],
        rows: Sequence[dict[int, list[_Rows]]],
        dtypes: Sequence[torch.dtype],
    ) -> list[list[Tensor]]:
        # Padding is token 0: any id would do, nothing to its left sees it.
        batch_BS = np.zeros((len(spans), max(span.num_tokens for span in spans)), dtype=np.int64)
        for row, span in enumerate(spans):
            tokens = ids[span.request][span.first_token : span.first_token + span.num_tokens]
            batch_BS[row, : span.num_tokens] = tokens
        with torch.inference_mode():
            states_BSH = self.split.states(torch.from_numpy(batch_BS).to(self.split.weight_VH.device))
            ranges = [rows[span.request][span.document] for span in spans]
            num_wanted = sum(part.end - part.start for parts in ranges for part in parts)
            # Few rows as slices would hold a whole output while they wait for a student that does not read.
            copy = 2 * num_wanted < states_BSH.shape[0] * states_BSH.shape[1]
            return [
                [
                    states_BSH[row, part.start : part.end].to(dtypes[span.request], copy=copy).contiguous()
                    for part in parts
                ]
                for row, (span, parts) in enumerate(zip(spans, ranges, strict=True))
            ]

    def _spans(self, index: int, request: TokenRequest, rows: dict[int, list[_Rows]]) -> Iterator[Span]:
        """Documents without a row that counts are not run, and nothing is run after a document's last such row."""
        first_token = 0
        for document, length in enumerate(request.doc_lengths):
            if document in rows:
                num_tokens = rows[document][-1].end
                length_class = self._length_class(length)
                # Cutting a document must not change which frequencies it would have had whole.
                if self._length_class(num_tokens) != length_class:
                    num_tokens = length
                yield Span(
                    request=index,
                    document=document,
                    first_token=first_token,
                    num_tokens=num_tokens,
                    length_class=length_class,
                )
            first_token += length

    def _length_class(self, num_tokens: int) -> int:
        return sum(num_tokens > threshold for threshold in self.length_thresholds)

    def head_columns(self, vocab_start: int, vocab_end: int) -> tuple[Tensor, Tensor | None]:
        """Head columns `[vocab_start, vocab_end)`: weight [C, H] and bias [C] (None without one), contiguous, not
        copied, in the head's dtype.

        Raises RemoteProtocolError: no such columns."""
        if not 0 <= vocab_start < vocab_end <= self.head_spec.vocab_size:
            raise RemoteProtocolError(
                f"head columns [{vocab_start}, {vocab_end}); allowed: not empty, within 0..{self.head_spec.vocab_size}"
            )
        bias_V = self.split.bias_V
        weight_CH = self.split.weight_VH[vocab_start:vocab_end].contiguous()
        return weight_CH, None if bias_V is None else bias_V[vocab_start:vocab_end].contiguous()

    def head_columns_sha256(self, vocab_start: int, vocab_end: int) -> str:
        """sha256 of these columns' bytes: the weight's, row-major, then the bias's. Raises like `head_columns`."""
        columns = (vocab_start, vocab_end)
        if columns not in self._digests:
            digest = head_sha256(*self.head_columns(vocab_start, vocab_end))
            while len(self._digests) >= MAX_DIGESTS:
                del self._digests[next(iter(self._digests))]
            self._digests[columns] = digest
        return self._digests[columns]

    def check_head_request(self, request: HeadRequest) -> None:
        """Raises RemoteProtocolError: no such columns, or no such bytes in them and in the hash behind them."""
        weight_CH, bias_C = self.head_columns(request.vocab_start, request.vocab_end)
        columns_bytes = weight_CH.nbytes + (0 if bias_C is None else bias_C.nbytes)
        total_bytes, end = columns_bytes + HEAD_DIGEST_BYTES, request.offset + request.num_bytes
        if not 0 <= request.offset < end <= total_bytes:
            raise RemoteProtocolError(
                f"head bytes [{request.offset}, {end}) of columns [{request.vocab_start}, {request.vocab_end}); "
                f"allowed: not empty, within 0..{total_bytes}"
            )

    def head_piece(self, request: HeadRequest) -> list[Tensor]:
        """The bytes that a HEAD_REQUEST asks for, as uint8 slices of the weight and the bias (not copied); joined they
        are `[offset, offset + num_bytes)` of the columns' bytes and the sha256 that stands behind them.

        Raises as `check_head_request`."""
        self.check_head_request(request)
        weight_CH, bias_C = self.head_columns(request.vocab_start, request.vocab_end)
        parts = [part.view(-1).view(torch.uint8) for part in (weight_CH, bias_C) if part is not None]
        end = request.offset + request.num_bytes
        if end > sum(len(part) for part in parts):
            digest = bytearray.fromhex(self.head_columns_sha256(request.vocab_start, request.vocab_end))
            parts.append(torch.frombuffer(digest, dtype=torch.uint8))
        pieces, part_start = [], 0
        for part in parts:
            piece = part[max(0, request.offset - part_start) : max(0, end - part_start)]
            if len(piece):
                pieces.append(piece)
            part_start += len(part)
        return pieces


def _ids(request: TokenRequest) -> npt.NDArray[np.uint32]:
    return np.frombuffer(request.token_ids, dtype="<u4")


def _joined(done: list[dict[int, list[Tensor]]], index: int) -> list[Tensor]:
    """A whole request's pieces in row order; `done` lets go of them."""
    by_document, done[index] = done[index], {}
    return [piece for document in sorted(by_document) for piece in by_document[document]]


def _rows_by_document(request: TokenRequest) -> dict[int, list[_Rows]]:
    """The row ranges cut at document boundaries, by document; documents without rows are left out."""
    rows: dict[int, list[_Rows]] = {}
    ranges = iter(request.row_ranges)
    current = next(ranges, None)
    first_token = 0
    for document, length in enumerate(request.doc_lengths):
        document_end = first_token + length
        while current is not None and current[0] < document_end:
            start, end = current
            cut = min(end, document_end)
            rows.setdefault(document, []).append(_Rows(document, start - first_token, cut - first_token))
            current = (cut, end) if cut < end else next(ranges, None)
        first_token = document_end
    return rows
