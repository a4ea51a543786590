"""A cable between two network namespaces: a process that hands packets on as slowly and as badly as it is told.

It makes the namespaces itself, with a TUN device and a loopback in each, and forwards between the devices. So a test
needs neither a kernel with netem nor the commands of iproute2, and what is lost, doubled or late comes from a seed.
It takes the right to make network and mount namespaces: root, or a kernel that lets a user make user namespaces; and
/dev/net/tun. `Cable` is the test's end of it, `python -m tests.chaos.cable` the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
#: The addresses of the two ends.
HOSTS = ("10.77.0.1", "10.77.0.2")
DEVICE = "cable0"

#: What a slow direction holds before it drops, as a router does.
_QUEUE_BYTES = 256 * 1024
_MTU_BYTES = 9000
_MAX_PACKETS_A_TURN = 64
_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWNET = 0x0002_0000, 0x1000_0000, 0x4000_0000
_MS_REC, _MS_PRIVATE = 0x4000, 0x4_0000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x4004_54CA, 0x0001, 0x1000
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU = 0x8914, 0x8916, 0x891C, 0x8922
_IFF_UP_AND_RUNNING = 0x0001 | 0x0040


class NoRights(Exception):
    """This machine does not let us make what a cable is made of; says what."""


@dataclass(kw_only=True)
class Counts:
    """Packets of one direction: that came through, that the dice lost, that they doubled."""

    forwarded: int = 0
    lost: int = 0
    doubled: int = 0


class Cable:
    """The test's end. `namespaces[i]`: paths of the namespaces of end i, whose address is HOSTS[i].

    A direction is named by the end it comes from: 0 is from the first end to the second."""

    def __init__(self, *, seed: int) -> None:
        """Raises NoRights."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.cable", str(seed)],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        made = self._answer()
        if "error" in made:
            self.close()
            raise NoRights(made["error"])
        self.namespaces: list[list[str]] = made["namespaces"]

    def be(self, *directions: int, **behaviour: float) -> None:
        """Behave so in these directions (none: both) from now on; see Behaviour. Returns once it does."""
        self._ask({"directions": directions or (0, 1), "behaviour": behaviour})

    def cut(self, *directions: int) -> None:
        """Lose everything, without a word to either end."""
        self.be(*directions, loss_frac=1.0)

    def heal(self) -> None:
        self.be()

    def counts(self) -> list[Counts]:
        """Of each direction."""
        return [Counts(**counts) for counts in self._ask({"directions": (), "behaviour": {}})["counts"]]

    def close(self) -> None:
        self._process.communicate()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the cable's process ended"
        answer: dict[str, Any] = json.loads(line)
        return answer


# ---- the process ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """Of one direction. jitter_s: up to so much more delay for each packet, which so may overtake others.
    rate_bytes_per_s: 0 is no limit."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss_frac: float = 0.0
    double_frac: float = 0.0
    rate_bytes_per_s: float = 0.0


class Direction:
    """Packets from one device to the other."""

    def __init__(self, source_fd: int, target_fd: int, dice: random.Random) -> None:
        self.source_fd = source_fd
        self.behaviour = Behaviour()
        self.counts = Counts()
        self._target_fd = target_fd
        self._dice = dice
        self._waiting: list[tuple[float, int, bytes]] = []  # a heap: (when it is due, order of arrival, packet)
        self._num_taken = 0
        self._free_s = 0.0

    def take(self, now_s: float) -> bool:
        """Take in what the source has to send; False: it had nothing more."""
        for _ in range(_MAX_PACKETS_A_TURN):
            try:
                packet = os.read(self.source_fd, 65536)
            except BlockingIOError:
                return False
            if self._dice.random() < self.behaviour.loss_frac:
                self.counts.lost += 1
                continue
            self._queue(packet, now_s)
            if self._dice.random() < self.behaviour.double_frac:
                self.counts.doubled += 1
                self._queue(packet, now_s)
        return True

    def hand_on(self, now_s: float) -> None:
        while self._waiting and self._waiting[0][0] <= now_s:
            with contextlib.suppress(BlockingIOError):  # the target's queue is full: one more that is lost
                os.write(self._target_fd, heapq.heappop(self._waiting)[2])
                self.counts.forwarded += 1

    def next_s(self) -> float:
        return self._waiting[0][0] if self._waiting else float("inf")

    def _queue(self, packet: bytes, now_s: float) -> None:
        rate = self.behaviour.rate_bytes_per_s
        sent_s = now_s
        if rate:
            if (self._free_s - now_s) * rate > _QUEUE_BYTES:
                return
            sent_s = self._free_s = max(self._free_s, now_s) + len(packet) / rate
        due_s = sent_s + self.behaviour.delay_s + self._dice.random() * self.behaviour.jitter_s
        self._num_taken += 1
        heapq.heappush(self._waiting, (due_s, self._num_taken, packet))


