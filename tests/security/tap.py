"""Somebody in the network: a wire between two peers that passes everything on and keeps a copy."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class Tap:
    """Listens at `endpoint`, and connects on to another one for everybody who comes."""

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._heard: list[bytearray] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def heard(self) -> bytes:
        """Every byte so far, both ways, a direction of a connection after the other."""
        return b"|".join(bytes(one) for one in self._heard)

    def close(self) -> None:
        for one in (self._server, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near = self._server.accept()[0]
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                for source, sink in ((near, far), (far, near)):
                    copy = bytearray()
                    self._heard.append(copy)
                    self._threads.append(threading.Thread(target=_pass_on, args=(source, sink, copy), daemon=True))
                    self._threads[-1].start()


def _pass_on(source: socket.socket, sink: socket.socket, copy: bytearray) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            copy += data
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def tapped(target: str) -> Iterator[Tap]:
    tap = Tap(target)
    try:
        yield tap
    finally:
        tap.close()
