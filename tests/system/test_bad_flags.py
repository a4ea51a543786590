"""What can't be asked for: one line that says so, exit 2, and nothing half-written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.system.conftest import Inputs
from tests.system.processes import Command, Student, check_refusal

BAD_FLAGS = [
    (("--nonsense", "3"), "unrecognized arguments: --nonsense"),
    (("--steps", "ten"), "--steps must be a whole number, got 'ten'"),
    (("--steps", "0"), "--steps must be >= 1, got 0"),
    (("--steps", "5", "--epochs", "1"), "--steps 5 and --epochs 1: give one of them"),
    (("--batch-size", "0"), "--batch-size must be >= 1, got 0"),
    (("--max-batch-tokens", "3000000000"), "--max-batch-tokens must be <= 2147483647, got 3000000000"),
    (("--ring-depth", "5000"), "depth + num_spares must be <= 4096, got 5000 + "),
    (("--lr", "-1"), "--lr must be > 0, got -1"),
    (("--lr", "nan"), "lr"),
    (("--rank-timeout", "1e15"), "--rank-timeout must be <= 1e+09, got 1000000000000000.0"),
    (("--checkpoint-timeout", "1e15"), "--checkpoint-timeout must be <= 1e+09, got 1000000000000000.0"),
    (("--precision", "fp8"), "--precision must be bf16, fp32 or fp64, got 'fp8'"),
    (("--loss", "half"), "half"),
    (("--min-lr-frac", "2"), "--min-lr-frac must be 0 to 1, got 2"),
    (("--kd-weight", "0", "--ce-weight", "0"), "--kd-weight and --ce-weight are both 0"),
    (("--run-name", "x" * 300), "--run-name must have at most 256 bytes, got 300"),
    (("--seed", "-1"), "--seed must be 0 to 2^63 - 1, got -1"),
    (("--threads", "100000"), "--threads must be at most 4096, got 100000"),
    (("--teacher-timeout", "0"), "--teacher-timeout must be > 0, got 0"),
    (("--request-timeout", "1e10"), "--request-timeout must be <= 1e+09, got 10000000000.0"),
    (("--config", "/no/such/file.yaml"), "--config /no/such/file.yaml: No such file or directory; allowed: "),
    (("--fsdp",), "--fsdp needs ranks, as torchrun"),
    (("--vocab-parallel", "2"), "--vocab-parallel needs ranks, as torchrun"),
    (("--layout", "colocated"), "--layout colocated needs --teacher DIR|ID"),
    (("--layout", "colocated", "--teacher", ""), "--teacher names nothing; allowed with --layout colocated: DIR|ID"),
    (("--teacher", ""), "--teacher names no replica, got ''; allowed: tcp://HOST:PORT"),
    (("--teacher", ","), "--teacher names no replica, got ','; allowed: tcp://HOST:PORT"),
    (("--student", ""), "--student names nothing; allowed: a name, or no --student for the demo's"),
    (("--data", ""), "--data names nothing; allowed: a name, or no --data for the demo's"),
]


@pytest.mark.parametrize(("flags", "text"), BAD_FLAGS, ids=[" ".join(flags)[:30] for flags, _ in BAD_FLAGS])
def test_a_flag_that_the_trainer_does_not_take(
    tmp_path: Path, inputs: Inputs, processes: list[Command], flags: tuple[str, ...], text: str
) -> None:
    student = Student("--student", inputs.student, "--data", inputs.data, *flags, out=tmp_path / "out", cwd=tmp_path)
    processes.append(student)
    check_refusal(student, 2, "student.train: error: ", text)
    assert not student.out.exists()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("nonsense: 3\n", "nonsense"),
        ("steps: ten\n", "steps"),
        ("batch_size: 0\n", "--batch-size must be >= 1, got 0"),
        ("- a list\n", "it holds a list; allowed: settings"),
        ("steps: [1\n", "it is no YAML"),
    ],
)
def test_a_file_of_settings_that_can_not_be_used(
    tmp_path: Path, inputs: Inputs, processes: list[Command], content: str, text: str
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(content)
    student = Student(
        *("--config", file, "--student", inputs.student, "--data", inputs.data), out=tmp_path / "out", cwd=tmp_path
    )
    processes.append(student)
    check_refusal(student, 2, "student.train: error: ", text)
    assert not student.out.exists()


def test_flags_win_over_the_file_of_settings(
    endpoint: str, inputs: Inputs, tmp_path: Path, processes: list[Command]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"student: {inputs.student}\ndata: [{inputs.data}]\nteacher: [{endpoint}]\nsteps: 9\nbatch_size: 4\n"
        f"max_length: 32\nprecision: fp32\nlr: 0.01\ncache_dir: {inputs.root / 'cache'}\n"
    )
    student = Student("--config", file, "--steps", 3, "--lr=0.002", out=tmp_path / "out", cwd=tmp_path)
    processes.append(student)
    student.succeed()
    settings = json.loads((student.out / "run.json").read_text())
    assert (settings["steps"], settings["lr"], settings["batch_size"]) == (3, 0.002, 4)
    assert student.steps_taken == 3


def test_bare_commands_name_what_they_need_where_there_is_no_demo(tmp_path: Path, processes: list[Command]) -> None:
    teacher, student = (Command(module, cwd=tmp_path) for module in ("teacher.serve", "student.train"))
    processes += [teacher, student]
    check_refusal(teacher, 2, "--model not given", "give --model DIR|ID, or run `make demo`")
    check_refusal(student, 2, "--student and --data not given", "--teacher tcp://HOST:PORT", "make demo")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--nonsense",), "unrecognized arguments"),
        (("--listen", "5555"), "--listen '5555' is not an endpoint"),
        (("--listen", "tcp://0.0.0.0:0"), "--listen"),
        (("--listen", "tcp://0.0.0.0:5557"), "--listen tcp://0.0.0.0:5557 leaves this machine"),
        (("--transport", "pigeon"), "no transport is called 'pigeon'"),
        (("--max-batch-tokens", "0"), "--max-batch-tokens must be >= 1, got 0"),
        (("--max-batch-tokens", "3000000000"), "--max-batch-tokens must be <= 2147483647, got 3000000000"),
        (("--student-timeout", "0"), "--student-timeout must be > 0, got 0"),
        (("--student-timeout", "1e10"), "--student-timeout must be <= 1e+09, got 10000000000.0"),
        (("--threads", "-1"), "--threads must be 0 to 4096, got -1"),
        (("--dtype", "int4"), "int4"),
        (("--device", "abacus"), "teacher --device abacus: "),
        (("--device", "cuda:7"), "teacher --device cuda:7: "),
        (("--replica", "x" * 300), "--replica must have at most 256 bytes, got 300"),
        (("--ready-file", "/no/such/dir/ready"), "--ready-file '/no/such/dir/ready' can't be written"),
        (("--ready-file", "/proc/ready"), "--ready-file '/proc/ready' can't be written"),
    ],
    ids=lambda one: " ".join(one)[:40] if isinstance(one, tuple) else "",
)
def test_a_flag_that_the_teacher_does_not_take(
    tmp_path: Path, inputs: Inputs, processes: list[Command], flags: tuple[str, ...], text: str
) -> None:
    teacher = Command("teacher.serve", "--model", inputs.teacher, "--listen", "tcp://127.0.0.1:*", *flags, cwd=tmp_path)
    processes.append(teacher)
    check_refusal(teacher, 2, "teacher.serve: error: ", text)
    assert teacher.output == ""


def test_a_port_in_use_is_said_before_the_model_is_loaded(
    tmp_path: Path, endpoint: str, processes: list[Command]
) -> None:
    second = Command("teacher.serve", "--model", "/no/such/model", "--listen", endpoint, cwd=tmp_path)
    processes.append(second)
    check_refusal(
        second, 2, f"--listen {endpoint} can't be bound: Address already in use", "allowed: a free local port"
    )


def test_a_teacher_that_finds_its_port_taken_leaves_the_ready_file_of_the_one_that_has_it(
    tmp_path: Path, endpoint: str, processes: list[Command]
) -> None:
    ready = tmp_path / "ready"
    ready.write_text(endpoint)
    second = Command(
        *("teacher.serve", "--model", "/no/such/model", "--listen", endpoint, "--ready-file", ready), cwd=tmp_path
    )
    processes.append(second)
    assert second.wait() == 2
    assert ready.read_text() == endpoint


def test_a_ready_file_of_an_earlier_life_is_not_left_to_be_believed(
    tmp_path: Path, inputs: Inputs, processes: list[Command]
) -> None:
    ready = tmp_path / "ready"
    ready.write_text("tcp://127.0.0.1:1\n")
    failing = Command(
        "teacher.serve",
        "--model",
        "/no/such/model",
        "--listen",
        "tcp://127.0.0.1:*",
        "--ready-file",
        ready,
        cwd=tmp_path,
    )
    processes.append(failing)
    assert failing.wait() == 2
    assert not ready.exists()
