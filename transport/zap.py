"""The answers to zmq's question whether a peer may connect (its authentication protocol, ZAP).

zmq asks once a peer has shown its credentials and before a message of it is read, and asks per context: whoever owns a
socket that others connect to owns its handler as well, and answers in its own thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import zmq

ENDPOINT = "inproc://zeromq.zap.01"
_DOMAIN = b"disaggkd"
#: Knocks that are answered in a row: however many strangers there are, the owner's other work has its turn.
KNOCKS_A_CALL = 16


@dataclass(frozen=True, kw_only=True)
class Knock:
    """A peer that wants to be let in. address: where it comes from. credentials: of PLAIN name and password, of CURVE
    its public key (32 bytes), which it has proven to have the secret of."""

    address: str
    mechanism: bytes
    credentials: tuple[bytes, ...]


class ZapHandler:
    """Answers for all listening sockets of one context; `socket` (a ROUTER) is its own, and is closed by the caller."""

    def __init__(self, socket: zmq.Socket[bytes], admits: Callable[[Knock], bool]) -> None:
        self._socket = socket
        self._admits = admits
        socket.bind(ENDPOINT)

    @staticmethod
    def guard(socket: zmq.Socket[bytes]) -> None:
        """Have zmq ask before it lets anybody in at this listening socket, and let nobody in when nobody answers."""
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def answer(self) -> bool:
        """Decide about those that knocked first since the last call; returns whether there may be more."""
        for _ in range(KNOCKS_A_CALL):
            if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return False
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
            sender, empty, version, request, _, address, _, mechanism, *credentials = frames
            knock = Knock(address=address.decode(errors="replace"), mechanism=mechanism, credentials=tuple(credentials))
            status = [b"200", b"", b"peer", b""] if self._admits(knock) else [b"400", b"", b"", b""]
            self._socket.send_multipart([sender, empty, version, request, *status])
        return True
