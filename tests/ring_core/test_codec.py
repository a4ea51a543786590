"""The wire codec: whatever a peer sends is a message or RemoteProtocolError, and costs no more than its own size."""

from __future__ import annotations

import dataclasses
import pickle
import tracemalloc
import typing
from collections.abc import Callable
from pathlib import Path

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ring.core import codec, messages
from ring.core.errors import LocalProtocolError, RemoteProtocolError
from ring.core.messages import (
    Cancel,
    FillHeader,
    FillId,
    Hello,
    Message,
    Offer,
    Ping,
    Refused,
    Request,
    TokenRequest,
    WireDtype,
)
from tests.ring_core import strategies

HELLO = Hello(
    run="r", rank=0, world_size=2, epoch="e", token_map_hash="h", vocab_size=9, host_id="m", backends=("shm", "zmq")
)
TOKENS = TokenRequest(token_ids=bytes(20), doc_lengths=(3, 2), row_ranges=((1, 3), (4, 5)), input_hash=b"\x01" * 16)
REQUEST = Request(fill=FillId(7, 0, 1), payload=TOKENS, time_left_s=5.0)
HEADER = FillHeader(
    student_epoch="s", teacher_epoch="t", fingerprint="f", fill=FillId(7, 0, 1), num_rows=3, dtype=WireDtype.BF16,
    num_bytes=48, input_hash=b"\x01" * 16, crc=2**32 - 1, forward_s=0.5, queue_s=0.25, idle_s=0.0,
)  # fmt: skip


def plain(message: Message) -> dict[str, object]:
    """The frame as a dict, to be bent."""
    frame = msgpack.unpackb(codec.encode(message))
    assert isinstance(frame, dict)
    return frame


def must_refuse(frame: bytes, *, naming: str = "") -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        codec.decode(frame)
    assert naming in str(caught.value)


# ---- what is encoded comes back ---------------------------------------------------------------------------------


@given(strategies.messages())
def test_every_message_survives_the_wire(message: Message) -> None:
    frame = codec.encode(message)
    assert codec.decode(frame) == message
    assert codec.decode(memoryview(frame)) == message


@given(strategies.headers())
def test_every_header_survives_the_wire_within_its_bound(header: FillHeader) -> None:
    data = codec.encode_header(header)
    assert len(data) <= codec.MAX_HEADER_BYTES
    assert codec.decode_header(memoryview(data)) == header


def test_the_longest_header_fits_its_bound() -> None:
    longest = dataclasses.replace(
        HEADER, student_epoch="x" * 128, teacher_epoch="y" * 128, fingerprint="z" * 128, input_hash=bytes(64),
        fill=FillId(-(2**53), 2**31 - 1, 4095), num_rows=2**31 - 1, num_bytes=2**48, dtype=WireDtype.FP64,
    )  # fmt: skip
    assert len(codec.encode_header(longest)) <= codec.MAX_HEADER_BYTES
    with pytest.raises(LocalProtocolError, match="fingerprint has 129 characters; allowed: 128"):
        codec.encode_header(dataclasses.replace(longest, fingerprint="z" * 129))


def test_every_message_and_every_field_has_a_schema() -> None:
    records = [*codec.SCHEMAS.values(), codec.HEADER_SCHEMA, codec.HEAD_SCHEMA, *codec.PAYLOAD_SCHEMAS.values()]
    by_class = {record.make: record for record in records}
    assert set(typing.get_args(messages.Message)) == {record.make for record in codec.SCHEMAS.values()}
    assert set(typing.get_args(messages.Payload)) == {record.make for record in codec.PAYLOAD_SCHEMAS.values()}
    for cls, record in by_class.items():
        assert dataclasses.is_dataclass(cls)
        assert [field.name for field in dataclasses.fields(cls)] == list(record.fields)


def test_both_sides_agree_on_the_length_of_a_header() -> None:
    from transport import contract  # late: it imports torch, which nothing else here needs

    assert contract.MAX_HEADER_BYTES == codec.MAX_HEADER_BYTES


# ---- any bytes -------------------------------------------------------------------------------------------------


def assert_message_or_refusal(decode: Callable[[bytes], object], data: bytes) -> None:
    """Anything but RemoteProtocolError propagates and fails the test."""
    try:
        decoded = decode(data)
    except RemoteProtocolError:
        return
    assert isinstance(decoded, Message | FillHeader)


@given(st.binary(max_size=200))
@example(b"")
@example(b"\xc1")
def test_random_bytes_are_a_message_or_refused(data: bytes) -> None:
    assert_message_or_refusal(codec.decode, data)
    assert_message_or_refusal(codec.decode_header, data)


@given(st.data())
@settings(max_examples=200)
def test_mutated_frames_are_a_message_or_refused(data: st.DataObject) -> None:
    frame = bytearray(codec.encode(data.draw(strategies.messages())))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame) - 1))
        frame[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=5))
        if not frame:
            break
    assert_message_or_refusal(codec.decode, bytes(frame))


plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.data())
@settings(max_examples=200)
def test_wrong_values_in_known_fields_are_a_message_or_refused(data: st.DataObject) -> None:
    frame = plain(data.draw(strategies.messages()))
    for key in data.draw(st.lists(st.sampled_from(sorted(frame)), min_size=1, max_size=3)):
        frame[key] = data.draw(plain_values)
    assert_message_or_refusal(codec.decode, msgpack.packb(frame))


@given(plain_values)
def test_random_structures_are_a_message_or_refused(value: object) -> None:
    assert_message_or_refusal(codec.decode, msgpack.packb(value))
    assert_message_or_refusal(codec.decode, msgpack.packb({"v": 1, "t": value}))


# ---- bounds ----------------------------------------------------------------------------------------------------

BOMBS = {
    "4 GiB array": b"\xdd\xff\xff\xff\xff",
    "4 GiB map": b"\xdf\xff\xff\xff\xff",
    "4 GiB bytes": b"\xc6\xff\xff\xff\xff",
    "4 GiB string": b"\xdb\xff\xff\xff\xff",
    "4 GiB extension": b"\xc9\xff\xff\xff\xff\x01",
    "4 GiB string as a value": b"\x81\xa1v\xdb\xff\xff\xff\xff",
    "long array": b"\xdc\xff\xff" + b"\xc0" * 65_535,
    "deep arrays": b"\x91" * 200_000,
    "deep wide arrays": b"\xdc\x00\x40" * 100_000,
    "deep maps": b"\x81\xa1v" * 100_000,
    "deep wide maps": b"\xde\x00\x40\xa1v" * 50_000,
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_claims_of_a_small_frame_allocate_nothing(bomb: bytes) -> None:
    tracemalloc.start()
    try:
        must_refuse(bomb)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # An array of MAX_ITEMS at each of the parser's levels, and the error: far below what is claimed.
    assert peak_bytes < 2 * 2**20


def test_a_frame_over_the_bound_is_refused_unread() -> None:
    frame = bytes(codec.MAX_FRAME_BYTES + 1)
    must_refuse(frame, naming=f"allowed: {codec.MAX_FRAME_BYTES}")
    with pytest.raises(RemoteProtocolError, match="allowed: 1024"):
        codec.decode_header(bytes(codec.MAX_HEADER_BYTES + 1))
    many = dataclasses.replace(
        TOKENS, token_ids=bytes(codec.MAX_FRAME_BYTES), doc_lengths=(codec.MAX_FRAME_BYTES // 4,)
    )
    with pytest.raises(LocalProtocolError, match=f"allowed: {codec.MAX_FRAME_BYTES}"):
        codec.encode(dataclasses.replace(REQUEST, payload=many))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", 2**40),
        ("rank", -1),
        ("rank", True),
        ("rank", 1.0),
        ("rank", 2),  # of world size 2
        ("world_size", 0),
        ("vocab_size", -5),
        ("run", "x" * 257),
        ("run", b"bytes"),
        ("epoch", None),
        ("backends", ["x"] * 65),
        ("backends", "shm"),
        ("backends", {"shm": 1}),
    ],
)
def test_a_hello_out_of_bounds_is_refused_naming_the_field(field: str, value: object) -> None:
    must_refuse(msgpack.packb(plain(HELLO) | {field: value}), naming="max_array_len" if value == ["x"] * 65 else field)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 1.7e308, 1.1e9, True, 5, "5"])
def test_a_time_that_is_not_one_is_refused(seconds: object) -> None:
    must_refuse(msgpack.packb(plain(REQUEST) | {"time_left_s": seconds}), naming="time_left_s")


@pytest.mark.parametrize("field", ["forward_s", "queue_s", "idle_s"])
@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 1.7e308, 1.1e9])
def test_a_header_whose_times_could_not_be_summed_is_refused(field: str, seconds: float) -> None:
    """Two of 1.7e308 s would make the sums of a run infinite, and every difference of them NaN, for ever."""
    right = msgpack.unpackb(codec.encode_header(HEADER))
    with pytest.raises(RemoteProtocolError, match=field):
        codec.decode_header(msgpack.packb(right | {field: seconds}))
    with pytest.raises(LocalProtocolError, match=field):
        codec.encode_header(dataclasses.replace(HEADER, **{field: seconds}))


@pytest.mark.parametrize("fill", [[7, 0], [7, 0, -1], [7, -1, 0], [7, 0, 4096], [2**60, 0, 0], [7, 0, True], "700"])
def test_a_fill_out_of_bounds_is_refused(fill: object) -> None:
    must_refuse(msgpack.packb(plain(REQUEST) | {"fill": fill}), naming="fill")


