"""`student.train` on a damaged line: `python -m tests.system.flipping_student EVERY FROM FILE [FLAGS]`.

The teacher reaches the trainer's data endpoint through a real TCP connection that a thread of this process relays. In
every EVERY-th large frame from the FROM-th on one bit of the payload is flipped, as bad memory in a switch would do,
which TCP's own checksum can't see. FILE gets a byte for each.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from typing import BinaryIO

from transport.zmq_tcp import ZmqReceiver

#: Frames above it carry states, not what is said about them.
LARGE_BYTES = 1500


class Line:
    """Relays one connection; flips bits on the way from the teacher to the trainer."""

    def __init__(self, *, every: int, first: int, note_file: str) -> None:
        self._every, self._first = every, first
        self._num_large = 0
        self._notes = os.open(note_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._lock = threading.Lock()

    def lay(self, endpoint: str) -> str:
        """The endpoint that leads to `endpoint`, for one connection."""
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, args=(listener, host, int(port)), daemon=True).start()
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"

    def _serve(self, listener: socket.socket, host: str, port: int) -> None:
        with listener:
            teacher, _ = listener.accept()
        trainer = socket.create_connection((host, port))
        threading.Thread(target=self._relay_back, args=(trainer, teacher), daemon=True).start()
        with teacher, trainer, teacher.makefile("rb") as stream:
            try:
                for _ in range(64):  # ZMTP's greeting, of which each side waits for the other's first half
                    trainer.sendall(stream.read(1))
                while head := stream.read(1):
                    self._relay_frame(head, stream, trainer)
            except OSError:
                pass  # either side went away: so does the line

    def _relay_frame(self, head: bytes, stream: BinaryIO, trainer: socket.socket) -> None:
        size = stream.read(8 if head[0] & 2 else 1)
        body = bytearray(stream.read(int.from_bytes(size)))
        if len(body) >= LARGE_BYTES and self._is_struck():
            body[len(body) // 2 & ~3 | 2] ^= 0x20  # of a float32: in its mantissa, so that the damage is no NaN
        trainer.sendall(head + size + body)

    def _is_struck(self) -> bool:
        with self._lock:
            self._num_large += 1
            struck = self._num_large >= self._first and (self._num_large - self._first) % self._every == 0
        if struck:
            os.write(self._notes, b"x")
        return struck

    def _relay_back(self, trainer: socket.socket, teacher: socket.socket) -> None:
        try:
            while received := trainer.recv(65536):
                teacher.sendall(received)
            teacher.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


if __name__ == "__main__":
    from student.train.__main__ import main

    line = Line(every=int(sys.argv[1]), first=int(sys.argv[2]), note_file=sys.argv[3])
    describe = ZmqReceiver.describe

    def through_the_line(receiver: ZmqReceiver) -> dict[str, str | int | bytes]:
        told = dict(describe(receiver))
        return told | {"endpoint": line.lay(str(told["endpoint"]))}

    ZmqReceiver.describe = through_the_line  # type: ignore[method-assign]
    sys.exit(main(sys.argv[4:]))
