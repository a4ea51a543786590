"""Models, data and teachers that are not whole or don't fit: one line with what was found and what is allowed."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.system.conftest import NUM_STEPS, Inputs, Start
from tests.system.processes import Command, Student, Teacher, check_refusal, check_untouched
from tests.tiny_models import build_tiny_checkpoint, tiny_tokenizer


@pytest.fixture
def broken(tmp_path: Path, inputs: Inputs) -> Callable[[str], Path]:
    """A copy of the student's checkpoint with one thing wrong."""

    def make(what: str) -> Path:
        path = tmp_path / what.replace(" ", "-")
        shutil.copytree(inputs.student, path)
        weights = path / "model.safetensors"
        match what:
            case "no config":
                (path / "config.json").unlink()
            case "no weights":
                weights.unlink()
            case "truncated weights":
                weights.write_bytes(weights.read_bytes()[:1000])
            case "config of nothing":
                (path / "config.json").write_text('{"model_type": "no-such-model"}')
            case "config cut off":
                (path / "config.json").write_text((path / "config.json").read_text()[:100])
            case "other sizes":
                config = json.loads((path / "config.json").read_text())
                (path / "config.json").write_text(json.dumps(config | {"intermediate_size": 60}))
            case "no tokenizer":
                for file in path.glob("*token*"):
                    file.unlink()
            case "empty":
                shutil.rmtree(path)
                path.mkdir()
            case _:
                raise ValueError(what)
        return path

    return make


@pytest.mark.parametrize("command", ["teacher.serve", "student.train"])
@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("no config", "no config.json"),
        ("no weights", "no weights"),
        ("truncated weights", "weights: "),
        ("config of nothing", "config.json: "),
        ("config cut off", "config.json: "),
        ("other sizes", "6 mismatched keys in its weights (model.layers.0.mlp.down_proj.weight is [32, 64], "),
        ("empty", "an empty directory"),
    ],
)
def test_a_checkpoint_that_is_not_whole(
    tmp_path: Path,
    inputs: Inputs,
    endpoint: str,
    broken: Callable[[str], Path],
    processes: list[Command],
    command: str,
    what: str,
    text: str,
) -> None:
    path = broken(what)
    if command == "teacher.serve":
        teacher = Teacher(path, cwd=tmp_path, wait=False)
        processes.append(teacher)
        check_refusal(teacher, 2, f"teacher.serve: error: teacher {path}: ", text)
        assert "ready" not in teacher.output
        assert not list(tmp_path.glob("ready-*"))
    else:
        student = Student(
            *inputs.settings, "--student", path, "--teacher", endpoint, out=tmp_path / "out", cwd=tmp_path
        )
        processes.append(student)
        check_refusal(student, 2, f"student.train: error: student {path}: ", text)
        check_untouched(student)


def test_a_checkpoint_without_its_tokenizer(
    tmp_path: Path, inputs: Inputs, endpoint: str, broken: Callable[[str], Path], start_student: Start
) -> None:
    path = broken("no tokenizer")
    check_refusal(Teacher(path, cwd=tmp_path, wait=False), 2, f"teacher {path}: no tokenizer")
    check_refusal(start_student("--student", path, "--teacher", endpoint), 2, str(inputs.data), "need a tokenizer")
    ids = tmp_path / "ids.jsonl"
    ids.write_text(json.dumps({"input_ids": list(range(10))}) + "\n")
    student = start_student("--student", path, "--teacher", endpoint, "--data", ids, "--steps", 1, "--warmup-steps", 0)
    check_refusal(
        student, 2, f"student {path}: no tokenizer, so nothing says that its token ids mean what the teacher's"
    )
    check_untouched(student)


