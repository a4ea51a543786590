"""A UCX address that somebody else sent, tried where it can do no harm: UCX reads beyond what is malformed, or aborts,
and takes the process along. So a process of its own connects to it first, which nobody misses.

It says nothing to whoever is there, and ends at once. What it does is what `Link` does; where that is the same in both
processes an address that passed kills neither.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

from ring.core.errors import DeadlineExceeded, DisaggKDError, RemoteProtocolError, TransportError
from transport import ucx_core
from transport.devices import net_devices

#: "1": addresses are not tried, because all that can offer one are trusted, or a process takes too long to start.
TRUST_VARIABLE = "DISAGGKD_UCX_TRUST"
_REFUSED, _FAILED = 3, 4
#: Its way out is ours to see, and nobody's to trace.
_SETTINGS = {"UCX_HANDLE_ERRORS": "none", "UCX_LOG_LEVEL": "fatal"}
#: Arguments: where our packages are, the local host, and where else this process finds modules. Ours go before other
#: packages, which may have their names, and behind the standard library; -P keeps the directory that we are in out.
_CODE = """
import sys
at = next((i for i, path in enumerate(sys.path) if path.endswith("-packages")), len(sys.path))
sys.path[at:at] = sys.argv[1:2]
sys.path += sys.argv[3:]
from transport.ucx_trial import main
main(sys.argv[2])
"""


def check_address(address: bytes, *, local_host: str, timeout_s: float) -> None:
    """Blocks for as long as a process takes to start and to open UCX's devices: a fraction of a second. An address of
    this very process passes as it is, and any where TRUST_VARIABLE says so.

    Raises RemoteProtocolError: UCX refuses the address, or dies of it. Raises TransportError: it can't be tried.
    Raises DeadlineExceeded."""
    if ucx_core.is_own_address(address) or os.environ.get(TRUST_VARIABLE) == "1":
        return
    ours = str(Path(__file__).resolve().parents[1])
    command = [sys.executable, "-P", "-c", _CODE, ours, local_host, *filter(None, sys.path)]
    try:
        trial = subprocess.run(
            command, input=address, env=os.environ | _SETTINGS, capture_output=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired as error:
        raise DeadlineExceeded(
            f"ucx: an address of {len(address)} bytes was not tried within {timeout_s:g} s"
        ) from error
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


def main(local_host: str) -> None:
    """The trial of the address on stdin; ends the process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    code = 0
    try:
        worker = ucx_core.Worker(ucx_core.context(net_devices=net_devices(local_host)))
        worker.connect(sys.stdin.buffer.read())
    except DisaggKDError as error:
        print(error, file=sys.stderr, flush=True)
        code = _REFUSED if isinstance(error, RemoteProtocolError) else _FAILED
    # Not closed in order: that would talk to whoever is at the address.
    os._exit(code)
