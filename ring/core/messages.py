"""What teacher and student say to each other on the control plane, and the header that travels with every fill.

Pure data: `ring.core.codec` turns these into bounded MessagePack maps and back. The names follow the design: a request
grants exactly one fill of one slot, so it is also the credit. Sizes are in bytes, times in seconds.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

PROTOCOL_VERSION = 1

#: What a description of a backend's endpoint may hold; interpreted by the backend alone.
Scalar = str | int | bytes
Description = Mapping[str, Scalar]


#: Of the sha256 that stands behind the bytes of any columns of the head.
HEAD_DIGEST_BYTES = 32


class FillId(NamedTuple):
    """Names one fill: the `attempt`-th time that `seq` was asked for, to be written into `slot`."""

    seq: int
    attempt: int
    slot: int


class WireDtype(enum.Enum):
    """Element type of the states on the wire; the value is its name there."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP64 = "fp64"

    @property
    def itemsize_bytes(self) -> int:
        return {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}[self.value]


class RefusalCode(enum.Enum):
    """Why a teacher does not answer a request with a fill."""

    CANCELLED = "cancelled"  # asked by the student; no byte of the attempt will be written any more
    EXPIRED = "expired"  # its time was over before its turn came
    INVALID = "invalid"  # the request itself can't be served by this teacher: repeating it here won't help
    OVERLOADED = "overloaded"  # more requests than slots were granted
    DRAINING = "draining"  # the teacher is going away
    FAILED = "failed"  # the forward pass raised


@dataclass(frozen=True, kw_only=True)
class Hello:
    """Student -> teacher, first message. `backends`: what the student can receive through, best first."""

    run: str
    rank: int
    world_size: int
    epoch: str
    token_map_hash: str
    vocab_size: int
    host_id: str
    backends: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class HeadInfo:
    """What stands between final states and logits: `softcap(scale * (W h + b))` over the first `real_vocab` columns."""

    hidden_size: int
    vocab_size: int
    real_vocab: int
    has_bias: bool
    logit_softcap: float | None
    logit_scale: float
    dtype: WireDtype
    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """Teacher -> student: who answers, and what it can send. `max_rows`, `max_tokens`: limits of one request;
    `max_document_tokens`: of each document in it."""

    replica: str
    epoch: str
    fingerprint: str
    model: str
    head: HeadInfo
    token_map_hash: str
    wire_dtypes: tuple[WireDtype, ...]
    max_rows: int
    max_tokens: int
    max_document_tokens: int
    host_id: str
    backends: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Student -> teacher: the slots, and how to reach them."""

    backend: str
    description: Description
    num_slots: int
    slot_bytes: int
    wire_dtype: WireDtype
    crc: bool


@dataclass(frozen=True, kw_only=True)
class Ready:
    """Teacher -> student: the slots are open; requests may come."""


@dataclass(frozen=True, kw_only=True)
class Denied:
    """Teacher -> student: the handshake failed for good; `reason` holds both values that don't agree."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class TokenRequest:
    """One microbatch that asks for states.

    `token_ids`: little-endian uint32, documents one after the other; `doc_lengths`: tokens in each;
    `row_ranges`: half-open ranges into the concatenated tokens, ascending: the rows that count and therefore travel;
    `input_hash`: over all three, echoed by the fill.
    """

    token_ids: bytes
    doc_lengths: tuple[int, ...]
    row_ranges: tuple[tuple[int, int], ...]
    input_hash: bytes

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4

    @property
    def num_rows(self) -> int:
        return sum(end - start for start, end in self.row_ranges)


@dataclass(frozen=True, kw_only=True)
class HeadRequest:
    """Asks for bytes `[offset, offset + num_bytes)` of head columns `[vocab_start, vocab_end)`: weight, bias, and the
    sha256 of both."""

    vocab_start: int
    vocab_end: int
    offset: int
    num_bytes: int
    input_hash: bytes = b""


Payload = TokenRequest | HeadRequest


@dataclass(frozen=True, kw_only=True)
class Request:
    """Student -> teacher: fill this slot with the answer. `time_left_s`: after that nobody waits for it any more."""

    fill: FillId
    payload: Payload
    time_left_s: float


@dataclass(frozen=True, kw_only=True)
class Cancel:
    """Student -> teacher: this attempt was given up. Answered by its fill or by `Refused(CANCELLED)`, never by both."""

    fill: FillId


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Teacher -> student: no byte of this attempt will be written any more, and why."""

    fill: FillId
    code: RefusalCode
    message: str


@dataclass(frozen=True, kw_only=True)
class Ping:
    """Either side -> other: are you there? `token` is echoed."""

    token: int


@dataclass(frozen=True, kw_only=True)
class Pong:
    token: int


@dataclass(frozen=True, kw_only=True)
class Goodbye:
    """Either side -> other: I go. A draining teacher says it after its last fill."""

    reason: str


Message = Hello | Welcome | Offer | Ready | Denied | Request | Cancel | Refused | Ping | Pong | Goodbye


@dataclass(frozen=True, kw_only=True)
class FillHeader:
    """Travels with every fill on the data plane; the student accepts the fill only if all of it is as expected (R3).

    `num_rows` and `dtype` describe the payload (0 rows and raw bytes for a head piece); `crc` is crc32c over the
    payload, or None where it is off. `forward_s`: the forward pass, as far as no earlier fill was
    charged for it; `queue_s`: from receipt to that pass; `idle_s`: how long the teacher had nothing to do before it.
    """

    student_epoch: str
    teacher_epoch: str
    fingerprint: str
    fill: FillId
    num_rows: int
    dtype: WireDtype
    num_bytes: int
    input_hash: bytes
    crc: int | None = None
    forward_s: float = field(default=0.0)
    queue_s: float = field(default=0.0)
    idle_s: float = field(default=0.0)
