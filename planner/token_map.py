"""The token -> id map of a tokenizer, as one hash that two sides can compare before they train on each other's ids.

Tokenizer files come in several formats that say the same; the map is what counts. Pure Python.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping


def token_map_hash(token_ids: Mapping[str, int]) -> str:
    """sha256 (64 hex digits) over the entries in the order of their ids; the order in the mapping plays no part.

    Takes what a Hugging Face tokenizer's `get_vocab()` gives, added tokens included.
    Raises ValueError: no token at all, or an id that is no integer >= 0."""
    num_tokens_of(token_ids)
    digest = hashlib.sha256()
    for token, token_id in sorted(token_ids.items(), key=lambda entry: (entry[1], entry[0])):
        # The length keeps entries apart; lone surrogates occur in the maps of byte-level tokenizers.
        encoded = token.encode("utf-8", "surrogatepass")
        digest.update(f"{token_id}:{len(encoded)}:".encode())
        digest.update(encoded)
    return digest.hexdigest()


def num_tokens_of(token_ids: Mapping[str, int]) -> int:
    """Highest token id + 1: ids from there on are padding of the vocabulary. Raises like `token_map_hash`."""
    if not token_ids:
        raise ValueError("token map: needs at least one token, found none")
    for token, token_id in token_ids.items():
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise ValueError(f"token map: the id of {token!r} must be an integer >= 0, got {token_id!r}")
    return max(token_ids.values()) + 1