def _make_end(host: str, kinds: Sequence[str]) -> tuple[int, list[int]]:
    """Move this process into fresh namespaces with a TUN device; (its descriptor, those of the namespaces to enter)."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int, what: str) -> None:
        if result:
            raise NoRights(f"{what}: {os.strerror(ctypes.get_errno())}")

    check(libc.unshare(_CLONE_NEWNET | _CLONE_NEWNS), "network and mount namespaces can't be made")
    # Of the new network: UCX looks its devices up there.
    check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "mounts can't be made private")
    check(libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None), "/sys can't be mounted")
    try:
        tun_fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(tun_fd, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError as error:
        raise NoRights(f"a TUN device can't be made: {error}") from error
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:

        def configure(device: str, request: int, value: bytes) -> None:
            fcntl.ioctl(control, request, struct.pack("16s24s", device.encode(), value))

        for request, address in ((_SIOCSIFADDR, host), (_SIOCSIFNETMASK, "255.255.255.0")):
            configure(DEVICE, request, struct.pack("=HH4s", socket.AF_INET, 0, socket.inet_aton(address)))
        configure(DEVICE, _SIOCSIFMTU, struct.pack("=i", _MTU_BYTES))
        for device in ("lo", DEVICE):
            configure(device, _SIOCSIFFLAGS, struct.pack("=h", _IFF_UP_AND_RUNNING))
    return tun_fd, [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in kinds]


def _become_root_of_a_user_namespace() -> None:
    """What root may do to this machine, a user may do to namespaces of his own, where the kernel lets him."""
    uid, gid = os.getuid(), os.getgid()
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUSER):
        raise NoRights(f"not root, and user namespaces can't be made: {os.strerror(ctypes.get_errno())}")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")


def _serve(directions: Mapping[int, Direction]) -> None:
    """Until stdin ends."""
    poller = select.poll()
    poller.register(0, select.POLLIN)
    for direction in directions.values():
        poller.register(direction.source_fd, select.POLLIN)
    requests = b""
    while True:
        left_s = min(direction.next_s() for direction in directions.values()) - time.monotonic()
        # Rounded up: a packet that is handed on a moment late is better than a loop that spins.
        ready = dict(poller.poll(None if left_s == float("inf") else max(0.0, left_s) * 1e3 + 0.5))
        if 0 in ready:
            received = os.read(0, 65536)
            if not received:
                return
            *lines, requests = (requests + received).split(b"\n")
            for request in map(json.loads, lines):
                for number in request["directions"]:
                    directions[number].behaviour = Behaviour(**request["behaviour"])
                _say({"counts": [asdict(directions[number].counts) for number in (0, 1)]})
        for direction in directions.values():
            direction.take(time.monotonic())
            direction.hand_on(time.monotonic())


def _say(answer: dict[str, Any]) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


def main(seed: int) -> None:
    try:
        kinds = ["mnt", "net"]
        if os.getuid() != 0:
            _become_root_of_a_user_namespace()
            kinds.insert(0, "user")
        (first_fd, first), (second_fd, second) = (_make_end(host, kinds) for host in HOSTS)
    except NoRights as error:
        _say({"error": str(error)})
        return
    paths = [[f"/proc/{os.getpid()}/fd/{fd}" for fd in namespaces] for namespaces in (first, second)]
    _say({"namespaces": paths})
    dice = random.Random(seed)
    _serve({0: Direction(first_fd, second_fd, dice), 1: Direction(second_fd, first_fd, dice)})


if __name__ == "__main__":
    main(int(sys.argv[1]))