@pytest.mark.parametrize("command", ["teacher.serve", "student.train"])
@pytest.mark.parametrize(("name", "text"), [("/no/such/dir", "no such directory"), ("{file}", "it is a file")])
def test_a_model_that_is_not_there(
    tmp_path: Path, inputs: Inputs, processes: list[Command], command: str, name: str, text: str
) -> None:
    name = name.format(file=inputs.data)
    if command == "teacher.serve":
        one: Command = Teacher(Path(name), cwd=tmp_path, wait=False)
    else:
        one = Student(
            *inputs.settings, "--student", name, "--teacher", "tcp://127.0.0.1:1", out=tmp_path / "o", cwd=tmp_path
        )
    processes.append(one)
    check_refusal(one, 2, name, text)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "no such file; allowed: files, or patterns that match some"),
        ("", "no data to train on"),
        ('{"text": ""}\n', "no data to train on"),
        ('{"words": "a b c"}\n', "words"),
        ('{"text": "cut o', "can't be read as json"),
        ('{"text": 7}\n', "`text` is int"),
    ],
    ids=["missing", "empty", "blank", "no column", "cut off", "number"],
)
def test_data_that_can_not_be_trained_on(
    tmp_path: Path, endpoint: str, start_student: Start, content: str | None, text: str
) -> None:
    data = tmp_path / "data.jsonl"
    if content is not None:
        data.write_text(content)
    student = start_student("--data", data, "--teacher", endpoint, "--cache-dir", tmp_path / "cache")
    check_refusal(student, 2, str(data), text)
    check_untouched(student)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--max-length", 500), "--max-length 500: the student has positions for 128 tokens"),
        (("--warmup-steps", 100), f"warm-up of 100 steps; allowed: 0 to {NUM_STEPS}"),
        (("--device", "cuda:7"), "--device cuda:7: "),
        (("--device", "abacus"), "--device abacus: "),
        (("--jsd-teacher-weight", 1.0, "--divergence", "jsd"), "--jsd-teacher-weight must be "),
        (("--long-documents", "error", "--max-length", 8), "tokens"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_the_model_or_the_data(
    endpoint: str, start_student: Start, flags: tuple[object, ...], text: str
) -> None:
    student = start_student("--teacher", endpoint, *flags)
    check_refusal(student, 2, text)
    check_untouched(student)


def test_packing_is_refused_for_a_model_that_would_mix_the_documents(
    tmp_path: Path, endpoint: str, start_student: Start
) -> None:
    hybrid = build_tiny_checkpoint(tmp_path / "hybrid", "qwen3_5", seed=6)
    student = start_student("--student", hybrid, "--teacher", endpoint, "--packing")
    check_refusal(student, 2, "--packing: ", "Qwen3_5ForCausalLM", "train this model without --packing")
    check_untouched(student)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            ("--teacher", "localhost:5555"),
            "--teacher 'localhost:5555' is not an endpoint; allowed: tcp://HOST:PORT",
        ),
        (("--teacher", "tcp://10.1.2.3:5555"), "--teacher tcp://10.1.2.3:5555 leaves this machine"),
        (("--teacher", "tcp://127.0.0.1:1,tcp://127.0.0.1:1"), "--teacher names an endpoint twice"),
        (("--bind-host", "10.1.2.3"), "--bind-host tcp://10.1.2.3:* leaves this machine"),
        (("--auth", "/no/such/keys"), "--auth /no/such/keys: no such directory"),
        (("--transport", "pigeon"), "no transport is called 'pigeon'"),
        (("--transport", "local"), "transport 'local' stays within one process"),
        (("--layout", "colocated", "--teacher", "/no/such/teacher"), "teacher '/no/such/teacher': no such directory"),
        (("--layout", "colocated", "--teacher", "a", "b"), "--layout colocated takes one --teacher DIR|ID, got 2"),
    ],
    ids=lambda one: " ".join(one)[:50] if isinstance(one, tuple) else "",
)
def test_what_is_wrong_with_the_teachers_flags_is_said_before_anything_is_loaded(
    start_student: Start, flags: tuple[str, ...], text: str
) -> None:
    student = start_student("--student", "/no/such/model", "--data", "/no/such/data", *flags)
    check_refusal(student, 2, text)
    check_untouched(student)


def test_an_unreachable_teacher_ends_the_run_with_3_when_its_time_is_over(start_student: Start) -> None:
    nobody = f"tcp://127.0.0.1:{free_port()}"
    student = start_student("--teacher", nobody, "--teacher-timeout", 1)
    check_refusal(student, 3, f"no teacher answered within 1 s: {nobody}: no answer yet")
    check_untouched(student)


def test_something_else_at_the_teachers_port_is_no_teacher(start_student: Start) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        name = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        check_refusal(
            start_student("--teacher", name, "--teacher-timeout", 1), 3, f"no teacher answered within 1 s: {name}"
        )


