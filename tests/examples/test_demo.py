"""The demo's processes and texts, apart from the models."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.stages import running
from examples.demo.__main__ import DemoConfig
from examples.demo.__main__ import main as demo_main
from examples.demo.memory import HIDDEN_SIZE, VOCAB_SIZE, measure
from examples.demo.samples import ANY_PROMPT, first_words
from examples.demo_cluster import main as cluster_main
from tests.tiny_models import tiny_tokenizer

#: Ends well after one signal, as a trainer that writes its checkpoint; a second one ends it badly.
ENDS_IN_ORDER = """
import pathlib, signal, sys, time
signals = []
def on_signal(number, frame):
    signals.append(number)
    if len(signals) > 1:
        sys.exit(1)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, on_signal)
pathlib.Path(sys.argv[1]).touch()
while not signals:  # no pause(): a signal just before it would not end it
    time.sleep(0.01)
end_s = time.monotonic() + 0.5
while time.monotonic() < end_s:
    time.sleep(0.05)
"""


def test_ctrl_c_leaves_a_process_the_time_to_end_in_order(tmp_path: Path) -> None:
    up = tmp_path / "up"
    command = [sys.executable, "-c", ENDS_IN_ORDER, str(up)]
    watched: list[subprocess.Popen[bytes]] = []

    def interrupted() -> None:
        with running(command, log=tmp_path / "log") as process:
            try:
                while not up.exists():
                    assert process.poll() is None
                os.kill(process.pid, signal.SIGINT)  # as a terminal does, to the demo and to its processes alike
                raise KeyboardInterrupt
            finally:
                watched.append(process)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert watched[0].returncode == 0


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([{"text": "Once upon a time"}], "Once upon a time"),
        ([{"text": ""}, {"text": None}, {"text": "second"}], "second"),
        ([{"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}], "Why?"),
        ([{"text": " "}], ANY_PROMPT),
        ([], ANY_PROMPT),
    ],
)
def test_generated_text_begins_with_what_the_records_hold(
    tmp_path: Path, records: list[dict[str, Any]], expected: str
) -> None:
    file = tmp_path / "held-out.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert first_words([str(file)], tiny_tokenizer()) == expected


def test_generated_text_begins_with_decoded_ids_where_there_is_no_text(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("a few words", add_special_tokens=False)["input_ids"]
    file = tmp_path / "held-out.jsonl"
    file.write_text(json.dumps({"input_ids": ids}) + "\n")
    assert first_words([str(file)], tokenizer) == tokenizer.decode(ids)


def test_own_students_get_a_learning_rate_for_models_that_know_something() -> None:
    own = DemoConfig(teacher="t", student="s", data=("d",))
    assert own.student_lr < DemoConfig().student_lr
    assert DemoConfig(lr=0.5).student_lr == 0.5


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--transport", "carrier-pigeon"], "allowed: shm, zmq, ucx"),
        (["--steps", "0"], "--steps must be >= 1"),
        (["--teacher", "somewhere"], "together, or none of them"),
        (["--batch-size", "0"], "--batch-size must be >= 1, got 0"),
        (["--max-length", "1"], "--max-length must be >= 2, got 1"),
        (["--max-length", "1025"], "--max-length 1025: the demo's models have positions for 1024 tokens"),
        (["--seed", "-1"], "--seed must be 0 to 2^63 - 1, got -1"),
        (["--lr", "0"], "--lr must be > 0, got 0.0"),
    ],
)
def test_a_demo_that_cannot_end_well_does_not_begin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    _does_not_begin(demo_main, [*flags, "--out", str(tmp_path / "demo")], said, capsys)
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--batch-size", "-8"], "--batch-size -8: allowed: a multiple of the 2 ranks"),
        (["--batch-size", "0"], "--batch-size 0: allowed: a multiple of the 2 ranks"),
        (["--vocab-parallel", "3"], "--vocab-parallel 3: allowed: a divisor of the 2 ranks"),
        (["--replicas", "0"], "--replicas must be >= 1, got 0"),
    ],
)
def test_a_demo_of_a_cluster_that_cannot_end_well_does_not_begin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    _does_not_begin(cluster_main, [*flags, "--out", str(tmp_path / "demo")], said, capsys)
    assert not (tmp_path / "demo").exists()


def _does_not_begin(
    command: Callable[[list[str]], int], arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert said in lines[0]


def test_what_the_fused_loss_takes_is_no_less_than_the_gradient_that_it_sums() -> None:
    """A peak of the call before it, or of making its inputs, is not taken off."""
    assert measure("fused") > VOCAB_SIZE * HIDDEN_SIZE * 4
