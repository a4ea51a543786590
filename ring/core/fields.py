"""Kinds of fields: how one value of a message becomes plain MessagePack data and comes back, within stated bounds.

Each kind checks alike in both directions, so that whatever can be encoded can be decoded. A value that doesn't fit
raises `Malformed`; `ring.core.codec` says whose fault that is.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from ring.core.messages import FillId


class Malformed(ValueError):
    """A value outside what its field allows."""


class Kind(Protocol):
    """`pack` turns a value into plain data, `unpack` the other way round; both raise Malformed. `where` names it."""

    def pack(self, value: object, where: str) -> object: ...

    def unpack(self, plain: object, where: str) -> object: ...


@dataclass(frozen=True)
class Int:
    lowest: int
    highest: int

    def pack(self, value: object, where: str) -> object:
        return self.unpack(value, where)

    def unpack(self, plain: object, where: str) -> object:
        if type(plain) is not int:  # bool is an int to isinstance, not here
            raise Malformed(f"{where} must be an integer, got {type(plain).__name__}")
        if not self.lowest <= plain <= self.highest:
            raise Malformed(f"{where} is {plain}; allowed: {self.lowest} to {self.highest}")
        return plain


@dataclass(frozen=True)
class Float:
    lowest: float = -math.inf
    highest: float = math.inf

    def pack(self, value: object, where: str) -> object:
        if type(value) is int:
            try:
                value = float(value)
            except OverflowError:
                raise Malformed(f"{where} is an integer that no float can hold") from None
        return self.unpack(value, where)

    def unpack(self, plain: object, where: str) -> object:
        if type(plain) is not float:
            raise Malformed(f"{where} must be a float, got {type(plain).__name__}")
        if not (math.isfinite(plain) and self.lowest <= plain <= self.highest):
            raise Malformed(f"{where} is {plain}; allowed: finite, {self.lowest:g} to {self.highest:g}")
        return plain


@dataclass(frozen=True)
class Bool:
    def pack(self, value: object, where: str) -> object:
        return self.unpack(value, where)

    def unpack(self, plain: object, where: str) -> object:
        if type(plain) is not bool:
            raise Malformed(f"{where} must be true or false, got {type(plain).__name__}")
        return plain


@dataclass(frozen=True)
class Str:
    max_bytes: int

    def pack(self, value: object, where: str) -> object:
        return self.unpack(value, where)

    def unpack(self, plain: object, where: str) -> object:
        if type(plain) is not str:
            raise Malformed(f"{where} must be a string, got {type(plain).__name__}")
        # Characters first: a string that is too long in characters need not be encoded to know.
        if len(plain) > self.max_bytes or len(plain.encode("utf-8", "surrogatepass")) > self.max_bytes:
            raise Malformed(f"{where} has {len(plain)} characters; allowed: {self.max_bytes} bytes of UTF-8")
        return plain


@dataclass(frozen=True)
class Bytes:
    max_bytes: int

    def pack(self, value: object, where: str) -> object:
        return self.unpack(value, where)

    def unpack(self, plain: object, where: str) -> object:
        if type(plain) is not bytes:
            raise Malformed(f"{where} must be bytes, got {type(plain).__name__}")
        if len(plain) > self.max_bytes:
            raise Malformed(f"{where} has {len(plain)} bytes; allowed: {self.max_bytes}")
        return plain


@dataclass(frozen=True)
class Enum:
    members: type[enum.Enum]

    def pack(self, value: object, where: str) -> object:
        if not isinstance(value, self.members):
            raise Malformed(f"{where} must be a {self.members.__name__}, got {type(value).__name__}")
        return value.value

    def unpack(self, plain: object, where: str) -> object:
        for member in self.members:
            if type(plain) is str and member.value == plain:
                return member
        allowed = ", ".join(str(member.value) for member in self.members)
        raise Malformed(f"{where} is {plain!r:.80}; allowed: {allowed}")


@dataclass(frozen=True)
class Optional:
    kind: Kind

    def pack(self, value: object, where: str) -> object:
        return None if value is None else self.kind.pack(value, where)

    def unpack(self, plain: object, where: str) -> object:
        return None if plain is None else self.kind.unpack(plain, where)


@dataclass(frozen=True)
class Tuple:
    """A short tuple of one kind. Long ones travel as packed bytes (`U32s`, `U32Pairs`)."""

    kind: Kind
    max_items: int

    def pack(self, value: object, where: str) -> object:
        if not isinstance(value, tuple):
            raise Malformed(f"{where} must be a tuple, got {type(value).__name__}")
        self._check_length(len(value), where)
        return [self.kind.pack(item, f"{where}[{i}]") for i, item in enumerate(value)]

    def unpack(self, plain: object, where: str) -> object:
        if not isinstance(plain, list):
            raise Malformed(f"{where} must be an array, got {type(plain).__name__}")
        self._check_length(len(plain), where)
        return tuple(self.kind.unpack(item, f"{where}[{i}]") for i, item in enumerate(plain))

    def _check_length(self, num_items: int, where: str) -> None:
        if num_items > self.max_items:
            raise Malformed(f"{where} has {num_items} items; allowed: {self.max_items}")


@dataclass(frozen=True)
class U32s:
    """Integers as little-endian uint32: 4 bytes each however many there are, and nothing to allocate before a check."""

    max_items: int

    def pack(self, value: object, where: str) -> object:
        if not isinstance(value, tuple):
            raise Malformed(f"{where} must be a tuple, got {type(value).__name__}")
        if len(value) > self.max_items:
            raise Malformed(f"{where} has {len(value)} items; allowed: {self.max_items}")
        for item in value:
            if type(item) is not int:
                raise Malformed(f"{where} must hold integers, got {type(item).__name__}")
        try:
            return struct.pack(f"<{len(value)}I", *value)
        except struct.error:
            raise Malformed(f"{where} holds {min(value)} to {max(value)}; allowed: 0 to {2**32 - 1}") from None

    def unpack(self, plain: object, where: str) -> object:
        if type(plain) is not bytes:
            raise Malformed(f"{where} must be bytes, got {type(plain).__name__}")
        if len(plain) % 4 or len(plain) > 4 * self.max_items:
            raise Malformed(f"{where} has {len(plain)} bytes; allowed: 4 each for up to {self.max_items} integers")
        return struct.unpack(f"<{len(plain) // 4}I", plain)


@dataclass(frozen=True)
class U32Pairs:
    """Pairs of integers, packed as `U32s`."""

    max_items: int

    def pack(self, value: object, where: str) -> object:
        if not isinstance(value, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
            raise Malformed(f"{where} must be a tuple of pairs")
        return U32s(2 * self.max_items).pack(tuple(item for pair in value for item in pair), where)

    def unpack(self, plain: object, where: str) -> object:
        flat = U32s(2 * self.max_items).unpack(plain, where)
        assert isinstance(flat, tuple)
        if len(flat) % 2:
            raise Malformed(f"{where} has {len(flat)} integers; allowed: pairs")
        return tuple(zip(flat[::2], flat[1::2], strict=True))


@dataclass(frozen=True)
class Fill:
    """A FillId, as an array of three integers."""

    seq: Int
    attempt: Int
    slot: Int

    def pack(self, value: object, where: str) -> object:
        if not isinstance(value, FillId):
            raise Malformed(f"{where} must be a FillId, got {type(value).__name__}")
        return list(self._check(list(value), where))

    def unpack(self, plain: object, where: str) -> object:
        if not isinstance(plain, list) or len(plain) != 3:
            raise Malformed(f"{where} must be an array of seq, attempt, slot")
        return self._check(plain, where)

    def _check(self, items: list[object], where: str) -> FillId:
        kinds = (("seq", self.seq), ("attempt", self.attempt), ("slot", self.slot))
        checked = [kind.unpack(item, f"{where}.{name}") for (name, kind), item in zip(kinds, items, strict=True)]
        seq, attempt, slot = (item for item in checked if isinstance(item, int))
        return FillId(seq, attempt, slot)


@dataclass(frozen=True)
class Scalars:
    """A backend's description: a small map of strings, integers and bytes."""

    max_items: int
    key: Str
    text: Str
    number: Int
    raw: Bytes

    def pack(self, value: object, where: str) -> object:
        return self.unpack(dict(value) if isinstance(value, Mapping) else value, where)

    def unpack(self, plain: object, where: str) -> object:
        if not isinstance(plain, dict):
            raise Malformed(f"{where} must be a map, got {type(plain).__name__}")
        if len(plain) > self.max_items:
            raise Malformed(f"{where} has {len(plain)} entries; allowed: {self.max_items}")
        kinds: dict[type, Kind] = {str: self.text, int: self.number, bytes: self.raw}
        for key, item in plain.items():
            self.key.unpack(key, f"a key of {where}")
            kind = kinds.get(type(item))
            if kind is None:
                raise Malformed(f"{where}.{key:.40} is a {type(item).__name__}; allowed: string, integer, bytes")
            kind.unpack(item, f"{where}.{key:.40}")
        return plain


