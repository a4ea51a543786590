"""One session with one replica: handshake first, then requests one way and fills the other.

A session ends with its connection; what follows is a new one (`ring.pump` makes it). The order of the handshake is
HELLO, WELCOME, OFFER, READY; anything out of order ends the session with a RemoteProtocolError.
"""

from __future__ import annotations

import enum
import functools
import logging
from dataclasses import dataclass

import crc32c

from ring.control import ControlLink
from ring.core.actions import Arm, CancelFill, Send, SendPing
from ring.core.errors import ConfigError, DisaggKDError, RemoteProtocolError
from ring.core.messages import (
    Cancel,
    Denied,
    FillId,
    Goodbye,
    Hello,
    Message,
    Offer,
    Ping,
    Pong,
    Ready,
    Refused,
    Request,
    Welcome,
    WireDtype,
)
from ring.endpoints import is_loopback
from transport.contract import Arrival, Backend, Fence, Receiver, is_readable
from transport.memory import SlotArena
from transport.registry import choose, load

#: The two connections of a session are read apart: a teacher that says goodbye and ends is seen to end first or heard
#: first. One that was killed loses both at once. Its fills are others' by then: only the next attempt to connect waits.
LAST_WORD_S = 2.0
#: Whoever says more than this and no goodbye has no last word.
MAX_LAST_MESSAGES = 256

logger = logging.getLogger(__name__)


@functools.cache  # once in a process is enough
def _warn_of_exposure(backend: str) -> None:
    logger.warning(
        "transport %s encrypts nothing: --auth protects the control plane, but states and the teacher's head travel "
        "in the clear; in a network that you don't trust use --transport zmq",
        backend,
    )


def farewell(message: Goodbye) -> str:
    """Why a session ended, in words for the user."""
    return f"it said goodbye: {message.reason}"


class Phase(enum.Enum):
    HELLO_SENT = "hello sent"
    WELCOMED = "welcomed"
    OFFERED = "offered"
    READY = "ready"


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a run asks of each of its replicas: of one request, and of each document in it."""

    wire_dtype: WireDtype
    max_rows: int
    max_tokens: int = 0
    max_document_tokens: int = 0

    def check(self, name: str, welcome: Welcome, first: Welcome) -> None:
        """Raises ConfigError: this replica can't serve what `first`, the run's teacher, was found to be able to."""
        if welcome.fingerprint != first.fingerprint:
            raise ConfigError(
                f"{name}: fingerprint {welcome.fingerprint} ({welcome.model}); the run's teacher is "
                f"{first.fingerprint} ({first.model}): all replicas must serve the same"
            )
        if self.wire_dtype not in welcome.wire_dtypes:
            allowed = ", ".join(dtype.value for dtype in welcome.wire_dtypes)
            raise ConfigError(
                f"{name}: the run's states travel as {self.wire_dtype.value}; this replica sends {allowed}"
            )
        for what, needed, limit in (
            ("rows in a request", self.max_rows, welcome.max_rows),
            ("tokens in a request", self.max_tokens, welcome.max_tokens),
            ("tokens in a document", self.max_document_tokens, welcome.max_document_tokens),
        ):
            if needed > limit:
                raise ConfigError(
                    f"{name}: it takes {limit} {what}, the run has up to {needed}: raise its --max-batch-tokens"
                )


@dataclass(frozen=True)
class Ending:
    """Of a session whose data channel is over: what the channel said, whether the replica was up, and how long the
    teacher's own word is awaited."""

    error: str
    was_up: bool
    until_s: float


