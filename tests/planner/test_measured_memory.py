"""Peak memory of real training steps, in every layout and at six shapes, against the planner's prediction."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from bench.processes import ONE_THREAD, choose_cores, teacher_process
from planner.families import shape_of
from planner.memory import DeviceMemory
from planner.trainer_memory import TEXTBOOK_LOGIT_BYTES, Layout, Loss, TrainerSetup, trainer_memory
from student.loss.products import has_matrix_units

ROOT = Path(__file__).resolve().parents[2]
#: The second begins with the optimizer's state.
NUM_STEPS = 2
DEPTH, SPARES = 3, 2
#: The allowed error: a tenth, or as much as allocators, threads and libraries take for themselves.
TOLERANCE_FRAC, TOLERANCE_BYTES = 0.10, 64 << 20
LAYOUTS: tuple[tuple[Layout, Loss], ...] = (("colocated", "full"), ("colocated", "fused"), ("disagg", "fused"))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One pair of models and a microbatch. student, teacher: (hidden, layers, intermediate)."""

    family: str
    student: tuple[int, int, int]
    teacher: tuple[int, int, int]
    vocab_size: int
    batch_size: int
    tokens: int
    tied: bool = False
    checkpointing: bool = False
    grad_accum: int = 1
    precision: str = "bf16"


SHAPES = {
    "tied": Shape(
        family="qwen3",
        student=(256, 4, 768),
        teacher=(512, 4, 1024),
        vocab_size=8192,
        batch_size=4,
        tokens=256,
        tied=True,
    ),
    "many activations": Shape(
        family="llama", student=(256, 8, 1024), teacher=(256, 2, 512), vocab_size=2048, batch_size=8, tokens=256
    ),
    "wide vocabulary": Shape(
        family="qwen3", student=(128, 2, 384), teacher=(384, 2, 768), vocab_size=32_768, batch_size=2, tokens=256
    ),
    "many parameters": Shape(
        family="granite", student=(640, 6, 2048), teacher=(768, 6, 2048), vocab_size=4096, batch_size=1, tokens=128
    ),
    "checkpointing": Shape(
        family="llama",
        student=(256, 12, 1024),
        teacher=(256, 2, 512),
        vocab_size=4096,
        batch_size=8,
        tokens=256,
        checkpointing=True,
    ),
    "fp32 and accumulation": Shape(
        family="qwen3",
        student=(256, 4, 768),
        teacher=(512, 2, 1024),
        vocab_size=4096,
        batch_size=4,
        tokens=256,
        grad_accum=2,
        precision="fp32",
    ),
}


def config_of(shape: Shape, sizes: tuple[int, int, int]) -> dict[str, Any]:
    hidden, layers, width = sizes
    return {
        "model_type": shape.family,
        "vocab_size": shape.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 64,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": shape.tied,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "bos_token_id": None,
    }


