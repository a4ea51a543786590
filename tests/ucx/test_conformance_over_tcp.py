"""The conformance suite over UCX's tcp. tests/transport runs it over what UCX picks by itself: its shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_contract_holds_over_ucx_tcp() -> None:
    suite = subprocess.run(
        [sys.executable, "-m", "tests.conformance", "ucx"],
        cwd=REPOSITORY,
        env={**os.environ, "UCX_TLS": "tcp", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert suite.returncode == 0, suite.stdout[-5000:]
    assert " passed" in suite.stdout
