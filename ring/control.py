"""The control plane: links that carry `ring.core.messages`, over ZeroMQ. `ring.local_control` has them in a process.

A `ControlLink` is the student's end to one replica, a `ControlPort` the teacher's end to all its students. A link lives
for one connection: when it breaks it is closed, and the next one starts with a fresh identity and a new handshake, so
no message of a former life can be taken for one of the present. Nothing here knows what the messages mean.
Threads: one thread owns a link or port; `close()` of a ZeroMQ socket belongs to that thread too.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
import time
from collections.abc import Iterator
from typing import Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from ring.auth import PEERS_NAME, PUBLIC_NAME, Gatekeeper, Keyring
from ring.core.codec import MAX_FRAME_BYTES, decode, encode
from ring.core.errors import ConfigError, DisaggKDError, PeerLost, RemoteProtocolError, TransportClosed
from ring.core.messages import Message
from ring.endpoints import address_towards, parse_endpoint
from ring.lookup import Lookup, MechanismProbe
from transport.host import DESCRIPTORS_A_LINK, check_descriptors

logger = logging.getLogger(__name__)

#: Control frames queued for one peer; more means that it does not read, and sending to it fails.
MAX_QUEUED_FRAMES = 1024
#: Frames of one peer that this process holds before it reads them.
MAX_UNREAD_FRAMES = 16
#: Longest frame that a teacher sends: a welcome, or a reason.
MAX_ANSWER_BYTES = 64 * 2**10
#: A link to a name that leads nowhere is given up after this, so that the name is looked up again.
LOOK_AGAIN_S = 10.0
#: How long a frame that is already queued may still leave after close(), so that a Goodbye is heard.
LINGER_MS = 200
#: An attempt to connect that takes longer is begun anew.
CONNECT_TIMEOUT_MS = 3_000
#: What encryption adds to a frame: 33 bytes, and some for what may come.
MAX_SEAL_BYTES = 64
#: A peer that has not shown who it is by then is cut off.
HANDSHAKE_LIMIT_MS = 10_000
#: A machine that acknowledges nothing for so long is gone: neither what was sent to it, nor the kernel's own questions.
SILENCE_LIMIT_MS = 12_000
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, NUM_KEEPALIVES = 4, 2, 4
_HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def longest_request_bytes(max_tokens: int) -> int:
    """What a frame to a teacher may take that accepts so many tokens in a request.

    A token takes 4 bytes itself, and where every one is a document and a range of rows of its own 12 more. An offer may
    be longer than a small request."""
    return min(MAX_FRAME_BYTES, 2**20 + 16 * max_tokens)


class ControlLink(Protocol):
    """The student's end of the control plane to one replica."""

    @property
    def name(self) -> str:
        """The endpoint, as the user wrote it."""

    @property
    def connected(self) -> bool:
        """Whether somebody is at the other end, though it may not have said a word yet."""

    def local_host(self) -> str:
        """The address of this machine that the replica reaches it at. Raises TransportError: there is no route."""

    def send(self, message: Message) -> None:
        """Queue a message. Raises PeerLost: the replica takes no more. Raises TransportClosed."""

    def recv(self) -> Message | None:
        """The next message, or None; never blocks. Raises PeerLost, RemoteProtocolError, TransportClosed."""

    def wait_fds(self) -> tuple[int, ...]:
        """Descriptors that become readable when `recv()` may have news, given that it was called until None."""

    def close(self) -> None:
        """Idempotent."""


class ControlPort(Protocol):
    """The teacher's end of the control plane to all its students."""

    @property
    def endpoint(self) -> str:
        """Where students connect, with the real port."""

    def send(self, student: str, message: Message) -> bool:
        """Queue a message. False: the student is gone or does not read."""

    def recv(self) -> tuple[str, Message | RemoteProtocolError] | None:
        """The next (student, message), or None; never blocks. A malformed frame comes as the error it raised."""

    def wait_fds(self) -> tuple[int, ...]:
        """Descriptors that become readable when `recv()` may have news, given that it was called until None."""

    def close(self) -> None:
        """Idempotent."""


