"""`python -m teacher.serve`: a teacher replica as a process.

Two threads: this one runs forward passes, the other talks to students. It prints one `ready` line when students may
connect, and drains on SIGTERM or SIGINT: what it holds is still answered, new requests are refused, exit 0.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Literal

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
from transport import registry

PROG = "teacher.serve"
logger = logging.getLogger(PROG)
#: What `make demo` leaves; the bare command serves it.
DEMO_MODEL = Path("runs/demo/teacher")
#: A drain that takes longer than this is given up: a student that does not read must not keep the process.
DRAIN_TIMEOUT_S = 60.0
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


def serve(config: ServeConfig) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError: the model, the port or the transport is not to be had."""
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
        with closing(service):
            facts = f"model={model.name} fingerprint={model.fingerprint} device={model.device} "
            facts += f"dtype={model.dtype.value} transport={','.join(backends)}"
            run_service(service, ready=lambda: _announce(config, port.endpoint, facts))
    finally:
        port.close()
        context.term()


@contextmanager
def admitting(port: ZmqPort) -> Iterator[None]:
    """Decide within the block, on a thread, who may connect: without it students with keys that come early would be cut
    off, and take it for a refusal. The port must not be used otherwise meanwhile."""
    done = threading.Event()

    def admit() -> None:
        while not done.wait(ADMIT_EVERY_S):
            port.admit()

    thread = threading.Thread(target=admit, name="teacher-admit", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


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


def run_service(service: TeacherService, *, ready: Callable[[], None] = lambda: None) -> None:
    """Both threads, until a signal asks for the end and everything held is answered.

    ready: called once students are served and signals are heeded: whoever is told may send one at once."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    done = threading.Event()
    io_thread = threading.Thread(target=_talk_or_fail, args=(service, done, failures), name="teacher-io", daemon=True)
    io_thread.start()
    try:
        ready()
        while not stop.is_set() and not failures:
            if not service.compute_turn():
                service.wait_for_work(timeout_s=0.5)
        logger.info("draining")
        service.drain()
        give_up_s = time.monotonic() + DRAIN_TIMEOUT_S
        while not service.drained and not failures and time.monotonic() < give_up_s:
            if not service.compute_turn():
                service.wait_for_work(timeout_s=0.05)
    finally:
        done.set()
        io_thread.join()
        for number, handler in before.items():
            signal.signal(number, handler)
    if failures:
        raise failures[0]


def _talk_or_fail(service: TeacherService, done: threading.Event, failures: list[BaseException]) -> None:
    try:
        talk(service, done)
    except BaseException as error:  # noqa: BLE001 - handed to the main thread, which raises it
        failures.append(error)


def talk(service: TeacherService, done: threading.Event) -> None:
    """The I/O thread's work until `done` is set: everything but the forward passes."""
    while not done.is_set():
        if service.io_turn():
            continue
        poller = select.poll()
        for fd in service.wait_fds():
            poller.register(fd, select.POLLIN)
        deadline_s = service.next_deadline_s()
        left_s = 0.5 if deadline_s is None else min(0.5, max(0.0, deadline_s - time.monotonic()))
        poller.poll(left_s * 1e3 + 1)
        service.acknowledge_wake()


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments

    def command() -> None:
        config = with_demo_model(parse(ServeConfig, arguments, prog=PROG, description=(__doc__ or "").split("\n")[0]))
        set_up_logging(debug=config.debug)
        tell(f"{PROG}\n{describe(config)}")
        serve(config)

    with suppress(BrokenPipeError):
        return run(command, prog=PROG, debug=debug)
    return 1


if __name__ == "__main__":
    sys.exit(main())
