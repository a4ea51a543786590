"""The commands as real processes: started, watched through the files that they write, signalled, and waited for.

Every wait polls under a hang guard; nothing here sleeps for a time that a test relies on.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
#: No step of a test takes a tenth of this on a quiet machine; it only ends tests that hang.
HANG_GUARD_S = 120.0
#: Every wait ends that much late, as on a machine that had no time for the test just then: what a test asserts after it
#: must be true still. `make soak-late` runs them so.
LATE_S = float(os.environ.get("LATE_S", "0"))
#: What must not depend on transport, layout, faults or restarts. The rest of a line is time, memory and traffic.
CURVE_FIELDS = (
    "step",
    "epoch",
    "position",
    "seq_first",
    "seq_last",
    "lm_loss",
    "kd",
    "loss",
    "rows",
    "samples",
    "lr",
    "grad_norm",
)


class Zygote:
    """Starts commands by forking; see `tests.system.zygote`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.system.zygote"],
            cwd=REPOSITORY,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._received = b""
        self._pids: list[int] = []
        self._codes: dict[int, int] = {}
        self._next_pid()  # its own: everything is imported

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        cwd: Path,
        out: Path,
        error: Path,
        env: Mapping[str, str],
        namespaces: Sequence[str],
    ) -> int:
        request = {"module": module, "arguments": arguments, "cwd": str(cwd), "out": str(out), "error": str(error)}
        request |= {"env": dict(env), "namespaces": list(namespaces)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return self._next_pid()

    def poll(self, pid: int) -> int | None:
        """The exit code of a child, negative for a signal, or None: it runs."""
        self._read(timeout_s=0)
        return self._codes.get(pid)

    def close(self) -> None:
        """Ends what still runs."""
        self._process.communicate()

    def _next_pid(self) -> int:
        deadline_s = time.monotonic() + HANG_GUARD_S
        while not self._pids:
            assert time.monotonic() < deadline_s, "the zygote does not answer"
            self._read(timeout_s=1.0)
        return self._pids.pop(0)

    def _read(self, *, timeout_s: float) -> None:
        assert self._process.stdout is not None
        while select.select([self._process.stdout], [], [], timeout_s)[0]:
            received = os.read(self._process.stdout.fileno(), 65536)
            assert received, "the zygote ended"
            *lines, self._received = (self._received + received).split(b"\n")
            for answer in map(json.loads, lines):
                if "code" in answer:
                    self._codes[answer["pid"]] = answer["code"]
                else:
                    self._pids.append(answer["pid"])
            timeout_s = 0


@functools.cache
def zygote() -> Zygote:
    """One for all tests of this process; ended with it."""
    made = Zygote()
    atexit.register(made.close)
    return made


def is_held(pid: int) -> bool:
    """Whether all threads of a process are stopped."""
    # A thread, or all of it, may have just ended.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)
    return False


#: How many files of a kind this process has named in a directory. The child makes them, at any time later: counting
#: those that are there would give two commands one file.
_numbers: defaultdict[tuple[Path, str], Iterator[int]] = defaultdict(itertools.count)


class Command:
    """`python -m module arguments` as a process of its own. env: variables that it has besides ours. namespaces: paths
    of Linux namespaces that it runs in. terminal: where its output goes, instead of files."""

    def __init__(
        self,
        module: str,
        *arguments: object,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        namespaces: Sequence[str] = (),
        terminal: str | None = None,
    ) -> None:
        number = next(_numbers[cwd, module])
        self.out_file = cwd / f"{module}-{number}.out"
        self.error_file = cwd / f"{module}-{number}.err"
        self.pid = zygote().start(
            module,
            [str(one) for one in arguments],
            cwd=cwd,
            out=self.out_file if terminal is None else Path(terminal),
            error=self.error_file if terminal is None else Path(terminal),
            env=env or {},
            namespaces=namespaces,
        )

    @property
    def output(self) -> str:
        return self.out_file.read_text() if self.out_file.exists() else ""

    @property
    def errors(self) -> str:
        return self.error_file.read_text() if self.error_file.exists() else ""

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None: it runs."""
        return zygote().poll(self.pid)

    def send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ended just now
                os.kill(self.pid, number)

    def wait(self, *, guard_s: float = HANG_GUARD_S) -> int:
        """The exit code, negative for a signal. guard_s: of what takes more than a tenth of the usual one."""
        deadline_s = time.monotonic() + guard_s
        while (code := self.poll()) is None:
            if time.monotonic() > deadline_s:
                self.end()
                raise AssertionError(f"it did not end within {guard_s:g} s:\n{self.tail()}")
            time.sleep(0.005)
        return code

    def succeed(self, *, guard_s: float = HANG_GUARD_S) -> None:
        code = self.wait(guard_s=guard_s)
        assert code == 0, f"exit {code}:\n{self.tail()}"

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Poll while it runs. AssertionError: it ended, or the hang guard struck, before `holds`."""
        deadline_s = time.monotonic() + HANG_GUARD_S
        while not holds():
            assert self.poll() is None, f"it ended before {what}:\n{self.tail()}"
            assert time.monotonic() < deadline_s, f"waited {HANG_GUARD_S:g} s for {what}:\n{self.tail()}"
            time.sleep(0.002)
        time.sleep(LATE_S)

    def until_held(self) -> None:
        """Until all its threads are stopped, by a signal or as `tests.system.dying_student` stops itself."""
        self.until(lambda: is_held(self.pid), "it held still")

    def end(self) -> None:
        """However it is, it is gone when this returns."""
        self.send(signal.SIGKILL)
        deadline_s = time.monotonic() + HANG_GUARD_S
        while self.poll() is None:
            assert time.monotonic() < deadline_s, f"process {self.pid} can't be killed"
            time.sleep(0.002)

    def tail(self) -> str:
        return "\n".join([*self.output.splitlines()[-5:], *self.errors.splitlines()[-15:]])


class Teacher(Command):
    """`teacher.serve`; returns once it said that it is ready."""

    def __init__(
        self,
        model: Path,
        *arguments: object,
        cwd: Path,
        host: str = "127.0.0.1",
        port: str = "*",
        wait: bool = True,
        threads: int = 1,
        command: Sequence[str] = ("teacher.serve",),
        **where: Any,
    ) -> None:
        """command: as of Student."""
        self._ready_file = cwd / f"ready-{next(_numbers[cwd, 'ready'])}"
        super().__init__(
            *command,
            "--model",
            model,
            "--listen",
            f"tcp://{host}:{port}",
            "--ready-file",
            self._ready_file,
            "--deterministic",
            "--threads",
            threads,
            *arguments,
            cwd=cwd,
            **where,
        )
        if wait:
            self.until_ready()

    def until_ready(self) -> None:
        self.until(lambda: self.is_ready, "it was ready")

    @property
    def is_ready(self) -> bool:
        return self._ready_file.exists()

    @property
    def endpoint(self) -> str:
        return self._ready_file.read_text().strip()


class Student(Command):
    """`student.train` with --out."""

    def __init__(
        self, *arguments: object, out: Path, cwd: Path, command: Sequence[str] = ("student.train",), **where: Any
    ) -> None:
        """command: a module that runs it with something done to it, and that module's own arguments."""
        self.out = out
        super().__init__(*command, "--out", out, *arguments, cwd=cwd, **where)

    @property
    def steps_taken(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return (self.out / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    def until_step(self, step: int) -> None:
        """It may have gone far beyond it when this returns, or have ended: `holding` makes it wait."""
        self.until(lambda: self.steps_taken >= step, f"step {step}")

    def until_held_at(self, step: int) -> None:
        self.until(lambda: self.steps_taken >= step and is_held(self.pid), f"it held still at step {step}")
        assert self.steps_taken == step

    def until_parked_at(self, seq: int) -> None:
        self.until(lambda: f"parked at asked:{seq}\n" in self.errors, f"it was parked at {seq}")

    def let_go(self) -> None:
        """It goes on, where it is held still."""
        self.send(signal.SIGCONT)

    def drive_on(self) -> None:
        """It goes on, where it is parked."""
        self.send(signal.SIGUSR1)

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.out / "checkpoints").glob("step-*"))

    @property
    def summary(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.out / "summary.json").read_text())
        return content


