"""Log lines that a peer can cause at will: few and short enough that nobody can fill a disk with them."""

from __future__ import annotations

import logging

#: So many at once, then one a second.
BURST = 20
PER_S = 1.0
#: Of one line; what a peer says of itself may be longer.
MAX_CHARS = 512


class Complaints:
    """How many were left out is said with the next one that is not."""

    def __init__(self, logger: logging.Logger, *, level: int = logging.WARNING, burst: int = BURST) -> None:
        """level, burst: of the lines, and how many of them may come at once."""
        self._logger = logger
        self._level = level
        self._burst = burst
        self._allowed = float(burst)
        self._updated_s: float | None = None
        self._num_left_out = 0

    def say(self, text: str, *, now_s: float) -> None:
        """Log it, or count it."""
        if self._updated_s is not None:
            self._allowed = min(self._burst, self._allowed + (now_s - self._updated_s) * PER_S)
        self._updated_s = now_s
        if self._allowed < 1:
            self._num_left_out += 1
            return
        self._allowed -= 1
        left_out = f" ({self._num_left_out} like it were left out)" if self._num_left_out else ""
        self._num_left_out = 0
        short = text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}..."
        self._logger.log(self._level, "%s%s", short, left_out)
