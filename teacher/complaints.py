"""Warnings that a peer can cause at will: few enough that nobody can fill a disk with them."""

from __future__ import annotations

import logging

#: So many at once, then one a second.
BURST = 20
PER_S = 1.0


class Complaints:
    """How many were left out is said with the next one that is not."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._allowed = float(BURST)
        self._updated_s: float | None = None
        self._num_left_out = 0

    def warn(self, text: str, *, now_s: float) -> None:
        """Log it, or count it."""
        if self._updated_s is not None:
            self._allowed = min(BURST, self._allowed + (now_s - self._updated_s) * PER_S)
        self._updated_s = now_s
        if self._allowed < 1:
            self._num_left_out += 1
            return
        self._allowed -= 1
        left_out = f" ({self._num_left_out} like it were left out)" if self._num_left_out else ""
        self._num_left_out = 0
        self._logger.warning("%s%s", text, left_out)
