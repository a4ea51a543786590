"""The protocol's tables as Markdown: docs/ring-protocol.md is checked against them, so that it can't grow stale."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import TypeVar

from ring.core import codec, fields
from ring.core.jobs import JOB_TRANSITIONS
from ring.core.replicas import REPLICA_TRANSITIONS
from ring.core.requests import REQUEST_TRANSITIONS
from ring.core.slots import SLOT_TRANSITIONS

S = TypeVar("S", bound=enum.Enum)
E = TypeVar("E", bound=enum.Enum)


def render(name: str) -> str:
    """The table of that name, without a final newline. Raises KeyError: no such table."""
    return TABLES[name]()


def _transitions(table: Mapping[tuple[S, E], S]) -> str:
    lines = ["| in state | on | goes to |", "|---|---|---|"]
    lines += [f"| {state.value} | {event.value} | {after.value} |" for (state, event), after in table.items()]
    return "\n".join(lines)


def _records(records: Mapping[str, fields.Record]) -> str:
    lines = ["| t | field | allowed |", "|---|---|---|"]
    for tag, record in records.items():
        if not record.fields:
            lines.append(f"| {tag} | | |")
        for i, (name, kind) in enumerate(record.fields.items()):
            lines.append(f"| {tag if i == 0 else ''} | {name} | {_kind(kind)} |")
    return "\n".join(lines)


def _kind(kind: fields.Kind) -> str:
    match kind:
        case fields.Int(lowest=lowest, highest=highest):
            return f"integer {_number(lowest)} to {_number(highest)}"
        case fields.Float(lowest=lowest, highest=highest):
            return "finite number" if lowest == float("-inf") else f"number {lowest:g} to {highest:g}"
        case fields.Bool():
            return "true or false"
        case fields.Str(max_bytes=max_bytes):
            return f"string, {max_bytes} bytes"
        case fields.Bytes(max_bytes=max_bytes):
            return f"bytes, {_number(max_bytes)}"
        case fields.Enum(members=members):
            return ", ".join(f"`{member.value}`" for member in members)
        case fields.Optional(kind=inner):
            return f"nil or {_kind(inner)}"
        case fields.Tuple(kind=inner, max_items=max_items):
            return f"up to {max_items} of: {_kind(inner)}"
        case fields.U32s(max_items=max_items):
            return f"up to {_number(max_items)} little-endian uint32, as bytes"
        case fields.U32Pairs(max_items=max_items):
            return f"up to {_number(max_items)} pairs of little-endian uint32, as bytes"
        case fields.Fill(seq=seq, attempt=attempt, slot=slot):
            return f"array: seq {_kind(seq)}, attempt {_kind(attempt)}, slot {_kind(slot)}"
        case fields.Scalars(max_items=max_items):
            return f"map of up to {max_items} strings, integers, bytes"
        case fields.Record():
            return "map, below"
        case fields.Tagged(records=records):
            return f"map with its own t, below: {', '.join(records)}"
        case _:
            raise KeyError(f"no words for {kind}")


def _number(value: int) -> str:
    """Powers of two are easier to read as such."""
    for bits in range(16, 65):
        for offset, suffix in ((0, ""), (-1, " - 1")):
            if abs(value) == 2**bits + offset:
                return f"{'-' if value < 0 else ''}2^{bits}{suffix}"
    return str(value)


TABLES: Mapping[str, Callable[[], str]] = {
    "slot": lambda: _transitions(SLOT_TRANSITIONS),
    "request": lambda: _transitions(REQUEST_TRANSITIONS),
    "replica": lambda: _transitions(REPLICA_TRANSITIONS),
    "job": lambda: _transitions(JOB_TRANSITIONS),
    "messages": lambda: _records(codec.SCHEMAS),
    "parts": lambda: _records({"(head)": codec.HEAD_SCHEMA, **codec.PAYLOAD_SCHEMAS}),
    "header": lambda: _records({"fill": codec.HEADER_SCHEMA}),
}
