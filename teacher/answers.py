"""From a batch of requests to fills: what is computed, and the header that travels with it, about what really was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import crc32c
import torch

from planner.input_hash import input_hash
from ring.core.messages import FillHeader, HeadRequest, Payload, TokenRequest, WireDtype
from ring.core.teacher import Batch, Put, Work, WorkKind
from teacher.forward import TeacherModel
from transport.memory import as_bytes

#: The states of one request, piece by piece; no piece is copied before it is sent.
Parts = Sequence[torch.Tensor]


def compute(
    model: TeacherModel,
    batch: Batch,
    *,
    wire_dtypes: Sequence[WireDtype],
    max_batch_tokens: int,
    deterministic: bool,
) -> Iterator[tuple[Work, Parts]]:
    """Each request of the batch with its answer, as soon as that is there: one forward pass (several, where they don't
    fit into one), or pieces of the head. Raises whatever the model does. wire_dtypes: one for each request."""
    if batch.kind is WorkKind.HEAD:
        for work in batch.work:
            assert isinstance(work.request.payload, HeadRequest)
            yield work, model.head_piece(work.request.payload)
        return
    payloads = [work.request.payload for work in batch.work]
    answers = model.iter_forward(
        [payload for payload in payloads if isinstance(payload, TokenRequest)],
        wire_dtypes=wire_dtypes,
        max_batch_tokens=max_batch_tokens,
        deterministic=deterministic,
    )
    for index, pieces in answers:
        yield batch.work[index], pieces


def fill_header(
    put: Put,
    parts: Parts,
    model: TeacherModel,
    *,
    student_epoch: str,
    teacher_epoch: str,
    wire_dtype: WireDtype,
    with_crc: bool,
) -> FillHeader:
    """What the student checks before it accepts `parts` as the answer to its request (R3)."""
    payload = put.request.payload
    is_states = isinstance(payload, TokenRequest)
    return FillHeader(
        student_epoch=student_epoch,
        teacher_epoch=teacher_epoch,
        fingerprint=model.fingerprint,
        fill=put.request.fill,
        num_rows=payload.num_rows if isinstance(payload, TokenRequest) else 0,
        dtype=wire_dtype if is_states else model.dtype,
        num_bytes=sum(part.nbytes for part in parts),
        input_hash=_computed_hash(payload),
        crc=_checksum(parts) if with_crc else None,
        forward_s=put.forward_s,
        queue_s=put.queue_s,
        idle_s=put.idle_s,
    )


def _computed_hash(payload: Payload) -> bytes:
    """The hash over what was computed from, not a copy of what the student claims it to be."""
    if isinstance(payload, TokenRequest):
        return input_hash(payload.token_ids, payload.doc_lengths, payload.row_ranges)
    return payload.input_hash


def _checksum(parts: Parts) -> int:
    crc = 0
    for part in parts:
        crc = crc32c.crc32c(as_bytes(part), crc)
    return crc
