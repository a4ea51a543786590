"""`python -m teacher.serve`: a teacher replica as a process.

It prints one `ready` line when students may connect, and drains on SIGTERM, SIGINT or SIGHUP: what it holds is still
answered, new requests are refused, exit 0, after SIGHUP 129. Before that line a signal ends it at once.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ring.starting import end_at_once, ending_at_once

if __name__ == "__main__":
    # Before what takes seconds to import.
    end_at_once("teacher.serve")

import torch
import zmq

from ring.auth import load_keyring
from ring.command import describe, flag, parse, run, set_up_logging, tell
from ring.control import ZmqPort, longest_request_bytes
from ring.core.config import MAX_COUNT, MAX_SECONDS
from ring.core.errors import ConfigError
from ring.determinism import fix_kernels
from ring.endpoints import check_exposure
from teacher.destinations import Destinations
from teacher.load import load_teacher
from teacher.service import ServiceConfig, TeacherService
from teacher.threads import Ending, ThreadEnded, run_service, words_of
from transport import registry

PROG = "teacher.serve"
#: What `make demo` leaves; the bare command serves it.
DEMO_MODEL = Path("runs/demo/teacher")
#: How often it is looked for early students while the model is loaded.
ADMIT_EVERY_S = 0.1
#: More would only fail later: no machine has that many cores.
MAX_THREADS = 4096
#: Of a replica's name, as messages may carry it.
MAX_NAME_BYTES = 256


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Raises ConfigError on construction: a value out of its range."""

    model: str | None = flag(None, "Hugging Face causal LM: a directory or hub id", metavar="DIR|ID")
    listen: str = flag("tcp://127.0.0.1:5555", "where students connect; port * picks a free one", metavar="TCP")
    transport: str = flag("auto", "how states travel: auto (as the student asks) or one by name (shm, zmq, ucx)")
    dtype: Literal["auto", "bf16", "fp16", "fp32", "fp64"] = flag("auto", "of the weights; auto is the checkpoint's")
    device: str = flag("auto", "where the model runs: cpu, cuda, cuda:N; auto is CUDA where there is one")
    max_batch_tokens: int = flag(16384, "tokens of one forward pass, padding included; also a request's limit")
    max_students: int = flag(64, "students served at one time")
    student_timeout: float = flag(60.0, "seconds of silence after which a student is dropped", metavar="S")
    replica: str = flag("", "name shown to students; default: host and process id")
    ready_file: str | None = flag(None, "file that receives the endpoint once students may connect", metavar="FILE")
    auth: str | None = flag(None, "keys of this teacher and of its students, made by `disaggkd keys`", metavar="DIR")
    insecure: bool = flag(False, "allow --listen beyond this machine, though nothing is authenticated or encrypted")
    threads: int = flag(0, "CPU threads of this process; 0 leaves the library's choice")
    deterministic: bool = flag(False, "one request a forward pass, fixed threads, deterministic kernels")
    debug: bool = flag(False, "log more, and print tracebacks")

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_students"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be >= 1, got {getattr(self, name)}")
        if self.max_batch_tokens > MAX_COUNT:
            raise ConfigError(f"--max-batch-tokens must be <= {MAX_COUNT}, got {self.max_batch_tokens}")
        if len(self.replica.encode()) > MAX_NAME_BYTES:
            raise ConfigError(f"--replica must have at most {MAX_NAME_BYTES} bytes, got {len(self.replica.encode())}")
        if not 0 <= self.threads <= MAX_THREADS:
            raise ConfigError(f"--threads must be 0 to {MAX_THREADS}, got {self.threads}")
        if not 0 < self.student_timeout <= MAX_SECONDS:
            allowed = f"<= {MAX_SECONDS:g}" if self.student_timeout > 0 else "> 0"
            raise ConfigError(f"--student-timeout must be {allowed}, got {self.student_timeout}")
        if self.auth is not None and self.insecure:
            raise ConfigError("--auth and --insecure: give one of them")


def with_demo_model(config: ServeConfig) -> ServeConfig:
    """The bare command serves the demo's teacher. Raises ConfigError: no --model, and no demo."""
    if config.model is not None:
        return config
    if not DEMO_MODEL.exists():
        raise ConfigError(f"--model not given, and there is no {DEMO_MODEL}: give --model DIR|ID, or run `make demo`")
    return replace(config, model=str(DEMO_MODEL))


