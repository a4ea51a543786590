"""The plumbing under the zmq backend: a socket that is watched, bounded and never reconnects, and the malloc settings.

Every link has a zmq context of its own. That gives each student a door keeper of its own (zmq's authentication is per
context), and once a link is closed no thread or descriptor of it is left.

What the settings are for, each seen to matter:
- A reconnect would lose fills silently, so there is none: a broken link is PeerLost, and the control plane makes a new
  one. zmq's heartbeats stay off: a link whose student does not read for longer than their timeout is cut by them, data
  and all, since nobody reads the answers to the pings. TCP keepalive ends idle links to vanished hosts; everything else
  about liveness is the control plane's.
- The listener must stay: unbinding it closes the connections that it accepted.
- High-water marks count messages, so they are small and MAXMSGSIZE is set: together they bound memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hmac
import ipaddress
import math
import secrets
import select
import socket as sockets
import struct
import time
import weakref
from collections.abc import Iterator

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from ring.core.errors import ConfigError, DeadlineExceeded, RemoteProtocolError, TransportError
from ring.core.messages import Description
from transport.host import DESCRIPTORS_A_LINK, check_descriptors, descriptors_for, remedy
from transport.wakeup import Wakeup
from transport.zap import Knock, ZapHandler

MAGIC = b"dkd1"
#: The messages. Both sides greet, with the same words.
GREETING = struct.Struct("<4sQQ")  # magic, slots, bytes a slot
ANNOUNCE = struct.Struct("<cQqQQQ")  # kind, ticket, seq, attempt, slot, bytes; the header follows
CHUNK = struct.Struct("<cQQ")  # kind, ticket, index; the payload is the next frame
ACK = struct.Struct("<Q")  # ticket
KIND_ANNOUNCE, KIND_CHUNK = b"F", b"C"
#: Payload travels in frames of at most this: a larger frame is slower to receive (fresh pages for every one).
CHUNK_BYTES = 1 << 20
#: Whole chunks that zmq may hold on each side of a link.
SEND_QUEUE_CHUNKS = 8
RECEIVE_QUEUE_CHUNKS = 8
#: Any frame that is no payload is smaller than this.
MAX_META_BYTES = 2048

_USER = b"disaggkd"
#: A connection that has not shown its credentials by then is cut off.
HANDSHAKE_LIMIT_MS = 10_000
_LIFE_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


class Link:
    """A DEALER socket, its monitor, and one descriptor that becomes readable when either has news."""

    def __init__(self) -> None:
        check_descriptors(DESCRIPTORS_A_LINK, what="a link of zmq")
        self._context = zmq.Context(io_threads=1)
        self._sockets: list[zmq.Socket[bytes]] = []
        with contextlib.ExitStack() as opened, descriptors_for("a link of zmq"):
            self._wakeup = opened.enter_context(contextlib.closing(Wakeup()))
            self._news = opened.enter_context(select.epoll())
            self._news.register(self._wakeup, select.EPOLLIN)
            opened.pop_all()
        # A context whose sockets are still open would block its garbage collection, and the exit of the process.
        self._dispose = weakref.finalize(self, _dispose, self._context, self._sockets, self._wakeup, self._news)
        try:
            self.socket = self.make_socket(zmq.DEALER)
            self._configure(self.socket)
            with _sockets_for("a link's monitor"):
                self._monitor = self.socket.get_monitor_socket(_LIFE_EVENTS)
            self._watch(self._monitor)
        except BaseException:
            self.close()
            raise

    def make_socket(self, kind: int) -> zmq.Socket[bytes]:
        """Another socket whose messages count as news and that is closed with the link."""
        with _sockets_for("a link"):
            socket = self._context.socket(kind)
        self._watch(socket)
        return socket

    def _watch(self, socket: zmq.Socket[bytes]) -> None:
        self._sockets.append(socket)
        self._news.register(int(socket.getsockopt(zmq.FD)), select.EPOLLIN)

    def fileno(self) -> int:
        return self._news.fileno()

    def life_events(self) -> Iterator[tuple[zmq.Event, int]]:
        """What happened to the link's connections since the last call: (event, its connection or error)."""
        while has_messages(self._monitor):
            message = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            yield zmq.Event(message["event"]), int(message["value"])

    def settle(self, *, wants_room: bool = False, has_news: bool = False) -> None:
        """Call at the end of everything that touched a socket: zmq's own descriptors say only that something changed,
        once, so what is still to be done keeps `fileno()` readable from here."""
        if (
            has_news
            or any(has_messages(socket) for socket in self._sockets)
            or (wants_room and bool(_events(self.socket) & zmq.POLLOUT))
        ):
            self._wakeup.set()
        else:
            self._wakeup.clear()

    def close(self) -> None:
        """Drop what was not sent and end the context's threads. Idempotent."""
        self._dispose()

    @staticmethod
    def _configure(socket: zmq.Socket[bytes]) -> None:
        for option, value in {
            zmq.LINGER: 0,
            zmq.SNDHWM: SEND_QUEUE_CHUNKS,
            zmq.RCVHWM: RECEIVE_QUEUE_CHUNKS,
            zmq.MAXMSGSIZE: CHUNK_BYTES + MAX_META_BYTES,
            zmq.RECONNECT_IVL: -1,
            zmq.IMMEDIATE: 1,
            zmq.TCP_KEEPALIVE: 1,
            zmq.TCP_KEEPALIVE_IDLE: 20,
            zmq.TCP_KEEPALIVE_INTVL: 5,
            zmq.TCP_KEEPALIVE_CNT: 4,
        }.items():
            socket.setsockopt(option, value)