def u32(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "little") for value in values)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("token_ids", bytes(19)),
        ("token_ids", bytes(16)),  # one token less than the documents have
        ("doc_lengths", u32(5, 0)),
        ("doc_lengths", u32(2**32 - 1, 6)),
        ("doc_lengths", b"\x05\x00"),
        ("doc_lengths", [3, 2]),
        ("row_ranges", u32(0, 6)),
        ("row_ranges", u32(3, 3)),
        ("row_ranges", u32(3, 1)),
        ("row_ranges", u32(2, 4, 3, 5)),  # overlapping
        ("row_ranges", u32(0, 1, 2)),
        ("input_hash", bytes(65)),
    ],
)
def test_a_microbatch_that_contradicts_itself_is_refused(field: str, value: object) -> None:
    frame = plain(REQUEST)
    payload = frame["payload"]
    assert isinstance(payload, dict)
    must_refuse(msgpack.packb(frame | {"payload": payload | {field: value}}))


def test_unknown_missing_and_repeated_keys_are_refused() -> None:
    frame = plain(HELLO)
    must_refuse(msgpack.packb(frame | {"extra": 1}), naming="extra")
    must_refuse(msgpack.packb({key: value for key, value in frame.items() if key != "rank"}), naming="rank")
    ping = msgpack.packb(plain(Ping(token=1)))
    assert ping[0] == 0x83  # a map of three; make it four with its last key twice
    must_refuse(b"\x84" + ping[1:] + msgpack.packb("token") + msgpack.packb(2), naming="twice")


def test_extension_types_and_timestamps_are_refused() -> None:
    frame = plain(Ping(token=1))
    for value in (msgpack.ExtType(5, b"x"), msgpack.ExtType(5, bytes(16)), msgpack.Timestamp(1)):
        must_refuse(msgpack.packb(frame | {"token": value}))


def test_bytes_after_the_frame_are_refused() -> None:
    must_refuse(codec.encode(Ping(token=1)) + b"\x00")


def test_a_description_holds_strings_integers_and_bytes_only() -> None:
    offer = Offer(
        backend="zmq", description={"path": "/x", "port": 5, "key": b"k"}, num_slots=4, slot_bytes=64,
        wire_dtype=WireDtype.BF16, crc=True,
    )  # fmt: skip
    assert codec.decode(codec.encode(offer)) == offer
    for value in ([1], {"a": 1}, None, 1.5, True):
        must_refuse(msgpack.packb(plain(offer) | {"description": {"x": value}}), naming="description.x")
    must_refuse(msgpack.packb(plain(offer) | {"description": {str(i): i for i in range(65)}}))


def test_another_protocol_version_is_refused_naming_both() -> None:
    must_refuse(msgpack.packb(plain(HELLO) | {"v": 2}), naming="version 2, this side 1")
    # Whatever else a later version sends.
    must_refuse(msgpack.packb({"v": 7, "t": "news", "x": [None]}), naming="version 7, this side 1")
    for version in (None, True, 1.0, "1", -1):
        must_refuse(msgpack.packb(plain(HELLO) | {"v": version}), naming="protocol version")


@pytest.mark.case(64)
def test_case_64_a_pickle_is_refused_and_never_run(tmp_path: Path) -> None:
    touched = tmp_path / "touched"

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (touched,)

    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        frame = pickle.dumps(Evil(), protocol=protocol)
        must_refuse(frame)
        must_refuse(msgpack.packb(plain(Ping(token=1)) | {"token": frame}))
        with pytest.raises(RemoteProtocolError):
            codec.decode_header(frame)
    assert not touched.exists()


# ---- our own mistakes ------------------------------------------------------------------------------------------


def test_what_the_peer_would_refuse_is_not_encoded() -> None:
    bad: list[Message] = [
        dataclasses.replace(HELLO, rank=-1),
        dataclasses.replace(HELLO, rank=2),
        dataclasses.replace(HELLO, run="\ud800"),
        dataclasses.replace(HELLO, backends=["shm"]),  # type: ignore[arg-type]
        dataclasses.replace(REQUEST, time_left_s=float("nan")),
        dataclasses.replace(REQUEST, time_left_s=10**400),
        dataclasses.replace(REQUEST, payload=dataclasses.replace(TOKENS, doc_lengths=(5, -1, 1))),
        dataclasses.replace(REQUEST, payload=dataclasses.replace(TOKENS, doc_lengths=(5,), row_ranges=((4, 6),))),
        Cancel(fill=FillId(0, 0, 70_000)),
        Cancel(fill=(0, 0, 0)),  # type: ignore[arg-type]
        Refused(fill=FillId(0, 0, 0), code="failed", message=""),  # type: ignore[arg-type]
        HEADER,  # type: ignore[list-item]
    ]
    for message in bad:
        with pytest.raises(LocalProtocolError, match="can't encode"):
            codec.encode(message)


def test_an_integer_number_of_seconds_is_sent_as_a_float() -> None:
    frame = codec.encode(dataclasses.replace(REQUEST, time_left_s=60))
    decoded = codec.decode(frame)
    assert isinstance(decoded, Request)
    assert decoded.time_left_s == 60.0
    assert isinstance(decoded.time_left_s, float)