class Session:
    """The student's half of one session. Not thread-safe: the pump's thread owns it."""

    def __init__(self, link: ControlLink, hello: Hello) -> None:
        """Says hello over `link`, which the session owns from now on."""
        self.link = link
        self.phase = Phase.HELLO_SENT
        self.welcome: Welcome | None = None
        self.backend: str | None = None
        self.crc = False
        self._hello = hello
        self._arena: SlotArena | None = None
        self._receiver: Receiver | None = None
        self._dropped = 0
        self._num_pings = 0
        #: Set by `end_channel`; then there is nothing left of the session but its last word.
        self.ending: Ending | None = None
        try:
            link.send(hello)
        except BaseException:
            link.close()
            raise

    def recv(self) -> Message | None:
        """The next message that concerns requests, or a handshake message already taken into account, or None.

        Raises PeerLost: the connection broke. Raises RemoteProtocolError: a message that is illegal in this phase.
        Raises ConfigError: the teacher refuses this student for good."""
        message = self.link.recv()
        match message:
            case None | Pong():
                pass
            case Denied():
                raise ConfigError(f"teacher {self.link.name} refuses this student: {message.reason}")
            case Welcome() if self.phase is Phase.HELLO_SENT:
                self.welcome, self.phase = message, Phase.WELCOMED
            case Ready() if self.phase is Phase.OFFERED:
                self.phase = Phase.READY
            case Refused() if self.phase is Phase.READY:
                pass
            case Goodbye():
                pass
            case Ping():
                self.link.send(Pong(token=message.token))
            case _:
                raise RemoteProtocolError(
                    f"{self.link.name}: {type(message).__name__} is illegal in the phase '{self.phase.value}'"
                )
        return message

    def offer(
        self,
        arena: SlotArena,
        *,
        transport: str,
        wire_dtype: WireDtype,
        crc: bool | None,
        bind_host: str | None,
        encrypt: bool = False,
    ) -> str:
        """Open the data channel and offer the slots; returns why this backend was chosen, and what it holds (R2).

        crc: None = as the backend advises. bind_host: None = as this machine reaches the replica. encrypt: states
        leave this machine only in a form that nobody else can read or change, if the backend can do that.
        Raises ConfigError: no backend that both sides can do."""
        assert self.welcome is not None
        same_host = self._hello.host_id == self.welcome.host_id
        self.backend, reason = choose(
            transport,
            student_backends=self._hello.backends,
            teacher_backends=self.welcome.backends,
            same_host=same_host,
        )
        backend: Backend = load(self.backend)
        capabilities = backend.capabilities()
        self.crc = capabilities.crc_by_default if crc is None else crc
        # Brackets belong to endpoints; whoever resolves or binds an address takes it without.
        bind_host = (bind_host or self.link.local_host()).strip("[]")
        if encrypt and not capabilities.encrypts and not capabilities.same_host_only and not is_loopback(bind_host):
            _warn_of_exposure(self.backend)
        self._arena, self._receiver = arena, backend.open_receiver(arena, bind_host=bind_host, encrypt=encrypt)
        self.link.send(
            Offer(
                backend=self.backend,
                description=self._receiver.describe(),
                num_slots=arena.num_slots,
                slot_bytes=arena.slot_bytes,
                wire_dtype=wire_dtype,
                crc=self.crc,
            )
        )
        self.phase = Phase.OFFERED
        return f"{reason}; at most {capabilities.bounce_bytes_per_peer / 2**20:g} MiB in buffers besides the slots"

    def tell(self, action: Arm | Send | CancelFill | SendPing) -> None:
        """Carry out what the machine decided. Raises TransportError."""
        match action:
            case Arm(fill=fill, num_bytes=num_bytes):
                self.arm(fill, num_bytes=num_bytes)
            case Send(request=request):
                self.request(request)
            case CancelFill(fill=fill):
                self.cancel(fill)
            case SendPing():
                self._num_pings += 1
                self.ping(self._num_pings)

    def arm(self, fill: FillId, *, num_bytes: int) -> None:
        self._open_receiver().arm(fill, num_bytes=num_bytes)

    def disarm(self, fill: FillId, *, refused: bool) -> Fence:
        """refused: the replica gave its word that it writes nothing of this fill (any more)."""
        return Fence.FENCED if self._receiver is None else self._receiver.disarm(fill, refused=refused)

    def request(self, request: Request) -> None:
        self.link.send(request)

    def cancel(self, fill: FillId) -> None:
        self.link.send(Cancel(fill=fill))

    def ping(self, token: int) -> None:
        self.link.send(Ping(token=token))

    def arrivals(self) -> list[Arrival]:
        """Fills that became whole. Raises PeerLost, TransportError."""
        return [] if self._receiver is None else self._receiver.poll()

    def may_have_more(self) -> bool:
        """Whether `arrivals` may bring more at once, though it brought nothing."""
        return self._receiver is not None and is_readable(self._receiver)

    def newly_dropped(self) -> int:
        """Payloads since the last call that came whole and that nobody waited for any more."""
        if self._receiver is None:
            return 0
        before, self._dropped = self._dropped, self._receiver.dropped
        return self._dropped - before

    def checksum(self, arrival: Arrival) -> int | None:
        """crc32c over what arrived, as it is in its slot; None: checking is off."""
        if not self.crc:
            return None
        assert self._arena is not None
        return crc32c.crc32c(self._arena.buffer(arrival.fill.slot)[: arrival.num_bytes])

    def fenced(self) -> list[FillId]:
        return [] if self._receiver is None else self._receiver.poll_fenced()

    def end_channel(self, error: str, *, was_up: bool, now_s: float) -> Receiver | None:
        """The data channel is over, and with it the session, but for what `last_word` may hear. Returns the closed
        receiver: its fences may still be pending."""
        self.ending = Ending(error, was_up=was_up, until_s=now_s + LAST_WORD_S)
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()
        return receiver

    def last_word(self, *, now_s: float) -> str | None:
        """Why the session ends whose channel has ended; None: the teacher may still say it."""
        ending = self.ending
        assert ending is not None
        try:
            for _ in range(MAX_LAST_MESSAGES):
                message = self.link.recv()
                if isinstance(message, Goodbye):
                    return f"{farewell(message)} ({ending.error})"
                if message is None:
                    return None if now_s < ending.until_s else ending.error
        except DisaggKDError:
            pass  # the link is over as well
        return ending.error

    def wait_fds(self) -> tuple[int, ...]:
        data_fds = () if self._receiver is None else self._receiver.wait_fds()
        return (*self.link.wait_fds(), *data_fds)

    def close(self) -> Receiver | None:
        """End the session. Returns the closed receiver: its fences may still be pending."""
        self.link.close()
        if self._receiver is not None:
            self._receiver.close()
        return self._receiver

    def _open_receiver(self) -> Receiver:
        assert self._receiver is not None
        return self._receiver
