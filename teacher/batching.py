"""Which documents share a forward pass: as few padded tokens as it takes, never more than the bound.

Documents become rows of one batch, padded on the right to the longest. Pure Python: no tensor here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# A pass costs a fixed time (launches, weights read once); below this many padded tokens a further pass costs more than
# the padding does. Above it, padding may take a quarter of a pass.
PASS_OVERHEAD_TOKENS = 512
_PADDING_SHARE = 4


@dataclass(frozen=True, kw_only=True)
class Span:
    """The tokens of one document that a pass must see: `num_tokens` from `first_token` of its request's tokens on.

    `length_class`: documents of different classes never share a pass (see `TeacherModel`)."""

    request: int
    document: int
    first_token: int
    num_tokens: int
    length_class: int = 0


def plan_passes(spans: Iterable[Span], *, max_batch_tokens: int | None, deterministic: bool) -> list[list[Span]]:
    """Every span in exactly one pass; a pass's rows times its longest row is at most `max_batch_tokens`.

    Sorted by length, so that rows of a pass pad each other little. `deterministic`: in the given order, and no pass
    holds two requests, so that a request's passes follow from the request alone.
    The caller has refused documents longer than `max_batch_tokens`; such a span would get a pass of its own."""
    if deterministic:
        ordered = list(spans)
    else:
        ordered = sorted(spans, key=lambda s: (s.length_class, -s.num_tokens, s.request, s.document))
    passes: list[list[Span]] = []
    longest = num_tokens = 0
    for span in ordered:
        padded_tokens = max(longest, span.num_tokens) * (len(passes[-1]) + 1 if passes else 1)
        padding = padded_tokens - num_tokens - span.num_tokens
        joins = (
            bool(passes)
            and (max_batch_tokens is None or padded_tokens <= max_batch_tokens)
            and padding <= max(PASS_OVERHEAD_TOKENS, padded_tokens // _PADDING_SHARE)
            and span.length_class == passes[-1][0].length_class
            and (not deterministic or span.request == passes[-1][0].request)
        )
        if joins:
            passes[-1].append(span)
            longest, num_tokens = max(longest, span.num_tokens), num_tokens + span.num_tokens
        else:
            passes.append([span])
            longest = num_tokens = span.num_tokens
    return passes
