"""Frozen snapshots of both machines (R9), and the causes that they count by."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class DropCause(enum.Enum):
    """Why an answer was dropped (R3). All but LATE and NOT_ASKED are wrong answers to a live attempt."""

    LATE = "late"  # whole, but its attempt had been given up
    NOT_ASKED = "not_asked"  # no such attempt at this replica: repeated, invented, or long over
    WRONG_FILL = "wrong_fill"
    WRONG_EPOCH = "wrong_epoch"
    WRONG_FINGERPRINT = "wrong_fingerprint"
    WRONG_ROWS = "wrong_rows"
    WRONG_DTYPE = "wrong_dtype"
    WRONG_BYTES = "wrong_bytes"
    WRONG_HASH = "wrong_hash"
    WRONG_CRC = "wrong_crc"
    WRONG_HEADER = "wrong_header"  # can't be read


class RetryCause(enum.Enum):
    """Why an attempt was given up, so that its seq was asked for again."""

    DEADLINE = "deadline"  # not whole within request_timeout_s
    STALLED = "stalled"  # another attempt at the same replica was past its deadline
    DOWN = "down"  # the replica went away
    WRONG = "wrong"  # the answer was not what was expected
    CORRUPT = "corrupt"  # the CRC did not match
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class ReplicaStats:
    """One replica. `retries`: attempts at it that were given up. `seconds_per_token`: None until it is known."""

    name: str
    state: str
    epoch: str | None
    num_joins: int
    in_flight: int
    fills: int
    bytes_received: int
    retries: int
    seconds_per_token: float | None
    last_error: str | None


@dataclass(frozen=True, kw_only=True)
class RingStats:
    """The student's ring at one moment; counts and sums are since its start.

    `num_free` .. `num_quarantined`: the slots by state; they sum to depth + spares. `occupancy_frac`: filled or leased
    slots over depth. `pending`: submitted, never dispatched; `waiting`: to be asked again. `retries`: attempts that
    were given up; `drops`: answers that were dropped (R3). `teacher_stall_s`, `teacher_forward_s`, `teacher_queue_s`:
    sums over accepted fills of what their headers say (idle, forward, queue). `unserved_s`: how long work has waited
    without a replica to serve it since the last accepted fill; at teacher_timeout_s the run is lost.
    """

    num_free: int
    num_in_flight: int
    num_filled: int
    num_leased: int
    num_quarantined: int
    occupancy_frac: float
    pending: int
    waiting: int
    submitted: int
    fills: int
    released: int
    bytes_received: int
    retries: int
    retries_by_cause: Mapping[RetryCause, int]
    drops: int
    drops_by_cause: Mapping[DropCause, int]
    teacher_stall_s: float
    teacher_forward_s: float
    teacher_queue_s: float
    unserved_s: float
    replicas: tuple[ReplicaStats, ...]


@dataclass(frozen=True, kw_only=True)
class TeacherStats:
    """The queue at one moment; counts and sums are since the start.

    `computing` includes work for students that left meanwhile. `refused`: refusals of all codes; `repeated`: requests
    that came twice and were ignored. `idle_s`: time with nothing queued or computing (the teacher's stall); `queue_s`:
    sum over computed requests of their wait.
    """

    students: int
    queued: int
    queued_tokens: int
    computing: int
    sending: int
    received: int
    sent: int
    refused: int
    repeated: int
    dropped_students: int
    batches: int
    idle_s: float
    queue_s: float
