"""What a run says of itself: its memory, and lines that were lost or can't be written."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import pty
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from student.checkpoint import CheckpointError
from student.metrics import MetricsFile, Reporter, StepMetrics, peak_rss_bytes, write_summary
from student.train.resume import warn_of_gaps
from tests.limits import descriptors_below

BALLAST_BYTES = 512 * 2**20


def test_peak_memory_is_of_this_process_and_not_of_the_one_that_started_it() -> None:
    ballast = np.ones(BALLAST_BYTES, dtype=np.uint8)
    assert peak_rss_bytes() > BALLAST_BYTES
    code = "from student.metrics import peak_rss_bytes; print(peak_rss_bytes())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert ballast.nbytes == BALLAST_BYTES  # still held while the other process ran
    assert 0 < int(said) < BALLAST_BYTES


def test_a_disk_that_takes_no_line_says_which_file_and_what_is_left(tmp_path: Path) -> None:
    """As a full disk does, in the midst of a line; the resumed run cuts it off."""
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, resume_step=0)
    file.write({"step": 1, "loss": 2.5})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 7, limits[1]))
    try:
        with pytest.raises(CheckpointError) as caught:
            file.write({"step": 2, "loss": 2.25})
        file.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(caught.value).startswith(f"{path} could not be written: {os.strerror(errno.EFBIG)}; ")
    assert "--resume goes on" in str(caught.value)
    assert not path.read_text().endswith("\n"), "the line is torn"
    resumed = MetricsFile(path, resume_step=1)
    resumed.write({"step": 2, "loss": 2.25})
    assert resumed.column("loss") == {1: 2.5, 2: 2.25}
    resumed.close()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.unlink(), "lacks 4 of the 4 steps that the checkpoint contains, from step 1 on"),
        (
            lambda path: path.write_text(path.read_text().replace('"step": 3', '"step": three')),
            "lacks 1 of the 4 steps",
        ),
        (lambda path: path.write_bytes(path.read_bytes().replace(b'"step": 2', b'"st\xffp": 2')), "from step 2 on"),
        (lambda path: path.write_text(path.read_text().replace('"step": 4', '"step": []')), "from step 4 on"),
        (lambda path: None, ""),
    ],
)
def test_lines_that_are_gone_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], object], said: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, resume_step=0)
    for step in range(1, 6):
        file.write({"step": step})
    file.close()
    damage(path)
    with caplog.at_level(logging.WARNING):
        resumed = MetricsFile(path, resume_step=4)
        warn_of_gaps(resumed, step=4)
        resumed.close()
    assert said in caplog.text
    assert bool(caplog.text) == bool(said)


@pytest.mark.parametrize("name", ["out[v2]", "out[/b]", "out:smile:"])
def test_a_path_on_a_terminal_is_said_as_it_is(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Beside the progress bar, which knows markup."""
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "200")
    screen, terminal = pty.openpty()
    with open(terminal, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with Reporter(num_steps=1, first_step=0) as reporter:
            reporter.say(f"the model is in {name}/model")
    said = b""
    with contextlib.suppress(OSError):  # as a terminal says that nobody writes to it any more
        while received := os.read(screen, 65536):
            said += received
    os.close(screen)
    assert f"the model is in {name}/model" in said.decode()


def test_a_long_run_without_a_terminal_says_a_line_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    now_s = 0.0
    with Reporter(num_steps=100_000, first_step=0, clock=lambda: now_s) as reporter:
        for step in range(1, 31):
            now_s += 7.0
            reporter.step(StepMetrics(**{field.name: step for field in dataclasses.fields(StepMetrics)}))
    said = [int(line.split()[1].split("/")[0]) for line in capsys.readouterr().out.splitlines()]
    assert said == [1, 10, 19, 28]


def test_a_full_disk_behind_stdout_ends_no_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = Path("/dev/full").open("w")  # noqa: SIM115 - closing it fails
    try:
        monkeypatch.setattr("sys.stdout", full)
        reporter = Reporter(num_steps=1, first_step=0)
        for _ in range(2):
            reporter.say("a result")
    finally:
        monkeypatch.undo()
        with contextlib.suppress(OSError):  # it still has what it could not write
            full.close()
    assert caplog.text.count("the standard output takes nothing any more (No space left on device)") == 1


@pytest.mark.parametrize("name", ["run.json", "summary.json"])
def test_a_disk_that_takes_no_summary_says_so_and_keeps_the_one_before(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write_summary(path, {"ending": "before"})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (7, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=f"{name} could not be written: .*; what is beside it is untouched"):
            write_summary(path, {"ending": "after"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [(found.name, "before" in found.read_text()) for found in tmp_path.iterdir()] == [(name, True)]


def test_the_peak_is_known_without_a_descriptor() -> None:
    """It is asked for after each step, and no reason to end one."""
    with descriptors_below(0):
        assert peak_rss_bytes() > 1 << 20
