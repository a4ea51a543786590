"""What a run leaves: metrics and a summary that add up, and a model that anybody can load."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from student.metrics import StepMetrics
from tests.system.conftest import Inputs, Start
from tests.system.processes import HANG_GUARD_S, REPOSITORY, Command, Student, check_refusal, environment
from tests.tiny_models import tiny_tokenizer

NUM_STEPS = 12


@pytest.fixture(scope="module")
def finished(inputs: Inputs, endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Student:
    """A short run with evaluations that ended by itself."""
    root = tmp_path_factory.mktemp("finished")
    student = Student(
        *inputs.settings,
        *("--teacher", endpoint, "--steps", NUM_STEPS, "--eval-data", inputs.eval_data, "--eval-every", 5),
        *("--ring-depth", 4, "--checkpoint-every", 5),
        out=root / "out",
        cwd=root,
    )
    student.succeed()
    return student


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_step_has_one_line_with_every_field(finished: Student) -> None:
    steps = records(finished.out / "metrics.jsonl")
    fields = {field.name for field in dataclasses.fields(StepMetrics)}
    assert [step["step"] for step in steps] == list(range(1, NUM_STEPS + 1))
    assert all(step.keys() == fields for step in steps)


def test_the_numbers_of_a_step_fit_each_other(inputs: Inputs, finished: Student) -> None:
    steps = records(finished.out / "metrics.jsonl")
    seq = position = bytes_received = 0
    for step in steps:
        assert step["loss"] == pytest.approx(0.9 * step["kd"] + 0.1 * step["lm_loss"], rel=1e-6)
        assert step["seq_first"] == seq
        assert step["seq_last"] - step["seq_first"] == (1 if step["samples"] > 4 else 0)
        seq, position = step["seq_last"] + 1, position + step["samples"]
        assert step["position"] == position
        assert 0 < step["rows"] <= step["samples"] * 47
        assert 0 <= step["student_stall_s"] <= step["step_s"]
        assert step["teacher_s"] > 0
        assert 0 <= step["ring_occupancy"] <= 4
        assert step["bytes_received"] >= bytes_received
        bytes_received = step["bytes_received"]
        assert step["retries"] == 0
        assert step["tokens_per_s"] * step["step_s"] > step["rows"]
        assert step["peak_rss_bytes"] > 50 * 2**20
    # Only rows that count travel (hidden 48, float32), after the head (320 columns of them).
    needed_bytes = (sum(step["rows"] for step in steps) + 320) * 48 * 4
    assert needed_bytes <= bytes_received
    assert bytes_received <= needed_bytes + 8 * 4 * 47 * 48 * 4, "at most two rings of prefetched ones more"


def test_the_summary_says_how_it_ended_and_what_it_took(inputs: Inputs, finished: Student) -> None:
    summary = finished.summary
    steps = records(finished.out / "metrics.jsonl")
    evaluations = records(finished.out / "eval.jsonl")
    assert summary["ending"] == "finished"
    assert summary["steps"] == summary["expected_steps"] == NUM_STEPS
    assert summary["samples_trained"] == steps[-1]["position"] == summary["samples_expected"]
    assert summary["samples_skipped"] == summary["retries_by_cause"] == summary["drops_by_cause"] == {}
    assert [line["step"] for line in evaluations] == [0, 5, 10, NUM_STEPS]
    assert (summary["eval_loss_first"], summary["eval_loss_last"]) == (
        evaluations[0]["eval_loss"],
        evaluations[-1]["eval_loss"],
    )
    assert summary["retries"] == summary["drops"] == 0
    assert summary["bytes_received"] == steps[-1]["bytes_received"]
    assert summary["wall_s"] > sum(step["step_s"] for step in steps)
    assert list(summary["transports"].values()) == ["shm"]
    assert summary["config"]["seed"] == 11
    assert summary["slots_bytes"] % (4 + 2) == 0
    assert summary["versions"]["torch"] == torch.__version__
    assert len(summary["teacher_fingerprint"]) == 64


def test_what_it_holds_is_said_at_start(finished: Student) -> None:
    """R2."""
    mebibytes = finished.summary["slots_bytes"] / 2**20
    assert f"6 slots, {mebibytes:.1f} MiB in all, states as fp32" in finished.errors
    assert "transport shm (auto: the best that both sides can do" in finished.errors
    assert "MiB in buffers besides the slots" in finished.errors


def test_the_model_can_be_loaded_and_differs_from_where_it_began(inputs: Inputs, finished: Student) -> None:
    trained = transformers.AutoModelForCausalLM.from_pretrained(finished.out / "model")
    began = transformers.AutoModelForCausalLM.from_pretrained(inputs.student)
    assert type(trained) is type(began)
    moved = [not torch.equal(one, two) for one, two in zip(trained.parameters(), began.parameters(), strict=True)]
    assert all(moved), "every weight was trained"
    tokenizer = transformers.AutoTokenizer.from_pretrained(finished.out / "model")
    assert tokenizer.get_vocab() == tiny_tokenizer().get_vocab()
    written = trained.generate(**tokenizer("Slot 7 holds", return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert written.shape[1] > 3


def test_a_checkpoint_is_a_model_too(finished: Student) -> None:
    assert finished.checkpoints == ["step-00000010", "step-00000012"], "the two newest"
    last = transformers.AutoModelForCausalLM.from_pretrained(finished.out / "checkpoints" / "step-00000012" / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(finished.out / "model")
    for one, two in zip(last.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_nothing_half_written_is_left(finished: Student) -> None:
    left = sorted(str(path.relative_to(finished.out)) for path in finished.out.iterdir())
    assert left == ["checkpoints", "eval.jsonl", "metrics.jsonl", "model", "run.json", "summary.json"]
    assert not [path for path in finished.out.rglob("*") if ".tmp" in path.name or path.name.startswith((".w", ".r"))]


def test_what_is_never_trained_on_is_counted_with_its_reason(tmp_path: Path, start_student: Start) -> None:
    """Two passes over five documents, of which one is empty and one too short to hold a target."""
    data = tmp_path / "gaps.jsonl"
    texts = [list(range(1, 9)), [], [7], list(range(9, 20)), list(range(30, 39))]
    data.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in texts))
    student = start_student(
        *("--kd-weight", 0, "--ce-weight", 1, "--data", data, "--steps", 4),
        *("--warmup-steps", 0, "--batch-size", 2, "--grad-accum", 1),
    )
    student.succeed()
    summary = student.summary
    assert summary["samples_skipped"] == {"empty_document": 2, "no_target": 2}
    assert summary["samples_trained"] == 6
    assert summary["samples_expected"] == 10


def test_a_run_that_left_something_out_does_not_end_well(endpoint: str, start_student: Start) -> None:
    student = start_student("--teacher", endpoint, "--steps", 6, command=("tests.system.dying_student", "short:4"))
    check_refusal(student, 1, "the run came to its end after step 4", "asked for were 6 steps")
    assert student.summary["ending"].startswith("LocalProtocolError: ")
    assert not (student.out / "model").exists()


def test_labels_alone_need_no_teacher(inputs: Inputs, start_student: Start) -> None:
    student = start_student("--kd-weight", 0, "--ce-weight", 1, "--steps", 6)
    student.succeed()
    steps = records(student.out / "metrics.jsonl")
    assert [(step["kd"], step["bytes_received"], step["student_stall_s"]) for step in steps] == [(0.0, 0, 0.0)] * 6
    assert student.summary["teacher_fingerprint"] is None


def test_a_run_whose_output_nobody_reads_goes_on(inputs: Inputs, tmp_path: Path) -> None:
    """`student.train ... | head -1`."""
    student = subprocess.Popen(
        [
            *(sys.executable, "-m", "student.train", *map(str, inputs.settings)),
            *("--kd-weight", "0", "--ce-weight", "1", "--steps", "100000", "--out", str(tmp_path / "out")),
        ],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert student.stdout is not None
    assert student.stderr is not None
    said: list[str] = []
    try:
        assert student.stdout.readline().startswith("step ")
        student.stdout.close()
        for line in student.stderr:
            said.append(line)
            if "the standard output takes nothing any more (Broken pipe); the run goes on" in line:
                break
        metrics = tmp_path / "out" / "metrics.jsonl"
        taken, deadline_s = metrics.stat().st_size, time.monotonic() + HANG_GUARD_S
        while metrics.stat().st_size < taken + 10_000:  # some twenty steps
            assert time.monotonic() < deadline_s, said
            assert student.poll() is None, said
            time.sleep(0.01)
        student.terminate()
        said += student.stderr
        assert student.wait(HANG_GUARD_S) == 143, said
    finally:
        student.kill()
        student.wait()
        student.stderr.close()
    assert not [line for line in said if "Traceback" in line]


def test_both_commands_run_as_the_readme_says(
    inputs: Inputs, tmp_path: Path, quiet_curve: list[dict[str, Any]]
) -> None:
    """As `python -m`, without the server that the other tests fork from; and it is the same curve."""
    ready, settings = tmp_path / "ready", [str(one) for one in inputs.settings]
    teacher = subprocess.Popen(
        [
            *(sys.executable, "-m", "teacher.serve", "--model", str(inputs.teacher)),
            *("--listen", "tcp://127.0.0.1:*", "--ready-file", str(ready), "--deterministic", "--threads", "1"),
        ],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert teacher.stdout is not None
        word, endpoint, *facts = teacher.stdout.readline().split()
        assert (word, endpoint) == ("ready", ready.read_text().strip())
        said = dict(fact.split("=", 1) for fact in facts)
        assert {"model", "fingerprint", "transport"} < said.keys()
        assert (said["device"].split(":")[0], said["dtype"]) in (("cpu", "fp32"), ("cuda", "fp32"))
        student = subprocess.run(
            [sys.executable, "-m", "student.train", *settings, "--teacher", endpoint, "--out", str(tmp_path / "out")],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=HANG_GUARD_S,
            check=False,
        )
        assert student.returncode == 0, student.stderr
        assert student.stdout.splitlines()[-1].startswith(f"trained {len(quiet_curve)} steps, ")
        losses = [record["loss"] for record in records(tmp_path / "out" / "metrics.jsonl")]
        assert losses == [step["loss"] for step in quiet_curve]
        teacher.terminate()
        assert teacher.wait(HANG_GUARD_S) == 0
    finally:
        teacher.kill()
        teacher.wait()
        teacher.stdout.close()


def test_help_lists_every_flag_without_loading_anything_heavy(tmp_path: Path, processes: list[Command]) -> None:
    script = (
        "import sys\n"
        "from student.train.__main__ import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    helped = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, env=environment(), capture_output=True, text=True, check=False
    )
    assert helped.returncode == 0, helped.stderr
    for flag in ("--student", "--teacher", "--ring-depth", "--resume", "--config"):
        assert flag in helped.stdout
