"""Receivers whose session is over while a teacher may still write into their slots (R4)."""

from __future__ import annotations

from ring.core.messages import FillId
from transport.contract import Receiver


class Fences:
    """Kept until each has said of all its slots that nothing is written into them any more. Not thread-safe."""

    def __init__(self) -> None:
        self._closed: list[Receiver] = []

    def add(self, receiver: Receiver | None) -> None:
        """One that is closed; None: the session had none."""
        if receiver is not None:
            self._closed.append(receiver)

    def collect(self) -> list[FillId]:
        """Fills that can't be written any more, each once."""
        fenced = [fill for receiver in self._closed for fill in receiver.poll_fenced()]
        for receiver in [one for one in self._closed if not one.wait_fds()]:
            receiver.forget()
            self._closed.remove(receiver)
        return fenced

    def wait_fds(self) -> list[int]:
        """Descriptors that become readable when `collect` may have news."""
        return [fd for receiver in self._closed for fd in receiver.wait_fds()]

    def forget(self) -> None:
        """Wait for none of them any more: the slots go with their owner."""
        for receiver in self._closed:
            receiver.forget()
        self._closed.clear()
