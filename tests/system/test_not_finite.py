"""A step whose gradient is not finite: who is to blame is said, and the run can go on without it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from tests.system.conftest import Start
from tests.system.processes import Student, check_refusal
from tests.tiny_models import TOKENIZER_VOCAB, build_tiny_checkpoint

NUM_SAMPLES = 24
BATCH = 4
#: No text of the teacher's self-test has it.
POISON = 301
POISONED_SAMPLE = 13


@pytest.fixture(scope="module")
def teacher_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One row of its embedding is not finite, as after an overflow."""
    root = build_tiny_checkpoint(
        tmp_path_factory.mktemp("poisoned") / "teacher", "qwen3", seed=1, hidden_size=48, tie_word_embeddings=False
    )
    (file,) = root.glob("*.safetensors")
    tensors = safetensors.torch.load_file(file)
    tensors["model.embed_tokens.weight"][POISON] = float("nan")
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    return root


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(5)
    documents = [[rng.randrange(20, TOKENIZER_VOCAB - 40) for _ in range(12)] for _ in range(NUM_SAMPLES)]
    for document in documents:
        document[:] = [id_ if id_ != POISON else id_ + 1 for id_ in document]
    documents[POISONED_SAMPLE][5] = POISON
    path = tmp_path_factory.mktemp("ids") / "train.jsonl"
    path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in documents))
    return path


def lines(student: Student) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    text = (student.out / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


@pytest.mark.parametrize("divergence", ["forward_kl", "tvd"])
def test_states_that_are_not_finite_end_the_run_and_it_can_go_on_without_them(
    teacher_model: Path, data: Path, start_teacher: Start, start_student: Start, divergence: str
) -> None:
    teacher = start_teacher(model=teacher_model)
    flags = ("--data", data, "--steps", NUM_SAMPLES // BATCH, "--batch-size", BATCH, "--grad-accum", 1)
    flags += ("--teacher", teacher.endpoint, "--divergence", divergence)
    student = start_student(*flags)
    check_refusal(
        student, 1, "the gradient norm is nan", "the teacher's states or logits are not finite", "--max-left-out 1"
    )
    taken = len(lines(student))
    assert taken < NUM_SAMPLES // BATCH
    assert f"{POISONED_SAMPLE}" in student.errors.splitlines()[-1].split("samples [")[1].split("]")[0]
    again = start_student(*flags, "--resume")
    check_refusal(again, 1, f"step {taken + 1}: ", "the step was not taken")
    resumed = start_student(*flags, "--resume", "--max-left-out", 1)
    resumed.succeed()
    steps = lines(resumed)
    assert [step["step"] for step in steps] == list(range(1, NUM_SAMPLES // BATCH + 1))
    assert [step["samples_left_out"] for step in steps] == [BATCH * (step["step"] == taken + 1) for step in steps]
    assert (steps[taken]["kd"], steps[taken]["grad_norm"]) == (None, None)
    assert resumed.summary["samples_skipped"] == {"not_finite": BATCH}
    assert resumed.summary["samples_trained"] == NUM_SAMPLES - BATCH
    assert resumed.summary["samples_expected"] == NUM_SAMPLES
    quiet = start_student(*flags, "--max-left-out", 1, out="at-once")
    quiet.succeed()
    assert (quiet.out / "model" / "model.safetensors").read_bytes() == (
        resumed.out / "model" / "model.safetensors"
    ).read_bytes(), "whether it was resumed or not"
