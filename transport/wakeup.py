"""A descriptor that one thread makes readable for another, as long as there is news."""

from __future__ import annotations

import os
import threading


class Wakeup:
    """An eventfd used as a level: readable from `set()` until `clear()`. Any thread may call it, also after close."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_set = False
        self._fd = -1  # also if there is none left
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """-1 after close()."""
        return self._fd

    def set(self) -> None:
        with self._lock:  # else the number could be closed and reused by another file before the write
            if self._fd >= 0 and not self._is_set:
                os.eventfd_write(self._fd, 1)
                self._is_set = True

    def clear(self) -> None:
        with self._lock:
            if self._fd >= 0 and self._is_set:
                os.eventfd_read(self._fd)
                self._is_set = False

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def __del__(self) -> None:
        self.close()
