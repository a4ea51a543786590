"""What is left to chance in slow tests comes from one number: `TEST_SEED=7 make test-slow` tries other deaths, other
faults and other runs in virtual time than `make test-slow` does."""

from __future__ import annotations

import os

MASTER_SEED = int(os.environ.get("TEST_SEED", "1"))


def seeds(count: int) -> range:
    """`count` seeds that no other master seed gives."""
    return range((MASTER_SEED - 1) * count, MASTER_SEED * count)
