"""The control plane: ZeroMQ links that carry `ring.core.messages`, and the same links within a process.

A `ControlLink` is the student's end to one replica, a `ControlPort` the teacher's end to all its students. A link lives
for one connection: when it breaks it is closed, and the next one starts with a fresh identity and a new handshake, so
no message of a former life can be taken for one of the present. Nothing here knows what the messages mean.

Threads: one thread owns a link or port; `close()` of a ZeroMQ socket belongs to that thread too.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import secrets
import socket
import threading
from collections import deque
from typing import Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from ring.core.codec import MAX_FRAME_BYTES, decode, encode
from ring.core.errors import ConfigError, PeerLost, RemoteProtocolError, TransportClosed, TransportError
from ring.core.messages import Message

#: Control frames queued for one peer; more means that it does not read, and sending to it fails.
MAX_QUEUED_FRAMES = 1024
#: Frames of one peer that this process holds before it reads them: of the largest kind they take a gibibyte.
MAX_UNREAD_FRAMES = 64
#: How long a frame that is already queued may still leave after close(), so that a Goodbye is heard.
LINGER_MS = 200
_ENDPOINT = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:.]+\]|[^:/\s]+):(?P<port>\d{1,5}|\*)")


class ControlLink(Protocol):
    """The student's end of the control plane to one replica."""

    @property
    def name(self) -> str:
        """The endpoint, as the user wrote it."""

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


def parse_endpoint(endpoint: str, *, flag: str) -> tuple[str, str]:
    """(host, port) of a tcp endpoint; the port may be `*`. Raises ConfigError naming `flag`."""
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or (match["port"] != "*" and not 0 < int(match["port"]) < 65536):
        raise ConfigError(
            f"{flag} {endpoint!r} is not an endpoint; allowed: tcp://HOST:PORT, e.g. tcp://127.0.0.1:5555"
        )
    return match["host"], match["port"]


def is_loopback(host: str) -> bool:
    """Whether nothing outside this machine can reach `host`. A name other than localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def address_towards(endpoint: str) -> str:
    """The local address from which this machine sends to the endpoint. Raises TransportError: there is no route."""
    host, port = parse_endpoint(endpoint, flag="--teacher")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        # Connecting a datagram socket sends nothing; it only asks the routing table.
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            local = str(probe.getsockname()[0])
    except OSError as error:
        raise TransportError(f"{endpoint}: no route to it: {error}") from error
    return f"[{local}]" if ":" in local else local


def check_exposure(endpoint: str, *, flag: str, insecure: bool) -> None:
    """Refuse an address that others can reach unless the user accepts that nothing is authenticated or encrypted.

    Raises ConfigError."""
    host, _ = parse_endpoint(endpoint, flag=flag)
    if not insecure and not is_loopback(host):
        raise ConfigError(
            f"{flag} {endpoint} leaves this machine, and the connection is neither authenticated nor encrypted; "
            f"allowed: a loopback address, or --insecure inside a network that you trust"
        )


class ZmqLink:
    """A DEALER to one replica, with a fresh random identity. It connects whenever the replica appears; once the
    connection breaks the link is over."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self._name = endpoint
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, b"s" + secrets.token_bytes(12))
        _bound_socket(self._socket, endpoint)
        # A replica that is not there yet is tried about once a second, not ten times.
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._closed = False
        self._lost = False
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"--teacher {endpoint} can't be connected to: {error}") from error

    @property
    def name(self) -> str:
        return self._name

    def local_host(self) -> str:
        return address_towards(self._name)

    def send(self, message: Message) -> None:
        self._check_open()
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again as error:
            raise PeerLost(f"{self._name}: {MAX_QUEUED_FRAMES} messages wait for it; it does not read") from error

    def recv(self) -> Message | None:
        self._check_open()
        try:
            return decode(self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            # Only now: what arrived before the connection broke still counts.
            if self._lost or self._disconnected():
                self._lost = True
                raise PeerLost(f"{self._name}: the connection was closed by the other side") from None
            return None

    def _disconnected(self) -> bool:
        with contextlib.suppress(zmq.Again):
            while True:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
                if event["event"] == zmq.EVENT_DISCONNECTED:
                    return True
        return False

    def wait_fds(self) -> tuple[int, ...]:
        if self._closed:
            return ()
        return (_fd(self._socket), _fd(self._monitor))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=LINGER_MS)

    def _check_open(self) -> None:
        if self._closed:
            raise TransportClosed(f"{self._name}: the link is closed")


