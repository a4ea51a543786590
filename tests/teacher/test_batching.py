"""Documents onto passes: nothing lost, the bound kept, little padding."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from teacher.batching import PASS_OVERHEAD_TOKENS, Span, plan_passes


@st.composite
def spans_of_requests(draw: st.DrawFn) -> list[Span]:
    lengths = draw(st.lists(st.lists(st.integers(1, 3000), max_size=6), max_size=6))
    return [
        Span(
            request=request,
            document=document,
            first_token=0,
            num_tokens=length,
            length_class=int(length > 1500),
        )
        for request, documents in enumerate(lengths)
        for document, length in enumerate(documents)
    ]


def padded_tokens(spans: list[Span]) -> int:
    return len(spans) * max(span.num_tokens for span in spans)


@given(spans_of_requests(), st.none() | st.integers(3000, 9000), st.booleans())
def test_every_document_runs_once_within_the_bound(
    spans: list[Span], max_batch_tokens: int | None, deterministic: bool
) -> None:
    passes = plan_passes(spans, max_batch_tokens=max_batch_tokens, deterministic=deterministic)
    assert sorted((s.request, s.document) for one in passes for s in one) == [(s.request, s.document) for s in spans]
    for one in passes:
        assert max_batch_tokens is None or padded_tokens(one) <= max_batch_tokens
        assert len({span.length_class for span in one}) == 1
        padding = padded_tokens(one) - sum(span.num_tokens for span in one)
        assert padding <= max(PASS_OVERHEAD_TOKENS, padded_tokens(one) / 4)


@given(spans_of_requests(), st.none() | st.integers(3000, 9000))
def test_deterministic_passes_follow_from_their_request_alone(spans: list[Span], max_batch_tokens: int | None) -> None:
    together = plan_passes(spans, max_batch_tokens=max_batch_tokens, deterministic=True)
    alone = [
        one
        for request in sorted({span.request for span in spans})
        for one in plan_passes(
            [span for span in spans if span.request == request], max_batch_tokens=max_batch_tokens, deterministic=True
        )
    ]
    assert together == alone
    assert [span for one in together for span in one] == spans


def test_one_long_document_does_not_pad_many_short_ones() -> None:
    lengths = [4096] + [64] * 64
    spans = [Span(request=i, document=0, first_token=0, num_tokens=n) for i, n in enumerate(lengths)]
    passes = plan_passes(spans, max_batch_tokens=None, deterministic=False)
    assert sorted(padded_tokens(one) for one in passes) == [4096, 4096]


def test_short_requests_share_one_pass() -> None:
    spans = [Span(request=i, document=0, first_token=0, num_tokens=n) for i, n in enumerate([5, 30, 17, 2])]
    assert len(plan_passes(spans, max_batch_tokens=None, deterministic=False)) == 1
    assert len(plan_passes(spans, max_batch_tokens=None, deterministic=True)) == 4
