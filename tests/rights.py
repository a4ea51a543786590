"""Tests that need more of the machine than an ordinary account has: they are skipped with the reason, or fail where
REQUIRE_NETNS=1 says that this machine has it all, as .ci/run does."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

IS_REQUIRED = os.environ.get("REQUIRE_NETNS") == "1"
#: For tests about the files and sockets of other users.
needs_root = pytest.mark.skipif(os.geteuid() != 0 and not IS_REQUIRED, reason="only root can act as another user")


def lack(what: str) -> NoReturn:
    """The test can't run here, for want of this."""
    if IS_REQUIRED:
        pytest.fail(f"REQUIRE_NETNS=1, but {what}")
    pytest.skip(what)
