"""A command's configuration: what is wrong with it is said in the user's words."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from ring.command import parse, run
from ring.core.errors import ConfigError, TeacherLost
from student.config import TrainConfig


def refusal(*arguments: object) -> str:
    with pytest.raises(ConfigError) as refused:
        parse(TrainConfig, [str(one) for one in arguments], prog="student.train", description="")
    assert "\n" not in str(refused.value)
    assert "<class" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--steps", "ten"), "--steps must be a whole number, got 'ten'"),
        (("--steps", "1.5"), "--steps must be a whole number, got '1.5'"),
        (("--batch-size", "8 or so"), "--batch-size must be a whole number, got '8 or so'"),
        (("--lr", "small"), "--lr must be a number, got 'small'"),
        (("--precision", "fp8"), "--precision must be bf16, fp32 or fp64, got 'fp8'"),
        (("--resume", "maybe"), "--resume must be true or false, got 'maybe'"),
        (("--stepz", "3"), "unrecognized arguments: --stepz 3 (the closest is --steps); allowed flags: "),
        (("--nonsense", "3"), "unrecognized arguments: --nonsense 3; allowed flags: student.train --help"),
        (("--batch-size",), "--batch-size: expected one argument"),
        (("--config",), "--config: expected one argument"),
    ],
)
def test_a_wrong_flag_is_named_with_what_is_allowed(arguments: tuple[str, ...], said: str) -> None:
    assert said in refusal(*arguments)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("data: train.jsonl", "data must be a list, as in [one, two], got 'train.jsonl'"),
        ("teacher: tcp://127.0.0.1:5555", "teacher must be a list, as in [one, two], got 'tcp://127.0.0.1:5555'"),
        ("teacher: [1, 2]", "teacher must be a list, as in [one, two], got [1, 2]"),
        ("data: {a: 1}", "data must be a list, as in [one, two], got {'a': 1}"),
        ("steps: ten", "steps must be a whole number or null, got 'ten'"),
        ("seed: null", "seed must be a whole number, got None"),
        ("resume: 3", "resume must be true or false, got 3"),
        ("lr: yes", "lr must be a number, got True"),
        ("precision: fp8", "precision must be bf16, fp32 or fp64, got 'fp8'"),
        ("batch-size: 3", "no setting is called 'batch-size' (the closest is batch_size); allowed: "),
        ("config: other.yaml", "no setting is called 'config'"),
        ("7: 3", "no setting is called 7"),
        ("- a list", "it holds a list; allowed: settings"),
        ("", "it holds nothing; allowed: settings"),
        ("steps: [1", "it is no YAML: "),
        ("\xff\xfe\x00", "it is no YAML: "),
        ("[" * 5000, "it is no YAML: "),
    ],
)
def test_what_is_wrong_with_a_file_is_named_with_what_is_allowed(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(content.encode("latin-1"))
    for arguments in (("--config", file), (f"--config={file}",), ("--seed", 1, "--config", file, "--steps", 3)):
        text = refusal(*arguments)
        assert text.startswith(f"--config {file}: ")
        assert said in text


def test_a_home_directory_is_meant_in_every_flag_that_takes_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "settings.yaml").write_text("cache_dir: ~/cache\nrun_name: ~/name\n")
    flags = ["--config=~/settings.yaml", "--student=~/a", "--teacher=~/b", "--data", "~/c/*.jsonl", "d", "--out=~/e"]
    found = parse(TrainConfig, flags, prog="student.train", description="")
    home = str(tmp_path)
    assert (found.cache_dir, found.student, found.out) == (f"{home}/cache", f"{home}/a", f"{home}/e")
    assert (found.teacher, found.data) == ((f"{home}/b",), (f"{home}/c/*.jsonl", "d"))
    assert found.run_name == "~/name", "what is no path stays as it is"
    assert found.auth is None


def test_a_file_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    assert refusal("--config", tmp_path / "x") == (
        f"--config {tmp_path / 'x'}: No such file or directory; allowed: a YAML or JSON file of settings"
    )
    assert "Is a directory; allowed: a YAML or JSON file of settings" in refusal("--config", tmp_path)


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_what_print_config_prints_can_be_read_again(
    tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--data", "a", "b", "--lr", "1e-7", "--steps", "3", "--packing", "--clip-norm", "2"]
    with pytest.raises(SystemExit):
        parse(TrainConfig, [*arguments, "--print_config"], prog="student.train", description="")
    file = tmp_path / f"run.{suffix}"
    file.write_text(capsys.readouterr().out)
    read = parse(TrainConfig, ["--config", str(file)], prog="student.train", description="")
    assert read == parse(TrainConfig, arguments, prog="student.train", description="")


def test_numbers_may_be_written_as_python_writes_them(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("lr: 1e-3\nclip_norm: 2\nbeta1: .5\n")
    read = parse(TrainConfig, ["--config", str(file)], prog="student.train", description="")
    assert (read.lr, read.clip_norm, read.beta1) == (1e-3, 2.0, 0.5)


@pytest.mark.parametrize("debug", [True, False])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TeacherLost("gone"), 3),
        (ValueError("odd"), 1),
        (KeyboardInterrupt(), 130),
        (KeyboardInterrupt(signal.SIGTERM), 143),
    ],
)
def test_a_log_on_a_full_disk_changes_no_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, debug: bool
) -> None:
    def command() -> None:
        raise error

    full = Path("/dev/full").open("w", buffering=1)  # noqa: SIM115 - closing it fails
    try:
        monkeypatch.setattr("sys.stderr", full)
        assert run(command, prog="it", debug=debug) == code
    finally:
        monkeypatch.undo()
        with contextlib.suppress(OSError):  # it still has what it could not write
            full.close()


@pytest.mark.parametrize("error", [ValueError("odd"), ConfigError("no such model")])
def test_ctrl_c_that_a_library_makes_something_else_of_is_ctrl_c_all_the_same(
    capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def command() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            raise error from None

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the suite was started with
    try:
        assert run(command, prog="it", debug=False) == 130
        assert capsys.readouterr().err == "it: interrupted\n"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_command_without_outputs_keeps_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python starts where they are closed."""

    def command() -> None:
        print("a result")
        raise TeacherLost("gone")

    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert run(command, prog="it", debug=True, waits_for_output=False) == 3
    for opened in (sys.stdin, sys.stdout, sys.stderr):
        opened.close()