def test_tokenizers_that_differ_are_refused_with_both_hashes(
    tmp_path: Path, inputs: Inputs, endpoint: str, start_student: Start
) -> None:
    other = tmp_path / "other"
    shutil.copytree(inputs.student, other)
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    student = start_student("--student", other, "--teacher", endpoint)
    check_refusal(
        student, 2, f"teacher {endpoint} refuses this student: the tokenizers differ", "allowed: the same token"
    )
    check_untouched(student)


def test_a_larger_vocabulary_is_refused_with_both(
    tmp_path: Path, inputs: Inputs, endpoint: str, start_student: Start
) -> None:
    larger = build_tiny_checkpoint(tmp_path / "larger", "qwen3", seed=2, vocab_size=328)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<more>", "<and more>"])
    tokenizer.save_pretrained(larger)
    student = start_student("--student", larger, "--teacher", endpoint)
    check_refusal(student, 2, "refuses this student")
    check_untouched(student)


def test_a_microbatch_larger_than_the_teacher_takes(start_teacher: Start, start_student: Start) -> None:
    small = start_teacher("--max-batch-tokens", 100)
    student = start_student("--teacher", small.endpoint)
    check_refusal(student, 2, "the teacher takes 100 in a request", "lower --batch-size", "--max-batch-tokens")
    check_untouched(student)


def test_a_replica_that_takes_too_little_does_not_begin_the_run_however_fast_it_answers(
    start_teacher: Start, start_student: Start
) -> None:
    small, port = start_teacher("--max-batch-tokens", 100), free_port()
    student = start_student("--teacher", small.endpoint, f"tcp://127.0.0.1:{port}")
    student.until(lambda: "the teacher takes 100 in a request" in student.errors, "it had asked the small one")
    start_teacher(port=port)
    student.succeed()
    assert f"{small.endpoint}: a microbatch has up to " in student.errors


def test_a_document_longer_than_the_teacher_has_positions_for(
    tmp_path: Path, start_teacher: Start, start_student: Start
) -> None:
    short = build_tiny_checkpoint(tmp_path / "short", "qwen3", seed=1, hidden_size=48, max_position_embeddings=24)
    student = start_student("--teacher", start_teacher(model=short).endpoint)
    check_refusal(student, 2, "the longest document has ", "tokens, the teacher takes 24: lower --max-length")
    check_untouched(student)


def test_what_the_loss_refuses_is_a_matter_of_settings(endpoint: str, start_student: Start) -> None:
    student = start_student("--teacher", endpoint, "--workspace-bytes", 1)
    check_refusal(student, 2, "step 1: workspace_bytes: got 1; allowed: ")
    again = start_student("--teacher", endpoint, "--steps", 6)
    again.succeed()  # nothing was trained there, so nothing stands in the way


def test_a_ring_that_memory_can_not_hold(start_teacher: Start, start_student: Start) -> None:
    generous = start_teacher("--max-batch-tokens", 2**30)
    student = start_student(
        *("--teacher", generous.endpoint, "--packing", "--batch-size", 2**22, "--ring-depth", 64),
    )
    check_refusal(student, 2, "slots of", "bytes of memory", "use a smaller ring depth or shorter rows")
    check_untouched(student)


@pytest.mark.parametrize("layout", ["disagg", "colocated"])
def test_no_transport_of_that_name(inputs: Inputs, endpoint: str, start_student: Start, layout: str) -> None:
    teacher = endpoint if layout == "disagg" else inputs.teacher
    student = start_student("--teacher", teacher, "--layout", layout, "--transport", "pigeon")
    check_refusal(student, 2, "no transport is called 'pigeon'; allowed: auto, local, shm, ")
    check_untouched(student)


def test_a_transport_that_the_teacher_does_not_have_is_refused_at_once(
    start_teacher: Start, start_student: Start
) -> None:
    teacher = start_teacher("--transport", "zmq")
    student = start_student("--teacher", teacher.endpoint, "--transport", "shm")
    check_refusal(student, 2, "transport 'shm' was asked for, but the teacher can't use it: it has zmq")
    assert student.steps_taken == 0


def test_an_address_for_fills_that_is_not_ours(endpoint: str, start_student: Start) -> None:
    student = start_student("--teacher", endpoint, "--transport", "zmq", "--bind-host", "203.0.113.9", "--insecure")
    check_refusal(student, 2, "zmq: can't listen on '203.0.113.9'")