def write_model(path: Path, raw: dict[str, Any], *, weights: bool) -> None:
    settings = {key: value for key, value in raw.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(raw["model_type"], **settings)
    words = {f"w{number}": number for number in range(raw["vocab_size"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w0").save_pretrained(path)
    if weights:
        torch.manual_seed(3)
        transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(path)
    else:
        config.save_pretrained(path)


def write_data(path: Path, shape: Shape) -> None:
    ids = random.Random(5)
    num_samples = NUM_STEPS * shape.grad_accum * shape.batch_size
    with path.open("w") as file:
        for _ in range(num_samples):
            file.write(json.dumps({"input_ids": [ids.randrange(shape.vocab_size) for _ in range(shape.tokens)]}) + "\n")


def predicted(shape: Shape, layout: Layout, loss: Loss) -> DeviceMemory:
    tokens = shape.batch_size * shape.tokens
    return trainer_memory(
        TrainerSetup(
            student=shape_of(config_of(shape, shape.student), name="student"),
            teacher=shape_of(config_of(shape, shape.teacher), name="teacher"),
            layout=layout,
            loss=loss,
            tokens=tokens,
            # The last token of a sequence has no next one to predict.
            rows=shape.batch_size * (shape.tokens - 1),
            sequence_tokens=shape.tokens,
            # The teacher answers all requests that wait in one pass, as far as --max-batch-tokens goes.
            pass_tokens=tokens,
            arithmetic="autocast" if shape.precision == "bf16" else "fp32",
            checkpointing=shape.checkpointing,
            grad_accum=shape.grad_accum,
            device="cpu",
            matrix_units=has_matrix_units(torch.bfloat16),
            ring_depth=DEPTH,
            ring_spares=SPARES,
            full_logit_bytes=TEXTBOOK_LOGIT_BYTES,
        )
    )


def common_settings(scratch: Path) -> dict[str, Any]:
    return {"cache_dir": str(scratch / "cache"), "threads": 1, "device": "cpu", "from_config": True}


def measured_settings(shape: Shape, layout: Layout, loss: Loss, scratch: Path) -> dict[str, Any]:
    """Of the run that counts, but for its teacher; its student and data are written."""
    write_model(scratch / "student", config_of(shape, shape.student), weights=False)
    write_data(scratch / "data.jsonl", shape)
    return common_settings(scratch) | {
        "student": str(scratch / "student"),
        "data": [str(scratch / "data.jsonl")],
        "layout": layout,
        "loss": loss,
        "max_length": shape.tokens,
        "max_batch_tokens": shape.batch_size * shape.tokens,
        "batch_size": shape.batch_size,
        "grad_accum": shape.grad_accum,
        "precision": shape.precision,
        "gradient_checkpointing": shape.checkpointing,
        "ring_depth": DEPTH,
        "ring_spares": SPARES,
        "steps": NUM_STEPS,
        "out": str(scratch / "run"),
    }


def warm_up_settings(shape: Shape, scratch: Path) -> dict[str, Any]:
    """Of a tiny run on labels alone; its student and data are written."""
    small = Shape(
        family=shape.family, student=(64, 1, 64), teacher=(64, 1, 64), vocab_size=256, batch_size=1, tokens=16
    )
    write_model(scratch / "small", config_of(small, small.student), weights=False)
    write_data(scratch / "small.jsonl", small)
    return common_settings(scratch) | {
        "student": str(scratch / "small"),
        "data": [str(scratch / "small.jsonl")],
        "kd_weight": 0.0,
        "ce_weight": 1.0,
        "batch_size": 1,
        "precision": shape.precision,
        "steps": 1,
        "out": str(scratch / "warm-up"),
    }


def measured(shape: Shape, layout: Layout, loss: Loss, scratch: Path) -> int:
    """Bytes at the peak beyond what was there after the imports."""
    run = measured_settings(shape, layout, loss, scratch)
    write_model(scratch / "teacher", config_of(shape, shape.teacher), weights=True)
    with ExitStack() as stack:
        if layout == "disagg":
            arguments = ["--model", str(scratch / "teacher"), "--listen", "tcp://127.0.0.1:*", "--threads", "1"]
            arguments += ["--max-batch-tokens", str(run["max_batch_tokens"])]
            teacher = stack.enter_context(
                teacher_process("teacher.serve", arguments, cpu=choose_cores().teacher, log=scratch / "teacher.log")
            )
            run["teacher"] = [teacher.endpoint]
        else:
            run["teacher"] = [str(scratch / "teacher")]
        request = {"warm_up": warm_up_settings(shape, scratch), "run": run, "verbose": False}
        # Fresh pages for every buffer, given back when it is freed: what is resident is what is used.
        environment = os.environ | ONE_THREAD | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        done = subprocess.run(
            [sys.executable, "-m", "tests.planner.trained_process", json.dumps(request)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return int(found["peak_bytes"] - found["before_bytes"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids="+".join)
@pytest.mark.parametrize("name", SHAPES)
def test_peak_memory_of_training_is_as_predicted(name: str, layout: tuple[Layout, Loss], tmp_path: Path) -> None:
    shape = SHAPES[name]
    memory = predicted(shape, *layout)
    found = measured(shape, *layout, tmp_path)
    parts = {moment.name: moment.num_bytes >> 20 for moment in memory.moments}
    said = f"predicted {memory.peak_bytes / 2**20:.0f} MiB ({parts}), measured {found / 2**20:.0f} MiB"
    print(said)
    assert abs(found - memory.peak_bytes) <= max(TOLERANCE_FRAC * memory.peak_bytes, TOLERANCE_BYTES), said