class ZmqLink:
    """A DEALER to one replica, with a fresh random identity. It connects whenever the replica appears; once the
    connection breaks the link is over."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        *,
        address: str | None = None,
        keyring: Keyring | None = None,
        teacher_key: bytes = b"",
    ) -> None:
        """With a keyring the link is encrypted, and only the owner of teacher_key can be at its other end.

        address: where the name in the endpoint leads to, None: it is an address itself.
        Raises ConfigError: the endpoint is none. Raises TransportError: too few descriptors are left."""
        self._name = endpoint
        self._address = address or endpoint
        # What a name leads to may change while nobody is there yet.
        self._give_up_at_s = float("inf") if address in (None, endpoint) else time.monotonic() + LOOK_AGAIN_S
        self._keyring = keyring
        check_descriptors(DESCRIPTORS_A_LINK, what=f"the connection to {endpoint}")
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, b"s" + secrets.token_bytes(12))
        _bound_socket(self._socket, self._address, max_frame_bytes=MAX_ANSWER_BYTES)
        if keyring is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, teacher_key)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keyring.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keyring.secret)
        # A replica that is not there yet is tried about once a second, not ten times.
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        # The kernel doubles the time between its attempts: after a minute's cut it would look again a minute later.
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILURES
        )
        self._closed = False
        self._connected = False
        self._end: DisaggKDError | None = None
        self._failure: tuple[int, int] | None = None  # of the handshake: event, its value
        self._probe: MechanismProbe | None = None  # under way once the handshake has failed for no reason that is known
        try:
            self._socket.connect(self._address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"--teacher {endpoint} can't be connected to: {error}") from error

    @property
    def name(self) -> str:
        return self._name

    @property
    def connected(self) -> bool:
        return self._connected

    @property
    def handshake_failed(self) -> bool:
        """Whether it ended before the other side had shown that it is the right one."""
        return self._failure is not None

    def local_host(self) -> str:
        return address_towards(self._address)

    def send(self, message: Message) -> None:
        self._check_open()
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again as error:
            if not self._is_over():  # else `recv` says why, once it has given what came before
                raise PeerLost(f"{self._name}: {MAX_QUEUED_FRAMES} messages wait for it; it does not read") from error

    def recv(self) -> Message | None:
        """As ControlLink's. Raises ConfigError too: only one side has keys, or they don't know each other's."""
        self._check_open()
        message = self._next_message()
        if message is not None:
            return message
        if not self._is_over():
            if time.monotonic() <= self._give_up_at_s:
                return None
            self._end = PeerLost(f"{self._name}: nobody answers at {self._address}; its name is looked up again")
        # Once more: what arrived before the connection broke still counts, though it came since we looked.
        message = self._next_message()
        if message is None and self._end is not None:
            raise self._end
        return message

    def _next_message(self) -> Message | None:
        with contextlib.suppress(zmq.Again):
            return decode(self._socket.recv(zmq.NOBLOCK))
        return None

    def _is_over(self) -> bool:
        if self._end is None and (self._probe is not None or self._disconnected()):
            self._end = self._why_ended()
        return self._end is not None or self._probe is not None

    def _disconnected(self) -> bool:
        for event, value in _events(self._monitor):
            if event == zmq.EVENT_CONNECTED:
                self._connected = True
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._give_up_at_s = float("inf")
            if event & _HANDSHAKE_FAILURES:
                self._failure = event, value
            if event == zmq.EVENT_DISCONNECTED:
                return True
        return False

    def _why_ended(self) -> DisaggKDError | None:
        """None: that is being found out."""
        name, keyring = self._name, self._keyring
        if self._failure is None:
            return PeerLost(f"{name}: the connection was closed by the other side")
        event, value = self._failure
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and keyring is not None:
            return ConfigError(
                f"{name} does not trust this trainer's key {keyring.public.decode()}; allowed: "
                f"{keyring.directory / PUBLIC_NAME} copied into the {PEERS_NAME} of the teacher's --auth"
            )
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and value not in (errno.EPIPE, errno.ECONNRESET):
            return PeerLost(f"{name}: it is there, and has not let this trainer in yet")
        # Whoever notices first that only one side has keys ends the connection, without a word to the other.
        self._probe = self._probe or MechanismProbe(self._address)
        there, here = self._probe.found, "NULL" if keyring is None else "CURVE"
        if there is None:
            return None
        if there in ("NULL", "CURVE") and there != here:
            other, own = ("without", "with") if here == "CURVE" else ("with", "without")
            return ConfigError(f"{name} was started {other} --auth, this trainer {own} it; allowed: both, or neither")
        if keyring is None or there != here:
            return PeerLost(f"{name}: the connection was closed before a teacher answered: is it one?")
        return PeerLost(f"{name}: it does not own a key in {keyring.directory / PEERS_NAME} that was tried")

    def wait_fds(self) -> tuple[int, ...]:
        # While it is found out why the link ended, nobody reads the monitor.
        return () if self._closed or self._probe is not None else (_fd(self._socket), _fd(self._monitor))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=LINGER_MS)

    def _check_open(self) -> None:
        if self._closed:
            raise TransportClosed(f"{self._name}: the link is closed")


