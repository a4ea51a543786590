"""ucx_perftest in the transport bench: what UCX's own benchmark says of the same transports, where it is installed.

It moves one buffer again and again between two processes that never sleep, so its CPU time says nothing about UCX.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bench.tethered import tethered
from ring.core.errors import TransportError
from transport import ucx_library

PROGRAM = "ucx_perftest"
_TIMEOUT_S = 120.0
_MIB = 1 << 20


class Figures(NamedTuple):
    """The last line that it prints for a program to read, in its order."""

    iterations: float
    percentile_latency_us: float
    average_latency_us: float
    latency_us: float
    average_mib_per_s: float
    mib_per_s: float
    average_messages_per_s: float
    messages_per_s: float


def parse_figures(printed: str) -> Figures:
    """Raises TransportError: none of its lines holds the figures."""
    for line in reversed(printed.splitlines()):
        with suppress(ValueError, TypeError):
            return Figures(*map(float, line.split(",")))
    raise TransportError(f"{PROGRAM} printed no figures that we can read: {printed.strip()[-200:]!r}")


@dataclass(frozen=True, kw_only=True)
class Perftest:
    """UCX's benchmark over some of its transports within one host."""

    program: str
    tls: str

    def gb_per_s(self, *, num_bytes: int, num_messages: int) -> float:
        """Raises TransportError: it failed, or said something that we can't read."""
        figures = self._run("tag_bw", num_bytes, num_messages)
        # It says MB and means 2**20 bytes.
        return figures.mib_per_s * _MIB / 1e9

    def trip_s(self, *, num_bytes: int, num_trips: int) -> float:
        """There and back. Raises TransportError."""
        # It gives half of a round trip, in microseconds.
        return 2e-6 * self._run("tag_lat", num_bytes, num_trips).latency_us

    def _run(self, test: str, num_bytes: int, num_messages: int) -> Figures:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = str(probe.getsockname()[1])
        what = ["-t", test, "-s", str(num_bytes), "-n", str(num_messages), "-w", "2", "-f", "-v"]
        server = self._start(["-p", port])
        try:
            deadline_s = time.monotonic() + _TIMEOUT_S
            while True:
                client = self._start(["127.0.0.1", "-p", port, *what])
                printed, errors = _communicate(client, deadline_s)
                if client.returncode == 0:
                    return parse_figures(printed)
                # Until the server listens. It says so, but not into a pipe.
                said = printed + errors
                if server.poll() is not None or "refused" not in said or time.monotonic() > deadline_s:
                    raise TransportError(f"{PROGRAM} failed, exit {client.returncode}: {said.strip()[-200:]}")
        finally:
            server.kill()
            server.communicate()

    def _start(self, arguments: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            tethered([self.program, *arguments]),
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _environment(self) -> dict[str, str]:
        # Else the wheel's program may load parts of another UCX that the system has.
        libraries = os.pathsep.join([str(Path(ucx_library.path()).parent), os.environ.get("LD_LIBRARY_PATH", "")])
        own = {"UCX_TLS": self.tls, "UCX_NET_DEVICES": "lo", "LD_LIBRARY_PATH": libraries}
        # As `ucx` has them; with its own, of 8 KiB, it is slower than the transport.
        segments = {"UCX_TCP_TX_SEG_SIZE": "256K", "UCX_TCP_RX_SEG_SIZE": "256K"}
        return os.environ | segments | own


def _communicate(process: subprocess.Popen[str], deadline_s: float) -> tuple[str, str]:
    """What it printed. Raises TransportError: it did not end in time; it is ended then."""
    try:
        return process.communicate(timeout=max(0.0, deadline_s - time.monotonic()))
    except subprocess.TimeoutExpired as error:
        process.kill()
        process.communicate()
        raise TransportError(f"{PROGRAM} did not end within {_TIMEOUT_S} s") from error


def perftest_program() -> str | None:
    """Where it is: beside the UCX of the wheel, or on the PATH. None: nowhere."""
    spec = importlib.util.find_spec("libucx")
    beside = [Path(place) / "bin" / PROGRAM for place in (spec.submodule_search_locations or ())] if spec else []
    return next((str(path) for path in beside if os.access(path, os.X_OK)), shutil.which(PROGRAM))
