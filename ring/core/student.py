"""The student's machine: slots, requests, replicas and leases as one sans-IO state machine.

Events and `now_s` in, actions out; no clock, lock, socket, tensor or randomness. A call that is illegal in the present
state raises LocalProtocolError and changes nothing.
"""

from __future__ import annotations

from ring.core.actions import Action, Lease
from ring.core.config import Expectation, RingConfig
from ring.core.messages import FillHeader, FillId, Payload, RefusalCode
from ring.core.stats import RingStats


class StudentMachine:
    def __init__(self, config: RingConfig, *, epoch: str, fingerprint: str | None = None, now_s: float) -> None:
        raise NotImplementedError

    @property
    def can_submit(self) -> int:
        """How many more requests `submit` accepts now."""
        raise NotImplementedError

    def submit(self, seq: int, payload: Payload, expect: Expectation, *, now_s: float) -> list[Action]:
        raise NotImplementedError

    def replica_up(self, replica: str, *, epoch: str, fingerprint: str, now_s: float) -> list[Action]:
        raise NotImplementedError

    def replica_down(self, replica: str, *, error: str, now_s: float) -> list[Action]:
        raise NotImplementedError

    def heard(self, replica: str, *, now_s: float) -> None:
        raise NotImplementedError

    def arrived(
        self, replica: str, fill: FillId, num_bytes: int, header: FillHeader, crc: int | None, *, now_s: float
    ) -> list[Action]:
        raise NotImplementedError

    def refused(self, replica: str, fill: FillId, code: RefusalCode, message: str, *, now_s: float) -> list[Action]:
        raise NotImplementedError

    def fenced(self, fill: FillId, *, now_s: float) -> list[Action]:
        raise NotImplementedError

    def next_lease(self, *, now_s: float) -> Lease | None:
        raise NotImplementedError

    def release(self, seq: int, *, now_s: float) -> list[Action]:
        raise NotImplementedError

    def on_timer(self, *, now_s: float) -> list[Action]:
        raise NotImplementedError

    def next_deadline_s(self) -> float | None:
        raise NotImplementedError

    def stats(self, *, now_s: float) -> RingStats:
        raise NotImplementedError
