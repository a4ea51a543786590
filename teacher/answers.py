"""How a computed answer becomes a fill: the header that travels with it, about what was really computed."""

from __future__ import annotations

from collections.abc import Sequence

import crc32c
import torch

from planner.input_hash import input_hash
from ring.core.messages import FillHeader, Payload, TokenRequest, WireDtype
from ring.core.teacher import Put
from teacher.forward import TeacherModel
from transport.memory import as_bytes

#: The states of one request, piece by piece; no piece is copied before it is sent.
Parts = Sequence[torch.Tensor]


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
