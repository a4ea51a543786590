"""The hash that ties a fill to the very input that was asked for.

The student computes it when it builds a request, the teacher when it has decoded one, and the fill's header carries it
back; a fill for other tokens, other document borders or other rows can then never be taken for the right one. It lives
here because both sides may import `planner`, and it needs nothing but the standard library.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

INPUT_HASH_BYTES = 16

# Part of the layout: another layout needs another name, so that old and new never agree by chance.
_PERSON = b"disaggkd-input-1"


def input_hash(token_ids: bytes, doc_lengths: Sequence[int], row_ranges: Sequence[tuple[int, int]]) -> bytes:
    """Blake2b-128 over the three parts of a request, `INPUT_HASH_BYTES` long.

    `token_ids`: little-endian uint32, documents one after the other. `doc_lengths`: tokens of each document.
    `row_ranges`: half-open ranges into the concatenated tokens. Hashed layout, all little-endian: three u64 counts
    (bytes of tokens, documents, ranges), the tokens, a u64 a document, two u64 a range. The counts come first, so no
    two different inputs share one byte string.

    Raises ValueError: token bytes that are no whole number of ids, or a negative length or bound.
    """
    if len(token_ids) % 4:
        raise ValueError(f"token_ids holds {len(token_ids)} bytes; allowed: a multiple of 4 (uint32)")
    bounds = [bound for row_range in row_ranges for bound in row_range]
    if min(doc_lengths, default=0) < 0 or min(bounds, default=0) < 0:
        raise ValueError(f"lengths and bounds must be >= 0, got {tuple(doc_lengths)} and {tuple(row_ranges)}")
    digest = hashlib.blake2b(digest_size=INPUT_HASH_BYTES, person=_PERSON)
    digest.update(struct.pack("<3Q", len(token_ids), len(doc_lengths), len(row_ranges)))
    digest.update(token_ids)
    digest.update(struct.pack(f"<{len(doc_lengths)}Q", *doc_lengths))
    digest.update(struct.pack(f"<{len(bounds)}Q", *bounds))
    return digest.digest()
