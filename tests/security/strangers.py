"""Strangers at a port: everything that somebody without manners can send to a listening socket of ours.

`Stranger(endpoint, seed).knock()` is one visit, of a kind and with bytes that the seed decides. Run as a module it
goes on for as long as it is told; then it says what it did, and what the seed was.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable

import zmq

from ring.core import codec
from ring.core.config import MAX_SECONDS, MAX_SLOTS
from ring.core.messages import (
    Cancel,
    FillId,
    Goodbye,
    HeadRequest,
    Hello,
    Message,
    Offer,
    Ping,
    Pong,
    Request,
    TokenRequest,
    WireDtype,
)

#: A visit waits no longer than this for an answer: most get none.
PATIENCE_S = 0.05
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
COMMAND, LONG, MORE = 4, 2, 1


def greeting(mechanism: bytes, *, as_server: bool = False, minor: int = 1) -> bytes:
    return SIGNATURE + bytes([3, minor]) + mechanism.ljust(20, b"\0") + bytes([as_server]) + bytes(31)


def frame(flags: int, body: bytes, *, claimed: int | None = None) -> bytes:
    """A frame of zmq's protocol; claimed: the length that it says it has."""
    size = len(body) if claimed is None else claimed
    head = bytes([flags | LONG]) + struct.pack(">Q", size) if size > 255 else bytes([flags, size])
    return head + body


