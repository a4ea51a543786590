"""What the pump knows of one replica, between and during its sessions, and how channels to replicas are opened."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ring.control import ControlLink
from ring.core.errors import ConfigError
from ring.core.messages import Welcome
from ring.session import Session
from transport.contract import Arrival

#: A replica that was lost is tried again after this, doubled up to the maximum while it stays away.
RECONNECT_MIN_S = 0.25
RECONNECT_MAX_S = 5.0

#: Raises ConfigError, or TeacherLost where this replica can't come back: then the run is over at once.
LinkOpener = Callable[[], ControlLink]


def _admit_all(welcome: Welcome) -> None:
    """Whatever it says."""


@dataclass(frozen=True, kw_only=True)
class ChannelOptions:
    """Which replica may begin a run, and how data channels are opened.

    admit: raises ConfigError where what a replica says of itself is not enough for this run: it is passed over; if all
    are, the run ends. crc: None = where the backend advises it. bind_host: for listening backends; None = the
    address from which this machine reaches the replica. encrypt: where the backend can."""

    admit: Callable[[Welcome], None] = _admit_all
    transport: str = "auto"
    crc: bool | None = None
    bind_host: str | None = None
    encrypt: bool = False


@dataclass(kw_only=True)
class Replica:
    """What the pump knows of one replica, between and during sessions. `welcome`: what it said of itself last.
    `leaving`: its session is over but for the fills that it brought before; nothing is said to it any more. `arrived`:
    fills that are whole, and that the machine was not told of yet."""

    name: str
    open_link: LinkOpener
    session: Session | None = None
    up: bool = False
    leaving: bool = False
    arrived: deque[Arrival] = field(default_factory=deque)
    retry_at_s: float = 0.0
    backoff_s: float = RECONNECT_MIN_S
    last_error: str = "no answer yet"
    refusal: ConfigError | None = None
    welcome: Welcome | None = None

    @property
    def is_unknown(self) -> bool:
        """It has not said what it serves, nor that it does not serve this run. It still may, where an attempt failed:
        the next trusted key may be its own, or its name be looked up by then."""
        return self.welcome is None and self.refusal is None

    @property
    def is_silent(self) -> bool:
        """It is there, and has not said what it serves: it may be busy."""
        session = self.session
        return self.is_unknown and session is not None and session.link.connected

    def wait_fds(self) -> tuple[int, ...]:
        """Descriptors that become readable when its session may have news."""
        return () if self.session is None else self.session.wait_fds()
