"""What holds for all tests."""

from __future__ import annotations

import hypothesis

# On a machine that does something else too, an example may take any time: a slow one is no failure.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
