"""What has to be asked of the network beside the pump's thread, so that a slow answer holds up no replica but its own:
addresses of host names, and how a teacher wants to be spoken to."""

from __future__ import annotations

import socket
import threading

from ring.core.errors import TransportError
from ring.endpoints import is_loopback, mechanism_at, parse_endpoint

#: A name server that answers as they mostly do is waited for; the pump's other replicas can spare that.
PATIENCE_S = 0.05


class Lookup:
    """Of one endpoint. Not thread-safe: the pump's thread owns it."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._host, self._port = parse_endpoint(endpoint, flag="--teacher")
        self.is_needed = not (is_loopback(self._host) or _is_address(self._host))
        self._thread: threading.Thread | None = None
        self._found: str | OSError = ""

    def address(self) -> str:
        """The endpoint, with an address in place of its name. The next call looks again: names move.

        Raises TransportError: the name is not known, or not yet; ask again later."""
        if not self.is_needed:
            return self._endpoint
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="ring-lookup", daemon=True)
            self._thread.start()
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            raise TransportError(f"{self._endpoint}: the address of {self._host} is still being looked up")
        self._thread = None
        if isinstance(self._found, OSError):
            raise TransportError(f"{self._endpoint}: no address of {self._host}: {self._found.strerror}")
        return self._found

    def _look(self) -> None:
        try:
            known = socket.getaddrinfo(self._host, int(self._port), type=socket.SOCK_STREAM)
        except ValueError:  # what no name server can be asked for
            self._found = OSError(0, "it is no host and port")
        except OSError as error:
            self._found = error
        else:
            # IPv4 first, as zmq itself takes them.
            family, _, _, _, address = min(known, key=lambda entry: entry[0] != socket.AF_INET)
            host = str(address[0])
            self._found = f"tcp://{host if family == socket.AF_INET else f'[{host}]'}:{self._port}"


class MechanismProbe:
    """How the zmq socket at an endpoint wants its peers to prove who they are. Construction begins to ask it."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._found: str | None = None
        thread = threading.Thread(target=self._ask, name="ring-probe", daemon=True)
        thread.start()
        thread.join(PATIENCE_S)

    @property
    def found(self) -> str | None:
        """As `mechanism_at` says it; None: it has not answered yet."""
        return self._found

    def _ask(self) -> None:
        found = ""
        try:
            found = mechanism_at(self._endpoint)
        finally:  # whatever happened: the link must come to its end
            self._found = found


def _is_address(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host.strip("[]").partition("%")[0])
        except OSError:
            continue
        return True
    return False
