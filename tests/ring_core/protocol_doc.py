"""Writes the generated tables into docs/ring-protocol.md: `python -m tests.ring_core.protocol_doc`.

The test beside it fails while the page and the code differ.
"""

from __future__ import annotations

import re
from pathlib import Path

from ring.core import tables

PAGE = Path(__file__).parents[2] / "docs" / "ring-protocol.md"
_BLOCK = re.compile(
    r"(?P<open><!-- table: (?P<name>\w+) -->\n)(?P<body>.*?)(?P<close>\n<!-- end of table -->)", re.DOTALL
)


def blocks(text: str) -> dict[str, str]:
    """The tables that the page shows, by name."""
    return {match["name"]: match["body"] for match in _BLOCK.finditer(text)}


def updated(text: str) -> str:
    """The page with every table as the code has it."""
    return _BLOCK.sub(lambda match: match["open"] + tables.render(match["name"]) + match["close"], text)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
