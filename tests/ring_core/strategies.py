"""Hypothesis strategies: every message that the schemas allow, built from the schemas themselves."""

from __future__ import annotations

import math
from typing import cast

from hypothesis import strategies as st

from ring.core import codec
from ring.core import fields as f
from ring.core.messages import FillHeader, FillId, HeadInfo, HeadRequest, Hello, Message, TokenRequest


def _text(max_bytes: int) -> st.SearchStrategy[str]:
    return st.text(st.characters(codec="utf-8"), max_size=min(max_bytes, 60) // 4)


def of_kind(kind: f.Kind) -> st.SearchStrategy[object]:
    match kind:
        case f.Int(lowest=lowest, highest=highest):
            return st.integers(lowest, highest)
        case f.Float(lowest=lowest, highest=highest):
            bounds = [None if math.isinf(bound) else bound for bound in (lowest, highest)]
            return st.floats(*bounds, allow_nan=False, allow_infinity=False)
        case f.Bool():
            return st.booleans()
        case f.Str(max_bytes=max_bytes):
            return _text(max_bytes)
        case f.Bytes(max_bytes=max_bytes):
            return st.binary(max_size=min(max_bytes, 60))
        case f.Enum(members=members):
            return st.sampled_from(list(members))
        case f.Optional(kind=inner):
            return st.none() | of_kind(inner)
        case f.Tuple(kind=inner, max_items=max_items):
            return st.lists(of_kind(inner), max_size=min(max_items, 4)).map(tuple)
        case f.Fill(seq=seq, attempt=attempt, slot=slot):
            return st.builds(FillId, *(st.integers(k.lowest, k.highest) for k in (seq, attempt, slot)))
        case f.Scalars(key=key, text=text, number=number, raw=raw):
            values = of_kind(text) | of_kind(number) | of_kind(raw)
            return st.dictionaries(of_kind(key), values, max_size=4)
        case f.Record():
            return of_record(kind)
        case f.Tagged(records=records):
            return st.one_of([of_record(record) for record in records.values()])
        case _:
            raise AssertionError(f"no strategy for {kind}")


def of_record(record: f.Record) -> st.SearchStrategy[object]:
    if record.make is TokenRequest:
        return token_requests()
    if record.make is Hello:
        hello = {name: of_kind(kind) for name, kind in record.fields.items()} | {"rank": st.integers(0, 3)}
        return st.builds(Hello, **(hello | {"world_size": st.integers(4, 2**20)}))
    values = st.fixed_dictionaries({name: of_kind(kind) for name, kind in record.fields.items()})
    if record.make is HeadInfo:
        values = values.map(lambda v: _ordered(v, "real_vocab", "vocab_size"))
    if record.make is HeadRequest:
        values = values.map(lambda v: _ordered(v, "vocab_start", "vocab_end"))
    return values.map(lambda v: record.make(**v))


def _ordered(values: dict[str, object], lower: str, upper: str) -> dict[str, object]:
    low, high = values[lower], values[upper]
    assert isinstance(low, int)
    assert isinstance(high, int)
    return values | {lower: min(low, high), upper: max(low, high)}


@st.composite
def token_requests(draw: st.DrawFn, max_docs: int = 4) -> TokenRequest:
    doc_lengths = tuple(draw(st.lists(st.integers(1, 6), max_size=max_docs)))
    num_tokens = sum(doc_lengths)
    cuts = sorted(draw(st.sets(st.integers(0, num_tokens), max_size=8)))
    ranges = tuple(zip(cuts[::2], cuts[1::2], strict=False))
    ids = draw(st.binary(min_size=4 * num_tokens, max_size=4 * num_tokens))
    return TokenRequest(
        token_ids=ids, doc_lengths=doc_lengths, row_ranges=ranges, input_hash=draw(st.binary(max_size=64))
    )


def messages() -> st.SearchStrategy[Message]:
    return cast(st.SearchStrategy[Message], st.one_of([of_record(record) for record in codec.SCHEMAS.values()]))


def headers() -> st.SearchStrategy[FillHeader]:
    return cast(st.SearchStrategy[FillHeader], of_record(codec.HEADER_SCHEMA))
