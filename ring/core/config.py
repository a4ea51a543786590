"""What the ring is told at its start, and what it is told to expect of each fill."""

from __future__ import annotations

from dataclasses import dataclass

from ring.core.errors import ConfigError
from ring.core.messages import WireDtype

#: Of a ring: far more than any needs, and few enough that a teacher's queue full of them is no danger.
MAX_SLOTS = 4096
#: Of anything that messages count: rows, tokens, columns.
MAX_COUNT = 2**31 - 1
#: Of any time that is configured or sent: thirty years, and sums of any number of them stay finite.
MAX_SECONDS = 1e9
#: Requests of the largest size that a teacher queues for one student; of smaller ones it takes more.
MAX_QUEUED_REQUESTS = 64


@dataclass(frozen=True, kw_only=True)
class RingConfig:
    """The student's ring.

    `depth`: requests that hold a place from their first dispatch until their lease is released; `num_spares`: further
    slots that stand in for quarantined ones, so that `depth + num_spares` slots exist. `request_timeout_s`: after that
    an attempt is given up. `peer_timeout_s`: a replica not heard from for that long is down. `teacher_timeout_s`: with
    work waiting and no replica to serve it for that long, the run has lost its teacher. `max_pending`: requests that
    may be submitted ahead of their first dispatch (default: depth).

    Raises ConfigError: a value out of its range.
    """

    depth: int
    num_spares: int = 2
    request_timeout_s: float = 60.0
    peer_timeout_s: float = 5.0
    ping_interval_s: float = 1.0
    teacher_timeout_s: float = 60.0
    max_pending: int | None = None

    def __post_init__(self) -> None:
        _check_int("depth", self.depth, lowest=1)
        _check_int("num_spares", self.num_spares, lowest=0)
        if self.num_slots > MAX_SLOTS:
            raise ConfigError(f"depth + num_spares must be <= {MAX_SLOTS}, got {self.depth} + {self.num_spares}")
        for name in ("request_timeout_s", "peer_timeout_s", "ping_interval_s", "teacher_timeout_s"):
            _check_seconds(name, getattr(self, name))
        if self.ping_interval_s >= self.peer_timeout_s:
            raise ConfigError(
                f"ping_interval_s must be < peer_timeout_s, got {self.ping_interval_s} and {self.peer_timeout_s}"
            )
        if self.max_pending is not None:
            _check_int("max_pending", self.max_pending, lowest=1)

    @property
    def num_slots(self) -> int:
        return self.depth + self.num_spares

    @property
    def pending_limit(self) -> int:
        return self.depth if self.max_pending is None else self.max_pending


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What a fill must look like to be accepted (R3), and what it costs the teacher, for sharing out the load."""

    num_rows: int
    dtype: WireDtype
    num_bytes: int
    input_hash: bytes
    cost_tokens: int


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """The teacher's queue.

    `max_batch_tokens`: tokens of one forward pass (a larger request goes alone). `max_rows`, `max_tokens`: limits of
    one request. `student_timeout_s`: a student not heard from, or not taking a fill, for that long is dropped.
    `head_column_bytes`: of the teacher's head; 0: hashing it for a student is not charged.

    Raises ConfigError: a value out of its range.
    """

    max_batch_tokens: int
    max_rows: int
    max_tokens: int
    max_students: int = 64
    student_timeout_s: float = 60.0
    head_column_bytes: int = 0

    def __post_init__(self) -> None:
        _check_int("head_column_bytes", self.head_column_bytes, lowest=0)
        for name in ("max_batch_tokens", "max_rows", "max_tokens", "max_students"):
            _check_int(name, getattr(self, name), lowest=1)
        _check_seconds("student_timeout_s", self.student_timeout_s)

    @property
    def max_queued_tokens(self) -> int:
        """Of one student: its number of slots alone would let it fill the memory."""
        return MAX_QUEUED_REQUESTS * self.max_tokens


def _check_int(name: str, value: int, *, lowest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
        raise ConfigError(f"{name} must be an integer >= {lowest}, got {value!r}")


def _check_seconds(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_SECONDS:
        raise ConfigError(f"{name} must be a number of seconds > 0 and <= {MAX_SECONDS:g}, got {value!r}")
