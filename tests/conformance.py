"""`python -m tests.conformance [BACKEND ...]`: the transport contract's suite, for these backends or for all of them.

A new backend must pass it. What one can't do is listed in tests/transport/gaps.py; any other skip fails.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SUITE = sorted(str(path) for path in (Path(__file__).parent / "transport").glob("test_conformance*.py"))


def main(backends: list[str]) -> int:
    """Exit code of the first run that fails, else 0."""
    for options in [[f"--backend={name}"] for name in backends] or [[]]:
        code = pytest.main([*options, "-q", *SUITE])
        if code != pytest.ExitCode.OK:
            return int(code)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
