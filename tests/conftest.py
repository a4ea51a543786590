"""What holds for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Before anything reads them: no test asks the hub, and no library's thread reports to it behind a later test.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

import hypothesis
import pytest

from tests.endings import close_what_was_opened

# On a machine that does something else too, an example may take any time: a slow one is no failure.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def what_a_test_opened_ends_with_it() -> Iterator[None]:
    yield
    close_what_was_opened()
