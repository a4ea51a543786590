"""Where a run's output goes may be anything: a terminal that goes away or is frozen, or nothing at all."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.conftest import Inputs, Start
from tests.system.processes import HANG_GUARD_S, Student, environment, holding

LABELS_ALONE = ("--kd-weight", 0, "--ce-weight", 1)


class Terminal:
    """What a command writes to; `screen` is the side that somebody looks at."""

    def __init__(self) -> None:
        self.screen, self._fd = pty.openpty()
        termios.tcsetwinsize(self._fd, (25, 160))
        self.name = os.ttyname(self._fd)

    def freeze(self) -> None:
        """As Ctrl-S does."""
        termios.tcflow(self._fd, termios.TCOOFF)

    def go_away(self) -> None:
        for fd in (self.screen, self._fd):
            with contextlib.suppress(OSError):
                os.close(fd)
        self.screen = self._fd = -1

    def read_to_the_end(self) -> bytes:
        """What is shown until the last writer has closed it."""
        os.close(self._fd)
        self._fd = -1
        said = b""
        with contextlib.suppress(OSError):  # as a terminal says that nobody writes to it any more
            while received := os.read(self.screen, 65536):
                said += received
        return said


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.go_away()


@pytest.fixture
def settings(inputs: Inputs) -> tuple[object, ...]:
    return (*LABELS_ALONE, "--eval-data", inputs.eval_data, "--eval-every", 5)


def test_a_run_on_a_terminal_shows_its_progress_and_says_its_result_last(
    settings: tuple[object, ...], terminal: Terminal, start_student: Start
) -> None:
    student = start_student(*settings, "--steps", 6, terminal=terminal.name, env={"TERM": "xterm", "COLUMNS": "160"})
    shown: list[bytes] = []
    student.until_step(1)  # it has opened the terminal
    reader = threading.Thread(target=lambda: shown.append(terminal.read_to_the_end()))
    reader.start()
    student.succeed()
    reader.join(HANG_GUARD_S)
    (said,) = (one.decode() for one in shown)
    assert "6/6" in said
    assert "lm " in said
    assert said.index("step 0: held-out loss") < said.index("step 5: held-out loss") < said.index("6/6")
    assert said.rstrip().splitlines()[-1].removeprefix("\x1b[?25h").startswith("trained 6 steps, ")
    assert said.rindex("\x1b[?25h") > said.rindex("\x1b[?25l"), "the cursor is shown again"


def test_a_terminal_that_goes_away_costs_a_run_neither_steps_nor_its_model(
    settings: tuple[object, ...], terminal: Terminal, start_student: Start
) -> None:
    """Of a run that ignores SIGHUP, as `trap '' HUP` has it."""
    student = start_student(*settings, "--steps", 12, command=holding(4), terminal=terminal.name)
    student.until_held_at(4)
    terminal.go_away()
    student.let_go()
    assert student.wait() == 0
    assert student.steps_taken == 12
    assert student.summary["ending"] == "finished"
    assert (student.out / "model" / "config.json").exists()


def test_the_hangup_that_comes_with_it_ends_the_run_as_it_always_does(
    settings: tuple[object, ...], terminal: Terminal, start_student: Start
) -> None:
    student = start_student(*settings, "--steps", 100, command=holding(4), terminal=terminal.name)
    student.until_held_at(4)
    terminal.go_away()
    student.send(signal.SIGHUP)
    student.let_go()
    assert student.wait() == 129
    assert student.summary["ending"].startswith("Interrupted: stopped by SIGHUP after step ")
    assert student.checkpoints == [f"step-{student.steps_taken:08}"]


def test_a_frozen_terminal_holds_up_neither_training_nor_a_signal(
    settings: tuple[object, ...], terminal: Terminal, start_student: Start
) -> None:
    """From the first line that the command would say."""
    terminal.freeze()
    student: Student = start_student(*settings, "--steps", 100_000, terminal=terminal.name)
    student.until_step(30)
    student.send(signal.SIGTERM)
    assert student.wait() == 143
    assert student.summary["ending"].startswith("Interrupted: stopped by SIGTERM after step ")
    assert student.checkpoints == [f"step-{student.steps_taken:08}"]


def test_a_frozen_terminal_holds_up_no_teacher(terminal: Terminal, start_teacher: Start) -> None:
    terminal.freeze()
    teacher = start_teacher(terminal=terminal.name)
    teacher.send(signal.SIGTERM)
    assert teacher.wait() == 0


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-"])
def test_where_an_output_is_closed_a_wrong_flag_has_its_exit_code(tmp_path: Path, closed: str) -> None:
    ended = run_closed(closed, "student.train", "--lr", -1, cwd=tmp_path)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert ("student.train: error: --lr" in ended.stderr) == ("2>" not in closed)


def test_a_run_whose_outputs_are_closed_trains_to_the_end(inputs: Inputs, tmp_path: Path) -> None:
    arguments = (*inputs.settings, *LABELS_ALONE, "--eval-data", inputs.eval_data, "--steps", 6, "--out", "out")
    ended = run_closed("<&- >&- 2>&-", "student.train", *arguments, cwd=tmp_path)
    assert ended.returncode == 0
    assert (tmp_path / "out" / "model" / "config.json").exists()


def test_where_an_output_is_closed_a_teacher_has_its_exit_code(tmp_path: Path) -> None:
    ended = run_closed(">&-", "teacher.serve", "--max-students", 0, cwd=tmp_path)
    assert ended.returncode == 2
    assert "teacher.serve: error: --max-students must be >= 1, got 0" in ended.stderr.splitlines()[-1]


def run_closed(closed: str, module: str, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`python -m module arguments` with what the shell does for `closed`."""
    return subprocess.run(
        ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-m", module, *map(str, arguments)],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=HANG_GUARD_S,
        check=False,
    )


@pytest.mark.parametrize("module", ["jsonargparse", "student.config", "student.train.run", "torch"])
def test_ctrl_c_in_the_midst_of_the_imports_is_one_line(tmp_path: Path, module: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTING.format(module=module))
    ended = subprocess.run(
        [sys.executable, "-m", "student.train", "--student", "x", "--data", "y", "--teacher", "tcp://127.0.0.1:1"],
        cwd=tmp_path,
        env=environment() | {"PYTHONPATH": f"{tmp_path}:{environment()['PYTHONPATH']}"},
        capture_output=True,
        text=True,
        timeout=HANG_GUARD_S,
        check=False,
    )
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (130, "student.train: interrupted")
    assert "Traceback" not in ended.stderr


def test_a_file_on_a_full_disk_that_takes_the_output_costs_no_model(
    inputs: Inputs, endpoint: str, start_student: Start
) -> None:
    student = start_student(
        *("--teacher", endpoint, "--steps", 6, "--eval-data", inputs.eval_data, "--eval-every", 3),
        terminal="/dev/full",
    )
    assert student.wait() in (0, 120), "120: Python itself could not flush its streams"
    assert student.summary["ending"] == "finished"
    assert (student.out / "model" / "config.json").exists()


#: Python imports it at its start; from then on whoever looks for `module` gets SIGINT.
INTERRUPTING = """
import os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's `&` ignores it

class Interrupting:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting)
"""
