"""A UCX address that somebody else sent, tried where it can do no harm: UCX reads beyond what is malformed, or aborts,
and takes the process along. So a process of its own connects to it first, which nobody misses.

It says nothing to whoever is there, and ends at once. What it does is what `Link` does; where that is the same in both
processes an address that passed kills neither. `python -m transport.ucx_trial DEVICES < ADDRESS` is that process.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys

from ring.core.errors import DeadlineExceeded, DisaggKDError, RemoteProtocolError, TransportError
from transport import ucx_core
from transport.devices import net_devices

#: Python, UCX and its devices take a fraction of a second to start; on a machine that is overloaded many times that.
TIMEOUT_S = 20.0
_REFUSED, _FAILED = 3, 4
#: Its way out is ours to see, and nobody's to trace.
_SETTINGS = {"UCX_HANDLE_ERRORS": "none", "UCX_LOG_LEVEL": "fatal"}


def check_address(address: bytes, *, local_host: str) -> None:
    """Blocks for as long as a process takes to start. An address of this very process passes as it is.

    Raises RemoteProtocolError: UCX refuses the address, or dies of it. Raises TransportError: it can't be tried.
    Raises DeadlineExceeded: that came to no end."""
    if ucx_core.is_own_address(address):
        return
    # Not the directory that we are in: what lies there may have our modules' names.
    command = [sys.executable, "-P", "-m", "transport.ucx_trial", local_host]
    environment = os.environ | _SETTINGS | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        trial = subprocess.run(command, input=address, env=environment, capture_output=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise DeadlineExceeded(f"ucx: trying an address of {len(address)} bytes took {TIMEOUT_S:g} s") from error
    except OSError as error:
        raise TransportError(f"ucx: no process to try an address in: {error}") from error
    said = (trial.stderr.decode(errors="replace").splitlines() or ["nothing"])[-1]
    if trial.returncode < 0:
        name = signal.Signals(-trial.returncode).name
        raise RemoteProtocolError(f"ucx: an address of {len(address)} bytes that UCX dies of ({name})")
    if trial.returncode == _REFUSED:
        raise RemoteProtocolError(said)
    if trial.returncode != 0:
        raise TransportError(f"ucx: the address could not be tried: {said}")


def main() -> int:
    """The trial; returns its exit code."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    address = sys.stdin.buffer.read()
    try:
        worker = ucx_core.Worker(ucx_core.context(net_devices=net_devices(sys.argv[1])))
        worker.connect(address)
    except RemoteProtocolError as error:
        print(error, file=sys.stderr)
        return _REFUSED
    except DisaggKDError as error:
        print(error, file=sys.stderr)
        return _FAILED
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Not closed in order: that would talk to whoever is at the address.
    os._exit(code)
