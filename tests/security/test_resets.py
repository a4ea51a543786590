"""A peer that fills the queue of its connection and resets it, while this process is busy elsewhere.

libzmq aborts the process then when a heartbeat of its own falls due (ADR 19). So each side has a process of its own.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.security.strangers import READY, frame, greeting
from tests.system.processes import HANG_GUARD_S, REPOSITORY, environment

#: More than any side holds before it reads.
NUM_FRAMES = 5000
ROUTER_READY = READY.replace(b"\x06DEALER", b"\x06ROUTER")

#: Longer than heartbeats were apart, nothing is read; then all that came is.
BUSY = """
import sys, time
import zmq
from ring.control import ZmqLink, ZmqPort
from ring.core.errors import DisaggKDError

context = zmq.Context()
sys.stdin.readline()
time.sleep(3)
count = 0
"""
PORT = (
    BUSY.replace(
        "sys.stdin",
        "port = ZmqPort(context, 'tcp://127.0.0.1:*')\nprint(port.endpoint, flush=True)\nsys.stdin",
    )
    + """
while port.recv() is not None:
    count += 1
print(count)
port.close()
context.term()
"""
)
LINK = (
    BUSY.replace("sys.stdin", "link = ZmqLink(context, sys.argv[1])\nsys.stdin")
    + """
while True:
    try:
        link.recv()
    except DisaggKDError as error:
        if "closed by the other side" in str(error):
            break
        count += 1
print(count)
link.close()
context.term()
"""
)


@contextmanager
def side(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=REPOSITORY,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def fill_and_reset(peer: socket.socket, ready: bytes) -> None:
    """Greet, send more than is read, and vanish without a word."""
    peer.settimeout(HANG_GUARD_S)
    peer.sendall(greeting(b"NULL") + ready)
    received = b""
    while len(received) < 64 or b"READY" not in received:
        received += peer.recv(4096)
    peer.setblocking(False)
    left = memoryview(frame(0, b"x") * NUM_FRAMES)
    try:
        while left:
            left = left[peer.send(left) :]
    except BlockingIOError:
        pass  # as much as the other side takes
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()


def to_a_port() -> Iterator[subprocess.Popen[str]]:
    with side(PORT) as process:
        assert process.stdout is not None
        host, _, port = process.stdout.readline().strip().removeprefix("tcp://").rpartition(":")
        fill_and_reset(socket.create_connection((host, int(port))), READY)
        yield process


def to_a_link() -> Iterator[subprocess.Popen[str]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(HANG_GUARD_S)
        with side(LINK, f"tcp://127.0.0.1:{server.getsockname()[1]}") as process:
            fill_and_reset(server.accept()[0], ROUTER_READY)
            yield process


@pytest.mark.parametrize("attack", [to_a_port, to_a_link])
def test_a_peer_that_resets_a_full_connection_ends_nobody(
    attack: Callable[[], Iterator[subprocess.Popen[str]]],
) -> None:
    for process in attack():
        output, _ = process.communicate("go\n", timeout=HANG_GUARD_S)
        assert process.returncode == 0, process.returncode
        assert int(output.split()[-1]) > 0, "frames had come before the reset"