@dataclass(frozen=True)
class Record:
    """A dataclass as a map with exactly its fields. `check` sees the finished value: what concerns several fields."""

    make: Callable[..., object]
    fields: Mapping[str, Kind]
    check: Callable[[object], str | None] | None = None

    def pack(self, value: object, where: str) -> object:
        if type(value) is not self.make:
            raise Malformed(f"{where} must be a {self.make.__name__}, got {type(value).__name__}")
        plain = {name: kind.pack(getattr(value, name), f"{where}.{name}") for name, kind in self.fields.items()}
        self._check(value, where)
        return plain

    def unpack(self, plain: object, where: str) -> object:
        if not isinstance(plain, dict):
            raise Malformed(f"{where} must be a map, got {type(plain).__name__}")
        if plain.keys() != self.fields.keys():
            missing = sorted(self.fields.keys() - plain.keys())
            unknown = sorted(str(key)[:40] for key in plain.keys() - self.fields.keys())[:8]
            raise Malformed(f"{where} lacks {missing} and has {unknown} too many")
        value = self.make(**{name: kind.unpack(plain[name], f"{where}.{name}") for name, kind in self.fields.items()})
        self._check(value, where)
        return value

    def _check(self, value: object, where: str) -> None:
        objection = self.check(value) if self.check is not None else None
        if objection is not None:
            raise Malformed(f"{where}: {objection}")


@dataclass(frozen=True)
class Tagged:
    """One of several records, told apart by the entry "t"."""

    records: Mapping[str, Record]

    def pack(self, value: object, where: str) -> object:
        for tag, record in self.records.items():
            if type(value) is record.make:
                plain = record.pack(value, where)
                assert isinstance(plain, dict)
                return {"t": tag, **plain}
        raise Malformed(f"{where} is a {type(value).__name__}; allowed: {', '.join(self.records)}")

    def unpack(self, plain: object, where: str) -> object:
        if not isinstance(plain, dict):
            raise Malformed(f"{where} must be a map, got {type(plain).__name__}")
        tag = plain.get("t")
        record = self.records.get(tag) if isinstance(tag, str) else None
        if record is None:
            raise Malformed(f"{where} has type {tag!r:.80}; allowed: {', '.join(self.records)}")
        return record.unpack({key: item for key, item in plain.items() if key != "t"}, where)
