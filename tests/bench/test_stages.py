"""The processes of demos and reports end with them, however that is."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.stages import POLL_S, running
from tests.tiny_models import build_tiny_checkpoint

#: A hang guard; what is waited for takes seconds.
GUARD_S = 200

PARENT = """
import sys
from pathlib import Path
from bench.stages import running
with running(["sleep", "600"], log=Path(sys.argv[1])) as process:
    print(process.pid, flush=True)
    process.wait()
"""


def ends(pid_fd: int) -> bool:
    return bool(select.select([pid_fd], [], [], GUARD_S)[0])


def test_a_process_ends_with_a_demo_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        try:
            # SIGKILL: nothing in the parent can tidy up.
            parent.kill()
            assert ends(child)
        finally:
            os.close(child)


def test_a_process_ends_with_its_block_and_its_words_are_in_the_log(tmp_path: Path) -> None:
    code = "import sys, time; print('out', flush=True); print('err', file=sys.stderr, flush=True); time.sleep(600)"
    log = tmp_path / "log"
    with running([sys.executable, "-c", code], log=log) as process:
        while "err" not in log.read_text():
            assert process.poll() is None
            select.select([], [], [], POLL_S)
    assert process.returncode == -signal.SIGTERM
    assert log.read_text().split() == ["out", "err"]


def test_a_block_that_fails_ends_its_process_all_the_same(tmp_path: Path) -> None:
    with pytest.raises(KeyError), running(["sleep", "600"], log=tmp_path / "log") as process:
        raise KeyError
    assert process.returncode == -signal.SIGTERM


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_sigterm_ends_a_report_with_its_trainer(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "The ring turns, and the slots are full. " * 200}) + "\n")
    models = [
        arg for name in ("teacher", "student") for arg in (f"--{name}", str(build_tiny_checkpoint(tmp_path / name)))
    ]
    flags = [*models, "--data", str(text), "--sequence-tokens", "32", "--steps", "100000"]
    command = [sys.executable, "-m", "bench", "report", *flags, "--out", str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as report:
        assert report.stderr is not None
        while not (found := children(report.pid)):
            assert report.poll() is None, report.stderr.read()
            select.select([], [], [], POLL_S)
        child = os.pidfd_open(found[0])
        try:
            report.send_signal(signal.SIGTERM)
            assert ends(child)
            assert report.wait(timeout=GUARD_S) == 130
        finally:
            os.close(child)