class ZmqLinks:
    """Opens links to one replica, each when the last is over. With keys, it tries those of the teachers that are
    trusted one after the other, until the replica turns out to own one."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, *, keyring: Keyring | None = None
    ) -> None:
        """Raises ConfigError: the endpoint is none."""
        self._context, self._endpoint, self._keyring = context, endpoint, keyring
        self._lookup = Lookup(endpoint)
        self._last: ZmqLink | None = None
        self._num_failed = 0

    def __call__(self) -> ZmqLink:
        """Raises ConfigError: no key is trusted. Raises TransportError: the endpoint's name has no address (yet)."""
        address = self._lookup.address()
        if self._keyring is None:
            return ZmqLink(self._context, self._endpoint, address=address)
        teacher_keys = list(self._keyring.peers())
        if self._last is not None and self._last.handshake_failed:
            self._num_failed += 1
            if self._num_failed == len(teacher_keys):
                logger.warning(
                    "%s: no key exchange succeeded, with any key in %s",
                    self._endpoint,
                    self._keyring.directory / PEERS_NAME,
                )
        teacher_key = teacher_keys[self._num_failed % len(teacher_keys)]
        self._last = ZmqLink(
            self._context, self._endpoint, address=address, keyring=self._keyring, teacher_key=teacher_key
        )
        return self._last


class ZmqPort:
    """A ROUTER that students connect to. Students are named by the hex of their identity."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        listen: str,
        *,
        flag: str = "--listen",
        keyring: Keyring | None = None,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        """With a keyring only the owners of the keys that it trusts get in; then the context must be the port's own.

        Raises ConfigError: the address can't be listened on."""
        parse_endpoint(listen, flag=flag)
        self._closed = False
        self._endpoint = listen
        self._said: set[str] = set()
        self._socket = context.socket(zmq.ROUTER)
        _bound_socket(self._socket, listen, max_frame_bytes=max_frame_bytes)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_LIMIT_MS)
        # Without it a frame to a student that left vanishes without a word.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._monitor = self._socket.get_monitor_socket(_HANDSHAKE_FAILURES)
        self._gatekeeper = None if keyring is None else Gatekeeper(context, keyring)
        if self._gatekeeper is not None:
            self._gatekeeper.guard(self._socket)
        try:
            self._socket.bind(listen)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"{flag} {listen} can't be bound: {error}; allowed: a free local port, at an IP address of this machine"
            ) from error
        self._endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def endpoint(self) -> str:
        return self._endpoint

    def send(self, student: str, message: Message) -> bool:
        try:
            self._socket.send_multipart([bytes.fromhex(student), encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def admit(self) -> None:
        """Let in who may come in, and say who did not; `recv` does it too. For when nothing is received yet."""
        if self._gatekeeper is not None:
            self._gatekeeper.answer()
        self._tell_of_strangers()

    def recv(self) -> tuple[str, Message | RemoteProtocolError] | None:
        if self._gatekeeper is not None:
            self._gatekeeper.answer()
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            self._tell_of_strangers()
            return None
        student = frames[0].hex()
        if len(frames) != 2:
            return student, RemoteProtocolError(f"a message of {len(frames) - 1} frames; allowed: 1")
        try:
            return student, decode(frames[1])
        except RemoteProtocolError as error:
            return student, error

    def _tell_of_strangers(self) -> None:
        """Say once of each kind that somebody did not get in. Of a key that is not trusted the gatekeeper speaks."""
        for event, value in _events(self._monitor):
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                continue
            kind = _FAILURE_KINDS.get(value if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL else -1, "it broke off")
            if kind not in self._said:
                self._said.add(kind)
                logger.warning("%s: somebody connected and did not get in: %s", self._endpoint, kind)

    def wait_fds(self) -> tuple[int, ...]:
        if self._closed:
            return ()
        gate = () if self._gatekeeper is None else self._gatekeeper.wait_fds()
        return (_fd(self._socket), _fd(self._monitor), *gate)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._tell_of_strangers()
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=LINGER_MS)
            if self._gatekeeper is not None:
                self._gatekeeper.close()


_FAILURE_KINDS = {
    int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH): "one side was started with --auth, the other without",
    int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC): "it took another key for this teacher's",
}


def _events(monitor: zmq.Socket[bytes]) -> Iterator[tuple[int, int]]:
    """What happened since the last call: (event, its value)."""
    with contextlib.suppress(zmq.Again):
        while True:
            message = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
            yield int(message["event"]), int(message["value"])


def _fd(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))


def _bound_socket(socket: zmq.Socket[bytes], endpoint: str, *, max_frame_bytes: int) -> None:
    """Bounds for what a peer can make this process hold, and for how long a cut link goes unnoticed."""
    # Encryption makes a frame a little longer.
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes + MAX_SEAL_BYTES)
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_FRAMES)
    socket.setsockopt(zmq.RCVHWM, MAX_UNREAD_FRAMES)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    # The kernel looks whether the other machine is there, not zmq: libzmq aborts the process when it is time for a
    # heartbeat, frames of that peer wait to be read, and its connection was reset meanwhile (seen with 4.3.5; ADR 19).
    socket.setsockopt(zmq.HEARTBEAT_IVL, 0)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_INTERVAL_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, NUM_KEEPALIVES)
    socket.setsockopt(zmq.TCP_MAXRT, SILENCE_LIMIT_MS)
    # Only where it is asked for: an IPv4 endpoint would be shown as an IPv6 one.
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
