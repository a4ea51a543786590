"""What holds for all tests."""

from __future__ import annotations

import os

# Before anything reads them: no test asks the hub, and no library's thread reports to it behind a later test.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

import hypothesis

# On a machine that does something else too, an example may take any time: a slow one is no failure.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
