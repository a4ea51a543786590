"""What the student's machine asks its shell to do, and the lease it hands out.

The shell carries actions out in the order given. A failed send or arm is reported back as `replica_down`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ring.core.messages import FillHeader, FillId, Request


@dataclass(frozen=True)
class Arm:
    """Let exactly one payload of `num_bytes` for `fill` land in its slot, through the channel to `replica`."""

    replica: str
    fill: FillId
    num_bytes: int


@dataclass(frozen=True)
class Send:
    """Send the request on the control plane; its fill was armed by an earlier action."""

    replica: str
    request: Request


@dataclass(frozen=True)
class Disarm:
    """Take the arming back. When nothing of the fill can land any more, call `fenced`: at once or later.

    refused: the replica gave its word that it will not write this fill (any more): a data plane that can't see that by
    itself, because the replica writes without asking, may take it as the fence. A fill given up earlier is disarmed
    again when that word comes.
    """

    replica: str
    fill: FillId
    refused: bool = False


@dataclass(frozen=True)
class CancelFill:
    """Tell the replica that nobody waits for this fill any more."""

    replica: str
    fill: FillId


@dataclass(frozen=True)
class SendPing:
    replica: str


@dataclass(frozen=True)
class Deliverable:
    """`next_lease` will hand out `seq` now. Once for each time that an event makes the next lease available."""

    seq: int


@dataclass(frozen=True)
class DropReplica:
    """Close the channel to `replica`, report its fences, and connect again with backoff; it is down already here."""

    replica: str
    error: str


@dataclass(frozen=True)
class Lost:
    """The run has lost its teacher: raise TeacherLost with this message. Said once; nothing is requested after it."""

    message: str


@dataclass(frozen=True)
class Fatal:
    """A replica says that the request itself can't be served: raise RemoteProtocolError. Said once, as Lost is."""

    message: str


@dataclass(frozen=True)
class Note:
    """To be logged."""

    level: Literal["debug", "info", "warning", "error"]
    text: str


Action = Arm | Send | Disarm | CancelFill | SendPing | Deliverable | DropReplica | Lost | Fatal | Note


@dataclass(frozen=True, kw_only=True)
class Lease:
    """The student's exclusive right to read `slot` until `release(seq)`; `header` came with the fill."""

    seq: int
    slot: int
    fill: FillId
    replica: str
    header: FillHeader
