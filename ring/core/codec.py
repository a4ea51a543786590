"""Control-plane messages and fill headers as bounded MessagePack maps, and back.

A frame is one map {"v": protocol version, "t": type, and the message's fields}. `SCHEMAS` is the one place that says
what each field may be. Sizes are checked before anything is decoded: the frame's, and within it the claimed length of
every string, array and map; nothing nests but what the schema nests. No extension types, no pickles, no repeated,
unknown or missing keys. Any bytes give a message or RemoteProtocolError, nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgpack

from ring.core.config import MAX_COUNT, MAX_SECONDS, MAX_SLOTS
from ring.core.errors import LocalProtocolError, RemoteProtocolError
from ring.core.fields import (
    Bool,
    Bytes,
    Enum,
    Fill,
    Float,
    Int,
    Malformed,
    Optional,
    Record,
    Scalars,
    Str,
    Tagged,
    Tuple,
    U32Pairs,
    U32s,
)
from ring.core.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Denied,
    FillHeader,
    Goodbye,
    HeadInfo,
    HeadRequest,
    Hello,
    Message,
    Offer,
    Ping,
    Pong,
    Ready,
    RefusalCode,
    Refused,
    Request,
    TokenRequest,
    Welcome,
    WireDtype,
)

#: Longest frame of the control plane. A token takes 4 bytes: over three million tokens fit.
MAX_FRAME_BYTES = 16 * 2**20
#: Longest encoded FillHeader; as transport.contract.MAX_HEADER_BYTES.
MAX_HEADER_BYTES = 1024
#: Longest array and map within a frame: none of ours is longer, so that a claim of more is refused unread.
MAX_ITEMS = 64
#: Longest text that is meant for people, in bytes of UTF-8.
MAX_TEXT_BYTES = 4096

_VERSION = "v"

_NAME = Str(256)
_ID = Str(128)
_TEXT = Str(MAX_TEXT_BYTES)
_COUNT = Int(0, MAX_COUNT)
_SIZE = Int(0, 2**48)
_HASH = Bytes(64)
_SECONDS = Float(lowest=0.0, highest=MAX_SECONDS)
_SEQ = Int(-(2**53), 2**53)
_FILL = Fill(_SEQ, Int(0, 2**31 - 1), Int(0, MAX_SLOTS - 1))
_BACKENDS = Tuple(Str(32), max_items=MAX_ITEMS)
_DESCRIPTION = Scalars(MAX_ITEMS, key=Str(64), text=_TEXT, number=Int(-(2**63), 2**64 - 1), raw=Bytes(64 * 1024))


def _check_rank(hello: object) -> str | None:
    assert isinstance(hello, Hello)
    if hello.rank >= hello.world_size:
        return f"rank {hello.rank} of world size {hello.world_size}"
    return None


def _check_head(head: object) -> str | None:
    assert isinstance(head, HeadInfo)
    if head.real_vocab > head.vocab_size:
        return f"{head.real_vocab} real tokens of {head.vocab_size}"
    return None


def _check_columns(payload: object) -> str | None:
    assert isinstance(payload, HeadRequest)
    if payload.vocab_start > payload.vocab_end:
        return f"columns {payload.vocab_start} to {payload.vocab_end}"
    return None


def _check_tokens(payload: object) -> str | None:
    """Lengths and ranges must lie within the tokens; whoever reads the request can rely on it."""
    assert isinstance(payload, TokenRequest)
    if len(payload.token_ids) % 4:
        return f"token_ids has {len(payload.token_ids)} bytes; allowed: 4 each"
    num_tokens = payload.num_tokens
    if 0 in payload.doc_lengths or sum(payload.doc_lengths) != num_tokens:
        return f"doc_lengths sum to {sum(payload.doc_lengths)}; allowed: none of 0, {num_tokens} in all"
    last = 0
    for start, end in payload.row_ranges:
        if not last <= start < end <= num_tokens:
            return f"row range {start} to {end} after {last} of {num_tokens} tokens; allowed: ascending, none empty"
        last = end
    return None


#: The head as it is described in the welcome.
HEAD_SCHEMA = Record(
    HeadInfo,
    {
        "hidden_size": _COUNT,
        "vocab_size": _COUNT,
        "real_vocab": _COUNT,
        "has_bias": Bool(),
        "logit_softcap": Optional(Float()),
        "logit_scale": Float(),
        "dtype": Enum(WireDtype),
        "num_bytes": _SIZE,
        "sha256": _ID,
    },
    _check_head,
)

#: What a request asks for, by its type on the wire.
PAYLOAD_SCHEMAS: Mapping[str, Record] = {
    "tokens": Record(
        TokenRequest,
        {
            "token_ids": Bytes(MAX_FRAME_BYTES),
            "doc_lengths": U32s(2**20),
            "row_ranges": U32Pairs(2**20),
            "input_hash": _HASH,
        },
        _check_tokens,
    ),
    "head": Record(
        HeadRequest,
        {
            "vocab_start": _COUNT,
            "vocab_end": _COUNT,
            "offset": _SIZE,
            "num_bytes": _SIZE,
            "input_hash": _HASH,
        },
        _check_columns,
    ),
}

#: What each message may hold, by its type on the wire.
SCHEMAS: Mapping[str, Record] = {
    "hello": Record(
        Hello,
        {
            "run": _NAME,
            "rank": Int(0, 2**20 - 1),
            "world_size": Int(1, 2**20),
            "epoch": _ID,
            "token_map_hash": _ID,
            "vocab_size": _COUNT,
            "host_id": _NAME,
            "backends": _BACKENDS,
        },
        _check_rank,
    ),
    "welcome": Record(
        Welcome,
        {
            "replica": _NAME,
            "epoch": _ID,
            "fingerprint": _ID,
            "model": Str(1024),
            "head": HEAD_SCHEMA,
            "token_map_hash": _ID,
            "wire_dtypes": Tuple(Enum(WireDtype), max_items=len(WireDtype)),
            "max_rows": _COUNT,
            "max_tokens": _COUNT,
            "max_document_tokens": _COUNT,
            "host_id": _NAME,
            "backends": _BACKENDS,
        },
    ),
    "offer": Record(
        Offer,
        {
            "backend": Str(32),
            "description": _DESCRIPTION,
            "num_slots": Int(1, MAX_SLOTS),
            "slot_bytes": _SIZE,
            "wire_dtype": Enum(WireDtype),
            "crc": Bool(),
        },
    ),
    "ready": Record(Ready, {}),
    "denied": Record(Denied, {"reason": _TEXT}),
    "request": Record(Request, {"fill": _FILL, "payload": Tagged(PAYLOAD_SCHEMAS), "time_left_s": _SECONDS}),
    "cancel": Record(Cancel, {"fill": _FILL}),
    "refused": Record(Refused, {"fill": _FILL, "code": Enum(RefusalCode), "message": _TEXT}),
    "ping": Record(Ping, {"token": _SIZE}),
    "pong": Record(Pong, {"token": _SIZE}),
    "goodbye": Record(Goodbye, {"reason": _TEXT}),
}

#: The header of a fill. Its strings are bounded so that the whole can't exceed MAX_HEADER_BYTES.
HEADER_SCHEMA = Record(
    FillHeader,
    {
        "student_epoch": _ID,
        "teacher_epoch": _ID,
        "fingerprint": _ID,
        "fill": _FILL,
        "num_rows": _COUNT,
        "dtype": Enum(WireDtype),
        "num_bytes": _SIZE,
        "input_hash": _HASH,
        "crc": Optional(Int(0, 2**32 - 1)),
        "forward_s": _SECONDS,
        "queue_s": _SECONDS,
        "idle_s": _SECONDS,
    },
)

_MESSAGE = Tagged(SCHEMAS)
_HEADER = Tagged({"fill": HEADER_SCHEMA})


def encode(message: Message) -> bytes:
    """One frame of the control plane.

    Raises LocalProtocolError: a field that `decode` would refuse, or a frame over MAX_FRAME_BYTES."""
    return _encode(message, _MESSAGE, MAX_FRAME_BYTES)


def decode(data: bytes | memoryview) -> Message:
    """Raises RemoteProtocolError: anything but one well-formed frame of this protocol version."""
    message = _decode(data, _MESSAGE, MAX_FRAME_BYTES)
    assert isinstance(message, Message)
    return message


def encode_header(header: FillHeader) -> bytes:
    """At most MAX_HEADER_BYTES. Raises LocalProtocolError: a field that `decode_header` would refuse."""
    return _encode(header, _HEADER, MAX_HEADER_BYTES)


def decode_header(data: bytes | memoryview) -> FillHeader:
    """Raises RemoteProtocolError: anything but one well-formed header of this protocol version."""
    header = _decode(data, _HEADER, MAX_HEADER_BYTES)
    assert isinstance(header, FillHeader)
    return header


def _encode(value: object, kind: Tagged, max_bytes: int) -> bytes:
    where = type(value).__name__
    try:
        plain = kind.pack(value, where)
        assert isinstance(plain, dict)
        data = msgpack.packb({_VERSION: PROTOCOL_VERSION, **plain}, use_bin_type=True)
    except (Malformed, UnicodeEncodeError) as error:
        raise LocalProtocolError(f"can't encode: {error}") from error
    assert isinstance(data, bytes)
    if len(data) > max_bytes:
        raise LocalProtocolError(f"{where} takes {len(data)} bytes; allowed: {max_bytes}")
    return data


def _decode(data: bytes | memoryview, kind: Tagged, max_bytes: int) -> object:
    num_bytes = data.nbytes if isinstance(data, memoryview) else len(data)
    if num_bytes > max_bytes:
        raise RemoteProtocolError(f"a frame of {num_bytes} bytes; allowed: {max_bytes}")
    try:
        plain: object = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=_refuse_repeated_keys,
            ext_hook=_refuse_extension,
            max_str_len=MAX_TEXT_BYTES,
            max_bin_len=max_bytes,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=0,
        )
        return kind.unpack(_checked_version(plain), "frame")
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError, MemoryError, OverflowError) as error:
        detail = str(error) or type(error).__name__  # msgpack says nothing more when frames nest too deep
        raise RemoteProtocolError(f"malformed frame of {num_bytes} bytes: {detail}") from error


def _checked_version(plain: object) -> dict[object, object]:
    """The frame's map without its version. Raises RemoteProtocolError naming both versions; raises Malformed."""
    if not isinstance(plain, dict):
        raise Malformed(f"a frame must be a map, got {type(plain).__name__}")
    version = Int(0, 2**31 - 1).unpack(plain.pop(_VERSION, None), "protocol version")
    if version != PROTOCOL_VERSION:
        raise RemoteProtocolError(
            f"the peer speaks protocol version {version}, this side {PROTOCOL_VERSION}; allowed: the same on both"
        )
    return plain


def _refuse_repeated_keys(pairs: list[tuple[object, object]]) -> dict[object, object]:
    plain = dict(pairs)
    if len(plain) != len(pairs):
        raise Malformed("a map holds a key twice")
    return plain


def _refuse_extension(code: int, data: bytes) -> object:
    raise Malformed(f"extension type {code}; allowed: none")