def holding(*steps: int) -> tuple[str, str]:
    """As `command` of a Student: it holds still once the line of each of these steps is written, and its checkpoint is
    not, until it is let go. However late a test looks, it finds the trainer there."""
    return ("tests.system.dying_student", ",".join(f"stop-line:{step}" for step in steps))


def parking(seq: int) -> tuple[str, str]:
    """As `command` of a Student: its own thread waits before it takes this microbatch from the ring, until it is told
    to drive on; the ring itself goes on."""
    return ("tests.system.dying_student", f"park-asked:{seq}")


def check_refusal(command: Command, code: int, *texts: str) -> None:
    """It ends with this code and one line of error, which holds these texts; no traceback."""
    assert command.wait() == code, command.tail()
    errors = command.errors.splitlines()
    said = [line for line in errors if ": error: " in line]
    assert said == errors[-1:], f"one line of error, and the last one:\n{command.tail()}"
    assert "Traceback" not in command.errors
    for text in texts:
        assert text in said[0]


def check_untouched(student: Student) -> None:
    """A run that never began leaves nothing, not even its directory."""
    assert not student.out.exists(), list(student.out.iterdir())


def curve(out: Path) -> list[dict[str, Any]]:
    """What the run computed, a step a line; floats as they are, to the bit."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: record[name] for name in CURVE_FIELDS} for record in records]


def environment() -> dict[str, str]:
    """Of every process that a test starts."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return inherited | {
        # A test of a copy of the repository runs that copy, whatever is installed.
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