class ZmqPort:
    """A ROUTER that students connect to. Students are named by the hex of their identity."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], listen: str, *, flag: str = "--listen") -> None:
        parse_endpoint(listen, flag=flag)
        self._socket = context.socket(zmq.ROUTER)
        _bound_socket(self._socket, listen)
        # Without it a frame to a student that left vanishes without a word.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._closed = False
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

    def recv(self) -> tuple[str, Message | RemoteProtocolError] | None:
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        student = frames[0].hex()
        if len(frames) != 2:
            return student, RemoteProtocolError(f"a message of {len(frames) - 1} frames; allowed: 1")
        try:
            return student, decode(frames[1])
        except RemoteProtocolError as error:
            return student, error

    def wait_fds(self) -> tuple[int, ...]:
        return () if self._closed else (_fd(self._socket),)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._socket.close(linger=LINGER_MS)


def _fd(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))


def _bound_socket(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Bounds for what a peer can make this process hold. Heartbeats notice a cut link that TCP would not."""
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_FRAMES)
    socket.setsockopt(zmq.RCVHWM, MAX_UNREAD_FRAMES)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10000)
    # Only where it is asked for: an IPv4 endpoint would be shown as an IPv6 one.
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))


class Mailbox:
    """A queue between two threads of one process with a descriptor to wait on. Frames are encoded as on the network,
    so that the in-process path can't accept what the wire would refuse."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def push(self, message: Message) -> bool:
        with self._lock:
            if self._closed:
                return False
            self._frames.append(encode(message))
            os.eventfd_write(self._event_fd, 1)
        return True

    def pop(self) -> Message | None:
        """The next message or None. Raises PeerLost: closed, and everything was read."""
        with self._lock:
            if self._frames:
                return decode(self._frames.popleft())
            if self._closed:
                raise PeerLost("the other side of this process's link closed it")
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._event_fd)
            return None

    def fd(self) -> tuple[int, ...]:
        with self._lock:
            return () if self._closed else (self._event_fd,)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._event_fd)


class LocalLink:
    """The student's end of a link within the process (the colocated layout)."""

    def __init__(self, inbox: Mailbox, outbox: Mailbox) -> None:
        self._inbox, self._outbox = inbox, outbox

    @property
    def name(self) -> str:
        return "local"

    def local_host(self) -> str:
        return "127.0.0.1"

    def send(self, message: Message) -> None:
        if not self._outbox.push(message):
            raise PeerLost("local: the teacher of this process is closed")

    def recv(self) -> Message | None:
        return self._inbox.pop()

    def wait_fds(self) -> tuple[int, ...]:
        return self._inbox.fd()

    def close(self) -> None:
        self._inbox.close()
        self._outbox.close()


class LocalPort:
    """The teacher's end of a link within the process; it has one student."""

    STUDENT = "local"

    def __init__(self, inbox: Mailbox, outbox: Mailbox) -> None:
        self._inbox, self._outbox = inbox, outbox

    @property
    def endpoint(self) -> str:
        return "local"

    def send(self, student: str, message: Message) -> bool:
        return self._outbox.push(message)

    def recv(self) -> tuple[str, Message | RemoteProtocolError] | None:
        try:
            message = self._inbox.pop()
        except PeerLost:
            return None
        return None if message is None else (self.STUDENT, message)

    def wait_fds(self) -> tuple[int, ...]:
        return self._inbox.fd()

    def close(self) -> None:
        self._inbox.close()
        self._outbox.close()


def local_pair() -> tuple[LocalLink, LocalPort]:
    """Both ends of a control plane within this process."""
    to_teacher, to_student = Mailbox(), Mailbox()
    return LocalLink(to_student, to_teacher), LocalPort(to_teacher, to_student)
