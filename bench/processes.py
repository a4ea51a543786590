"""A bench's processes: which core each runs on, how a teacher is started beside the bench, and what CPU it used."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.tethered import tethered
from ring.core.errors import ConfigError, DisaggKDError

#: How long a teacher may take to load, calibrate and probe.
READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
#: One thread in every library that has a pool; set before the library is loaded.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class TeacherFailed(DisaggKDError):
    """The bench's teacher process ended, or did not get ready."""


@dataclass(frozen=True)
class Cores:
    """One core for each side. `shared_core`: they are two hardware threads of one core, which slow each other down."""

    student: int
    teacher: int
    shared_core: bool


def choose_cores() -> Cores:
    """Two CPUs that this process may use, on different cores where there are some. Raises ConfigError: only one."""
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        raise ConfigError(f"this bench needs two CPUs, one a side; found {len(usable)} that this process may use")
    student = usable[0]
    siblings = _hardware_threads(student)
    for cpu in usable[1:]:
        if cpu not in siblings:
            return Cores(student, cpu, shared_core=False)
    return Cores(student, usable[1], shared_core=True)


def _hardware_threads(cpu: int) -> set[int]:
    """The CPUs on the same core as `cpu`, itself included; only itself where the kernel does not say."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        parts = path.read_text().strip().split(",")
    except OSError:
        return {cpu}
    bounds = [[int(bound) for bound in part.split("-")] for part in parts]
    return {cpu for first, *last in bounds for cpu in range(first, (last or [first])[0] + 1)}


@contextmanager
def pinned(cpu: int) -> Iterator[None]:
    """This thread, and those that it starts, run on one CPU; torch computes in one thread."""
    cpus, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {cpu})
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        os.sched_setaffinity(0, cpus)


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that files and processes are cleaned up. For the main thread."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass(frozen=True)
class TeacherProcess:
    """A teacher that serves. `facts`: what its ready line says, by name."""

    pid: int
    endpoint: str
    facts: dict[str, str]

    def cpu_s(self) -> float:
        """CPU time of all its threads so far."""
        # The clock that Linux has for every process: /proc would give ticks of 10 ms, which is many fills.
        return time.clock_gettime((~self.pid << 3) | 2)

    def queued_s(self) -> float:
        """How long its computing thread was ready to run and had no CPU; see `queued_s`."""
        return queued_s(f"{self.pid}/task/{self.pid}")


def queued_s(thread: str = "thread-self") -> float:
    """How long a thread, by its path under /proc, was ready to run while something else had its CPU.

    NaN where the kernel does not count it."""
    try:
        return int(Path(f"/proc/{thread}/schedstat").read_text().split()[1]) * 1e-9
    except OSError:
        return float("nan")


@contextmanager
def teacher_process(module: str, arguments: Sequence[str], *, cpu: int, log: Path) -> Iterator[TeacherProcess]:
    """`python -m module` on one CPU while the block runs; it prints `ready ENDPOINT name=value ...` once it serves.

    Raises TeacherFailed: it does not get ready, or ended before the block did."""
    command = tethered([sys.executable, "-m", module, *arguments], cpu=cpu)
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            stdin=subprocess.DEVNULL,
            env=os.environ | ONE_THREAD,
            text=True,
        )
    try:
        yield _ready(process, module, log)
        if process.poll() is not None:
            raise TeacherFailed(f"{module} ended during the bench, exit {process.returncode}: {_last_line(log)}")
    finally:
        _stop(process)


def _ready(process: subprocess.Popen[str], module: str, log: Path) -> TeacherProcess:
    assert process.stdout is not None
    poller = select.poll()
    poller.register(process.stdout, select.POLLIN)
    give_up_s = time.monotonic() + READY_TIMEOUT_S
    # A line at a time is what it prints, and nothing before `ready`.
    if poller.poll(max(0.0, give_up_s - time.monotonic()) * 1e3):
        words = process.stdout.readline().split()
        if words[:1] == ["ready"]:
            facts = (word.partition("=") for word in words[2:])
            return TeacherProcess(process.pid, words[1], {name: value for name, _, value in facts})
    raise TeacherFailed(f"{module} did not get ready: {_last_line(log)}")


def _stop(process: subprocess.Popen[str]) -> None:
    """SIGTERM drains it; SIGKILL is for one that does not end by that."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
