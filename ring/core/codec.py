"""Control-plane messages and fill headers to bounded MessagePack maps and back."""

from __future__ import annotations

from ring.core.messages import FillHeader, Message


def encode(message: Message) -> bytes:
    raise NotImplementedError


def decode(data: bytes | memoryview) -> Message:
    raise NotImplementedError


def encode_header(header: FillHeader) -> bytes:
    raise NotImplementedError


def decode_header(data: bytes | memoryview) -> FillHeader:
    raise NotImplementedError