def serve(config: ServeConfig) -> int:
    """Serve until a signal asks for the end; returns the exit code.

    Raises ConfigError: the model, the port or the transport is not to be had. Raises ThreadEnded."""
    assert config.model is not None
    check_exposure(config.listen, flag="--listen", auth=config.auth is not None, insecure=config.insecure)
    keyring = None if config.auth is None else load_keyring(config.auth)
    backends = registry.offered(config.transport)
    if config.threads:
        torch.set_num_threads(config.threads)
    if config.deterministic:
        fix_kernels(num_threads=config.threads or torch.get_num_threads())
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    # Bound before the model is loaded: a port in use is said at once, and early students wait instead of failing.
    port = ZmqPort(
        context, config.listen, keyring=keyring, max_frame_bytes=longest_request_bytes(config.max_batch_tokens)
    )
    try:
        # Not before the port is ours: the file may be that of a teacher that holds it.
        _forget_ready_file(config.ready_file)
        with admitting(port):
            model = load_teacher(config.model, dtype=config.dtype, device=config.device)
        service = TeacherService(
            model,
            port,
            ServiceConfig(
                replica=config.replica or f"{socket.gethostname()}-{os.getpid()}",
                backends=backends,
                epoch=secrets.token_hex(8),
                max_batch_tokens=config.max_batch_tokens,
                max_students=config.max_students,
                student_timeout_s=config.student_timeout,
                deterministic=config.deterministic,
                destinations=Destinations.of(config.listen, with_keys=keyring is not None),
            ),
        )
        facts = f"model={model.name} fingerprint={model.fingerprint} device={model.device} "
        facts += f"dtype={model.dtype.value} transport={','.join(backends)}"
        with closing(service), Ending(PROG) as ending:
            run_service(service, ending, ready=lambda: _announce(config, port.endpoint, facts))
        return 128 + signal.SIGHUP if ending.signal == signal.SIGHUP else 0
    finally:
        port.close()
        context.term()


@contextmanager
def admitting(port: ZmqPort) -> Iterator[None]:
    """Decide within the block, on a thread, who may connect: without it students with keys that come early would be cut
    off, and take it for a refusal. The port must not be used otherwise meanwhile."""
    done = threading.Event()
    failure: BaseException | None = None

    def admit() -> None:
        nonlocal failure
        try:
            while not done.wait(ADMIT_EVERY_S):
                port.admit()
        except BaseException as error:  # noqa: BLE001 - raised when the block ends
            failure = error

    thread = threading.Thread(target=admit, name="teacher-admit", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    if failure is not None:
        raise ThreadEnded(f"the thread that lets students in ended: {words_of(failure)}") from failure


def _forget_ready_file(name: str | None) -> None:
    """Whoever waits for the file must not find that of an earlier life. Raises ConfigError: it can't be written."""
    if name is None:
        return
    try:
        Path(name).unlink(missing_ok=True)
        _new_file_beside(name, "").unlink()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--ready-file {name!r} can't be written: {error}; allowed: a path to a file") from error


def _announce(config: ServeConfig, endpoint: str, facts: str) -> None:
    if config.ready_file is not None:
        try:
            aside = _new_file_beside(config.ready_file, endpoint + "\n")
            try:
                os.replace(aside, config.ready_file)
            except BaseException:
                aside.unlink()
                raise
        except OSError as error:
            raise ConfigError(f"--ready-file {config.ready_file} can't be written: {error.strerror}") from error
    print(f"ready {endpoint} {facts}", flush=True)


def _new_file_beside(name: str, text: str) -> Path:
    """A file of a name that nothing has, link or file: what stands there already is somebody else's."""
    path = Path(name).with_name(f".ready-{secrets.token_hex(8)}")
    with path.open("x") as file:
        try:
            file.write(text)
            file.flush()
        except BaseException:
            path.unlink()
            raise
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    code = 0

    def command() -> None:
        nonlocal code
        config = with_demo_model(parse(ServeConfig, arguments, prog=PROG, description=(__doc__ or "").split("\n")[0]))
        set_up_logging(debug=config.debug)
        tell(f"{PROG}\n{describe(config)}")
        code = serve(config)

    with ending_at_once(PROG):
        return run(command, prog=PROG, debug=debug, waits_for_output=False) or code


if __name__ == "__main__":
    sys.exit(main())