def _dispose(
    context: zmq.Context[zmq.Socket[bytes]], sockets: list[zmq.Socket[bytes]], wakeup: Wakeup, news: select.epoll
) -> None:
    news.close()
    wakeup.close()
    for socket in sockets:
        socket.close(linger=0)
    context.term()


def has_messages(socket: zmq.Socket[bytes]) -> bool:
    return bool(_events(socket) & zmq.POLLIN)


def _events(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.EVENTS))


def _sent(socket: zmq.Socket[bytes], message: bytes) -> bool:
    """Whether the socket took it. A blocking send would wait for ever once the only connection is gone."""
    try:
        # The look at the events makes zmq take notice of a connection that is new; a send alone may be too early.
        if _events(socket) & zmq.POLLOUT:
            socket.send(message, zmq.NOBLOCK)
            return True
    except zmq.Again:
        pass  # it went between the look and the send
    return False


class DoorKeeper:
    """Lets exactly one connection with the credentials of `invitation` into a listening link; others never get as far
    as a message."""

    def __init__(self, link: Link, *, encrypt: bool) -> None:
        """encrypt: the credentials are a pair of keys and not a token, and the link is encrypted."""
        self._admitted = False
        self._handler = ZapHandler(link.make_socket(zmq.ROUTER), self._admits)
        if encrypt:
            server_key, server_secret = zmq.curve_keypair()
            key, secret = zmq.curve_keypair()
            self._credentials = (b"CURVE", z85.decode(key))
            #: What the teacher needs, for the OFFER: its own key is made here, as only the OFFER can bring it there.
            self.invitation: Description = {"server_key": server_key, "secret": secret}
            link.socket.setsockopt(zmq.CURVE_SERVER, 1)
            link.socket.setsockopt(zmq.CURVE_SECRETKEY, server_secret)
        else:
            token = secrets.token_hex(32).encode()
            self._credentials = (b"PLAIN", _USER + b"\0" + token)
            self.invitation = {"token": token}
            link.socket.setsockopt(zmq.PLAIN_SERVER, 1)
        ZapHandler.guard(link.socket)
        link.socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_LIMIT_MS)

    def answer(self) -> None:
        """Decide about whoever knocked since the last call."""
        self._handler.answer()

    def _admits(self, knock: Knock) -> bool:
        mechanism, credentials = self._credentials
        is_right = knock.mechanism == mechanism and hmac.compare_digest(b"\0".join(knock.credentials), credentials)
        welcome = is_right and not self._admitted
        self._admitted = self._admitted or welcome
        return welcome


