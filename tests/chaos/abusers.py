"""`python -m tests.chaos.abusers KIND ENDPOINT STUDENT_DIR`: peers that a teacher must survive without growing.

`mute` shakes hands as a student, asks for all its slots and never takes a fill, though it goes on answering pings; each
time it is dropped it prints the reason and comes back. `flood` sends frames of all kinds as fast as they are taken, and
reads nothing. Both go on until they are ended.
"""

from __future__ import annotations

import itertools
import secrets
import sys
import time
from contextlib import suppress

import transformers
import zmq

from planner.input_hash import input_hash
from planner.token_map import token_map_hash
from ring.control import ZmqLink
from ring.core import codec
from ring.core.errors import TransportError
from ring.core.messages import FillId, Goodbye, Hello, Ping, Request, TokenRequest, WireDtype
from ring.session import Phase, Session
from transport import registry
from transport.memory import SlotArena

NUM_SLOTS, NUM_TOKENS = 6, 1600
_PING_EVERY_S = 0.3


def hello(student_dir: str) -> Hello:
    token_ids = transformers.AutoTokenizer.from_pretrained(student_dir).get_vocab()
    return Hello(
        run="abuse",
        rank=0,
        world_size=1,
        epoch=secrets.token_hex(8),
        token_map_hash=token_map_hash(token_ids),
        vocab_size=len(token_ids),
        host_id=registry.host_id(),
        backends=("zmq",),
    )


def a_request(seq: int, slot: int) -> Request:
    token_ids = bytes(4 * NUM_TOKENS)
    lengths, ranges = (100,) * (NUM_TOKENS // 100), ((0, NUM_TOKENS),)
    payload = TokenRequest(
        token_ids=token_ids,
        doc_lengths=lengths,
        row_ranges=ranges,
        input_hash=input_hash(token_ids, lengths, ranges),
    )
    return Request(fill=FillId(seq, 0, slot), payload=payload, time_left_s=1000.0)


def be_mute(endpoint: str, student_dir: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    arena: SlotArena | None = None
    said = hello(student_dir)
    for life in itertools.count():
        session = Session(ZmqLink(context, endpoint), said)
        try:
            while session.phase is not Phase.READY:
                if isinstance(answer := session.recv(), Goodbye):
                    raise TransportError(answer.reason)
                session.arrivals()  # takes part in opening its channel
                if session.phase is Phase.WELCOMED:
                    assert session.welcome is not None
                    arena = arena or SlotArena(NUM_SLOTS, NUM_TOKENS * session.welcome.head.hidden_size * 4)
                    session.offer(arena, transport="zmq", wire_dtype=WireDtype.FP32, crc=None, bind_host=None)
                time.sleep(0.01)
            for slot in range(NUM_SLOTS):
                request = a_request(life * NUM_SLOTS + slot, slot)
                session.arm(request.fill, num_bytes=NUM_TOKENS * 16)  # another size: it does not even want them
                session.request(request)
            while True:
                session.ping(life)
                while (message := session.recv()) is not None:
                    if isinstance(message, Goodbye):
                        raise TransportError(message.reason)
                time.sleep(_PING_EVERY_S)
        except TransportError as error:
            print(f"dropped: {error}", flush=True)
        receiver = session.close()
        if receiver is not None:
            receiver.forget()


def flood(endpoint: str, student_dir: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = hello(student_dir)
    frames = [
        codec.encode(Ping(token=1)),
        codec.encode(Goodbye(reason="x" * 4000)),
        codec.encode(a_request(1, 0)),
        codec.encode(Hello(**{**vars(stranger), "token_map_hash": "ab" * 32})),
        b"\x80\x04\x95 this is no message",
        secrets.token_bytes(1 << 16),
        secrets.token_bytes(1 << 20),
        bytes(codec.MAX_FRAME_BYTES),
    ]
    while True:
        sockets = [context.socket(zmq.DEALER) for _ in range(4)]
        for socket in sockets:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 64)
            socket.connect(endpoint)
        until_s = time.monotonic() + 5.0
        while time.monotonic() < until_s:
            for frame in frames:
                for socket in sockets:
                    with suppress(zmq.Again):
                        socket.send(frame, zmq.NOBLOCK)
            time.sleep(0.001)
        for socket in sockets:
            socket.close()


if __name__ == "__main__":
    {"mute": be_mute, "flood": flood}[sys.argv[1]](*sys.argv[2:])