READY = frame(COMMAND, b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00")


class Stranger:
    """One source of trouble."""

    def __init__(self, endpoint: str, seed: int) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._endpoint, self._address = endpoint, (host, int(port))
        self._rng = random.Random(seed)
        self._held: list[socket.socket] = []
        #: How many visits of each kind there were, and the most bytes that one got back.
        self.visits: Counter[str] = Counter()
        self.most_received = 0
        self._kinds: tuple[Callable[[], None], ...] = (
            self.garbage,
            self.other_protocol,
            self.cut_greeting,
            self.other_mechanism,
            self.huge_claims,
            self.bent_commands,
            self.many_small_frames,
            self.loiters,
            self.resets,
            self.bent_messages,
            self.messages_out_of_order,
            self.pickles,
        )

    def knock(self) -> None:
        """One visit; returns when it is over."""
        kind = self._rng.choice(self._kinds)
        self.visits[kind.__name__] += 1
        with contextlib.suppress(OSError, zmq.ZMQError):  # shown the door, as it should be
            kind()

    def leave(self) -> None:
        """Whoever still stands about goes."""
        for one in self._held:
            one.close()
        self._held.clear()

    # ---- over a bare socket

    def garbage(self) -> None:
        self._say(self._rng.randbytes(self._rng.choice((1, 9, 10, 11, 63, 64, 65, 1000, 100_000))))

    def other_protocol(self) -> None:
        self._say(
            self._rng.choice((b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"SSH-2.0-x\r\n", b"\n"))
        )

    def cut_greeting(self) -> None:
        whole = greeting(self._rng.choice((b"NULL", b"CURVE", b"PLAIN"))) + READY
        self._say(whole[: self._rng.randrange(len(whole))])

    def other_mechanism(self) -> None:
        name = self._rng.choice((b"NULL", b"PLAIN", b"GSSAPI", b"CURVE", self._rng.randbytes(20), b"\xff" * 20))
        commands = (b"\x05HELLO" + bytes(194), b"\x08INITIATE" + self._rng.randbytes(300), b"\x05ERROR\x03400")
        self._say(
            greeting(name, as_server=self._rng.random() < 0.5, minor=self._rng.randrange(256))
            + frame(COMMAND, self._rng.choice(commands))
        )

    def huge_claims(self) -> None:
        claimed = self._rng.choice((2**20, 2**24 + 1, 2**32, 2**33, 2**62, 2**63 - 1, 2**64 - 1))
        flags = self._rng.choice((0, MORE, COMMAND))
        start = greeting(b"NULL") + (READY if self._rng.random() < 0.7 else b"")
        self._say(start + frame(flags, self._rng.randbytes(self._rng.choice((0, 1, 65536))), claimed=claimed))

    def bent_commands(self) -> None:
        name = self._rng.choice((b"READY", b"PING", b"PONG", b"SUBSCRIBE", b"MESSAGE", b"JOIN"))
        body = bytes([self._rng.choice((len(name), 0, 255))]) + name + self._rng.randbytes(self._rng.randrange(300))
        self._say(greeting(b"NULL") + READY + frame(COMMAND | self._rng.choice((0, MORE, 0xF8)), body))

    def many_small_frames(self) -> None:
        more = MORE if self._rng.random() < 0.5 else 0
        self._say(greeting(b"NULL") + READY + frame(more, b"") * self._rng.randrange(1, 5000))

    def loiters(self) -> None:
        """Says a little, and stays."""
        connection = socket.create_connection(self._address, timeout=PATIENCE_S)
        self._held.append(connection)
        connection.sendall(greeting(b"NULL")[: self._rng.randrange(64)])
        if len(self._held) > 100:
            self._held.pop(0).close()

    def resets(self) -> None:
        with socket.create_connection(self._address, timeout=PATIENCE_S) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(greeting(b"NULL") + READY + frame(0, bytes(100))[: self._rng.randrange(100)])

    def _say(self, words: bytes) -> None:
        with socket.create_connection(self._address, timeout=PATIENCE_S) as connection:
            received = 0
            with contextlib.suppress(OSError):
                connection.sendall(words)
                while data := connection.recv(65536):
                    received += len(data)
            self.most_received = max(self.most_received, received)

    # ---- over zmq, without keys

    def bent_messages(self) -> None:
        data = bytearray(codec.encode(self._message()))
        for _ in range(self._rng.randrange(1, 4)):
            place = self._rng.randrange(len(data))
            match self._rng.randrange(3):
                case 0:
                    data[place] = self._rng.randrange(256)
                case 1:
                    del data[place : place + self._rng.randrange(1, 9)]
                case _:
                    data[place:place] = self._rng.randbytes(self._rng.randrange(1, 9))
            data = data or bytearray(1)
        self._send([bytes(data)])

    def messages_out_of_order(self) -> None:
        self._send(*([codec.encode(self._message())] for _ in range(self._rng.randrange(1, 9))))

    def pickles(self) -> None:
        data = pickle.dumps({"t": "hello", "v": 1}, protocol=self._rng.randrange(6))
        self._send([data], [data, data], [b"", data])

    def _send(self, *messages: list[bytes]) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as link:
            link.setsockopt(zmq.LINGER, 0)
            link.setsockopt(zmq.IDENTITY, self._rng.choice((b"x", b"same", self._rng.randbytes(13), b"\xff" * 255)))
            link.connect(self._endpoint)
            for message in messages:  # zmq.Again: it was shown the door before it had said all
                link.send_multipart(message, zmq.NOBLOCK)
            received = 0
            while link.poll(PATIENCE_S * 1e3):
                received += sum(map(len, link.recv_multipart()))
            self.most_received = max(self.most_received, received)

    def _message(self) -> Message:
        fill = FillId(self._rng.randrange(-(2**53), 2**53), self._rng.randrange(2**31), self._rng.randrange(MAX_SLOTS))
        tokens = TokenRequest(
            token_ids=self._rng.randbytes(4 * 8), doc_lengths=(3, 5), row_ranges=((1, 8),), input_hash=bytes(16)
        )
        head = HeadRequest(vocab_start=0, vocab_end=2**31 - 1, offset=2**48, num_bytes=2**48, input_hash=b"")
        hello = Hello(
            run="\x1b[2J", rank=0, world_size=1, epoch="e", token_map_hash="h", vocab_size=2**31 - 1, host_id="m",
            backends=("zmq", "shm", "local", "../x"),
        )  # fmt: skip
        offer = Offer(
            backend=self._rng.choice(("zmq", "shm", "ucx", "local", "no such")),
            description={
                "endpoint": "tcp://127.0.0.1:1",
                "path": "/dev/null",
                "token": bytes(32),
                "address": bytes(99),
            },
            num_slots=MAX_SLOTS,
            slot_bytes=2**48,
            wire_dtype=WireDtype.FP64,
            crc=True,
        )
        requests = [Request(fill=fill, payload=payload, time_left_s=MAX_SECONDS) for payload in (tokens, head)]
        return self._rng.choice(
            [*requests, hello, offer, Cancel(fill=fill), Ping(token=2**48), Pong(token=0), Goodbye(reason="\n" * 4096)]
        )