def show_credentials(link: Link, invitation: Description) -> None:
    """Have the link connect with what a door keeper's invitation gave.

    Raises RemoteProtocolError: the invitation makes no sense."""
    token, server_key, secret = (invitation.get(name) for name in ("token", "server_key", "secret"))
    try:
        if isinstance(server_key, bytes) and isinstance(secret, bytes):
            link.socket.setsockopt(zmq.CURVE_SERVERKEY, server_key)
            link.socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))
            link.socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        elif isinstance(token, bytes):
            link.socket.setsockopt(zmq.PLAIN_USERNAME, _USER)
            link.socket.setsockopt(zmq.PLAIN_PASSWORD, token)
        else:
            raise RemoteProtocolError(
                f"zmq is described by an endpoint and a token or keys; got the keys {sorted(invitation)}"
            )
    except (zmq.ZMQError, ValueError, OSError) as error:
        raise RemoteProtocolError(f"zmq: a token or key that is none: {error}") from error


@contextlib.contextmanager
def _sockets_for(what: str) -> Iterator[None]:
    """Raises TransportError: zmq gave none."""
    try:
        yield
    except zmq.ZMQError as error:
        raise TransportError(f"zmq: no socket for {what}: {error}{remedy(error)}") from error


def bind(link: Link, bind_host: str) -> str:
    """Listen on a free port of that address; returns the endpoint for the peer.

    Raises ConfigError: it can't. Raises TransportError: no descriptor is left."""
    try:
        found = sockets.getaddrinfo(bind_host, None, type=sockets.SOCK_STREAM)
        address = ipaddress.ip_address(found[0][4][0])
        if address.is_unspecified:
            raise ConfigError(f"zmq: {bind_host!r} is every address; give the one that the teacher can reach")
        # Only where needed: with it zmq would name IPv4 addresses in their IPv6 form.
        link.socket.setsockopt(zmq.IPV6, address.version == 6)
        link.socket.bind(f"tcp://[{address}]:*" if address.version == 6 else f"tcp://{address}:*")
    except (OSError, ValueError, zmq.ZMQError) as error:
        if remedy(error):
            raise TransportError(f"zmq: can't listen on {bind_host!r}: {error}{remedy(error)}") from error
        raise ConfigError(f"zmq: can't listen on {bind_host!r}: {error}") from error
    return link.socket.getsockopt_string(zmq.LAST_ENDPOINT)


def connect(link: Link, endpoint: str, invitation: Description, greeting: bytes, *, timeout_s: float) -> None:
    """Returns once the student let us in and greeted us in the same words.

    Raises RemoteProtocolError: no endpoint, or another greeting. Raises TransportError, DeadlineExceeded."""
    deadline_s = time.monotonic() + timeout_s
    show_credentials(link, invitation)
    try:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        link.socket.setsockopt(zmq.IPV6, ipaddress.ip_address(host.strip("[]")).version == 6)
        if not 0 < int(port) < 1 << 16:
            raise ValueError(f"no such port: {port}")
        link.socket.connect(endpoint)
    except (ValueError, zmq.ZMQError) as error:
        raise RemoteProtocolError(f"zmq: {endpoint!r} is no endpoint: {error}") from error
    poller = zmq.Poller()
    poller.register(link.fileno(), zmq.POLLIN)
    must_greet = False
    while True:
        for event, _ in link.life_events():
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                must_greet = True
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise TransportError(f"zmq: {endpoint} turned us away: wrong token or key, or it has a teacher already")
            else:
                raise TransportError(f"zmq: can't connect to {endpoint}: {event.name}")
        must_greet = must_greet and not _sent(link.socket, greeting)
        try:
            answer = link.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            link.settle(wants_room=must_greet)
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise DeadlineExceeded(f"zmq: {endpoint} did not greet us within {timeout_s} s") from None
            poller.poll(math.ceil(left_s * 1e3))
            continue
        if answer != greeting:
            raise RemoteProtocolError(
                f"zmq: expected the greeting {greeting.hex()} of the slots that were offered, got {answer[:64].hex()}"
            )
        return


@functools.cache
def tune_malloc() -> bool:
    """Keep the memory of received chunks in this process instead of handing it back to the kernel after each.

    Without it glibc maps fresh pages for every chunk, which costs up to a quarter of the throughput. Allocations of
    four chunks or more keep their own mappings, and at most 64 MiB of free memory are held back.
    Returns False where the C library has no such settings."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    # Both are tried: each helps without the other.
    results = [mallopt(_M_MMAP_THRESHOLD, 4 * CHUNK_BYTES), mallopt(_M_TRIM_THRESHOLD, 64 * CHUNK_BYTES)]
    return all(result == 1 for result in results)
