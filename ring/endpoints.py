"""Addresses of the control plane: what is one, and which of them others than this machine can reach."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import time

from ring.core.errors import ConfigError
from transport.devices import local_host_towards

_ENDPOINT = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:.]+\]|[^:/\s]+):(?P<port>\d{1,5}|\*)")
#: Where the mechanism is in the greeting of zmq's protocol (ZMTP 3).
_MECHANISM = slice(12, 32)


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
    host, _ = parse_endpoint(endpoint, flag="--teacher")
    local = local_host_towards(host.strip("[]"))
    return f"[{local}]" if ":" in local else local


def mechanism_at(endpoint: str) -> str:
    """How a zmq socket at the endpoint wants its peers to prove who they are (NULL: not at all; CURVE: with keys), as
    it says in its greeting to anybody; empty: it did not say within a second."""
    host, port = parse_endpoint(endpoint, flag="--teacher")
    greeting = b""
    with contextlib.suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), timeout=1.0) as probe:
        # As much of our own greeting as makes it say the rest of its own: the signature and the major version.
        probe.sendall(b"\xff" + bytes(8) + b"\x7f\x03")
        until_s = time.monotonic() + 1.0
        while len(greeting) < _MECHANISM.stop and time.monotonic() < until_s:
            received = probe.recv(_MECHANISM.stop - len(greeting))
            if not received:
                break
            greeting += received
    return greeting[_MECHANISM].rstrip(b"\0").decode("ascii", "replace")


def check_exposure(endpoint: str, *, flag: str, auth: bool, insecure: bool) -> None:
    """Refuse an address that others can reach, unless peers prove who they are or the user accepts that nobody has to.

    auth: there are keys. insecure: the user's word. Raises ConfigError."""
    host, _ = parse_endpoint(endpoint, flag=flag)
    if not auth and not insecure and not is_loopback(host):
        raise ConfigError(
            f"{flag} {endpoint} leaves this machine, and the connection is neither authenticated nor encrypted; "
            f"allowed: a loopback address, --auth DIR (made by `disaggkd keys DIR`), or --insecure inside a network "
            f"that you trust"
        )
