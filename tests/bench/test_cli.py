"""The commands in front of the commands: who is run, with what, and which exit code comes back."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import bench.__main__ as bench_main
from bench.cli import COMMANDS, Entry, dispatch, main


@pytest.mark.parametrize("arguments", [[], ["plam"], ["--model", "x"]])
def test_anything_but_a_subcommand_is_one_clear_line_and_exit_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert "serve, train, plan, bench" in line
    assert (repr(arguments[0]) if arguments else "none") in line


def test_help_names_every_subcommand_without_loading_torch() -> None:
    code = "import sys; from bench.cli import main; print(main(['--help'])); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *lines, exit_code, torch_loaded = done.stdout.splitlines()
    assert (exit_code, torch_loaded) == ("0", "False")
    for name in COMMANDS:
        assert any(line.split()[:1] == [name] for line in lines)


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("disaggkd ")


def test_a_subcommand_gets_the_other_arguments_and_gives_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "command_of_the_test.py").write_text("def main(argv):\n    print(argv)\n    return 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    commands = {"go": Entry("command_of_the_test", "")}
    assert dispatch("test", commands, ["go", "--help", "go"]) == 3
    assert capsys.readouterr().out == "['--help', 'go']\n"


@pytest.mark.parametrize(
    ("subcommand", "prog"),
    [("serve", "teacher.serve"), ("train", "student.train"), ("plan", "planner"), ("bench", "bench")],
)
def test_each_subcommand_is_the_python_m_command(
    subcommand: str, prog: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([subcommand, "--no-such-flag"]) == 2
    assert capsys.readouterr().err.startswith(f"{prog}: error: ")


@pytest.mark.parametrize("entry", [*COMMANDS.values(), *bench_main.BENCHES.values()], ids=lambda entry: entry.module)
def test_every_command_that_help_names_is_there(entry: Entry) -> None:
    assert importlib.util.find_spec(entry.module) is not None


def test_all_takes_no_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_main.main(["all", "--rounds", "1"]) == 2
    assert "--rounds 1" in capsys.readouterr().err


def test_all_runs_every_bench_in_a_process_and_fails_if_one_does(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # The names are looked up anew in each process, which does not know these two.
    unknown = {"first": Entry("x", ""), "second": Entry("y", "")}
    monkeypatch.setattr(bench_main, "BENCHES", unknown)
    assert bench_main.main(["all"]) == 1
    errors = capfd.readouterr().err
    assert "found 'first'" in errors
    assert "found 'second'" in errors
    assert errors.splitlines()[-1] == "bench: failed: first (exit 2), second (exit 2)"
