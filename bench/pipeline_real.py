"""A small real model through the whole pipeline: `teacher.serve` in its process, the trainer's own loop in this one.

What each side takes alone comes from the same trainer with the teacher in its process (`--layout colocated`): there the
two take turns on one core, so that a step's metrics tell them apart. The teacher gets as many layers as make the two
about equal: the hardest case for a pipeline, since neither side has time to spare.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from bench.processes import Cores, teacher_process
from bench.records import Spread
from student.config import TrainConfig
from student.train.run import train

#: Steps at the start of a run that don't count: allocations, and a ring that fills.
WARMUP_STEPS = 5
#: Layers of the first teacher; the next one's follow from what this one takes.
FIRST_LAYERS = 4
MAX_LAYERS = 64


@dataclass(frozen=True, kw_only=True)
class RealShape:
    """The two models and a microbatch of them. num_steps: measured in each run."""

    vocab_size: int = 2048
    teacher_hidden: int = 256
    student_hidden: int = 128
    student_layers: int = 2
    sequence_tokens: int = 256
    batch_size: int = 4
    num_steps: int = 20


@dataclass(frozen=True, kw_only=True)
class RealTimes:
    """Times of a step. `student`: alone, without waiting; `teacher`: alone, its forward passes for a step.

    `num_bytes`: payload of the whole run, the teacher's head included."""

    num_layers: int
    student: Spread
    teacher: Spread
    step: Spread
    stall_frac: float
    num_bytes: int

    @property
    def ratio(self) -> float:
        """A step of the pipeline over the slower side alone."""
        return self.step.median / max(self.teacher.median, self.student.median)


def measure_real(
    shape: RealShape, cores: Cores, *, transport: str, depth: int, scratch: Path, say: Callable[[str], None]
) -> RealTimes:
    """Call it pinned to the student's core. Raises DisaggKDError: a run failed."""
    runs = _Runs(shape, scratch, depth)
    student, teacher = _alone(runs.colocated(FIRST_LAYERS))
    num_layers = min(MAX_LAYERS, max(1, round(FIRST_LAYERS * student.median / teacher.median)))
    say(f"real model: a teacher of {num_layers} layers balances this student")
    student, teacher = _alone(runs.colocated(num_layers))
    steps = runs.disaggregated(num_layers, cores, transport)
    step_s = [step["step_s"] for step in steps]
    return RealTimes(
        num_layers=num_layers,
        student=student,
        teacher=teacher,
        step=Spread.of(step_s),
        stall_frac=sum(step["student_stall_s"] for step in steps) / sum(step_s),
        num_bytes=int(steps[-1]["bytes_received"]),
    )


def _alone(steps: Sequence[Mapping[str, float]]) -> tuple[Spread, Spread]:
    """(student, teacher) of a colocated run, where the student's wait is the teacher's turn."""
    student = Spread.of([step["step_s"] - step["student_stall_s"] for step in steps])
    return student, Spread.of([step["teacher_s"] for step in steps])


class _Runs:
    """The files of the runs, and the runs."""

    def __init__(self, shape: RealShape, scratch: Path, depth: int) -> None:
        self._shape = shape
        self._scratch = scratch
        self._depth = depth
        self._num_runs = 0
        self._student = self._write_model("student", shape.student_hidden, shape.student_layers, weights=False)
        self._data = scratch / "data.jsonl"
        ids = random.Random(20)
        num_samples = (WARMUP_STEPS + shape.num_steps) * shape.batch_size
        with self._data.open("w") as file:
            for _ in range(num_samples):
                sample = [ids.randrange(shape.vocab_size) for _ in range(shape.sequence_tokens)]
                file.write(json.dumps({"input_ids": sample}) + "\n")

    def colocated(self, num_layers: int) -> list[dict[str, float]]:
        """The measured steps of a run with the teacher in this process."""
        return self._train((str(self._teacher(num_layers)),), layout="colocated", transport="auto")

    def disaggregated(self, num_layers: int, cores: Cores, transport: str) -> list[dict[str, float]]:
        """The measured steps of a run with the teacher in a process on a core of its own."""
        arguments = [
            *("--model", str(self._teacher(num_layers)), "--listen", "tcp://127.0.0.1:*", "--threads", "1"),
            *("--transport", transport, "--max-batch-tokens", str(self._microbatch_tokens)),
        ]
        log = self._scratch / "teacher.log"
        with teacher_process("teacher.serve", arguments, cpu=cores.teacher, log=log) as teacher:
            return self._train((teacher.endpoint,), layout="disagg", transport=transport)

    @property
    def _microbatch_tokens(self) -> int:
        return self._shape.batch_size * self._shape.sequence_tokens

    def _train(self, teacher: tuple[str, ...], *, layout: str, transport: str) -> list[dict[str, float]]:
        shape = self._shape
        self._num_runs += 1
        out = self._scratch / f"run{self._num_runs}"
        config = TrainConfig(
            student=str(self._student),
            from_config=True,
            teacher=teacher,
            layout="colocated" if layout == "colocated" else "disagg",
            transport=transport,
            # One microbatch a pass in both layouts: a pass over several would take another time for each.
            max_batch_tokens=self._microbatch_tokens,
            data=(str(self._data),),
            cache_dir=str(self._scratch / "cache"),
            max_length=shape.sequence_tokens,
            batch_size=shape.batch_size,
            steps=WARMUP_STEPS + shape.num_steps,
            ring_depth=self._depth,
            device="cpu",
            threads=1,
            out=str(out),
        )
        with (self._scratch / f"run{self._num_runs}.log").open("w") as log, redirect_stdout(log):
            train(config)
        lines = (out / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines][WARMUP_STEPS:]

    def _teacher(self, num_layers: int) -> Path:
        return self._write_model(f"teacher{num_layers}", self._shape.teacher_hidden, num_layers, weights=True)

    def _write_model(self, name: str, hidden_size: int, num_layers: int, *, weights: bool) -> Path:
        """A Qwen3 of this shape with random weights, and a tokenizer of as many words as it has token ids."""
        path = self._scratch / name
        if path.exists():
            return path
        vocab_size = self._shape.vocab_size
        config = transformers.Qwen3Config(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=3 * hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=max(1, hidden_size // 32),
            num_key_value_heads=max(1, hidden_size // 64),
            head_dim=32,
            max_position_embeddings=self._shape.sequence_tokens,
            tie_word_embeddings=True,
            eos_token_id=0,
            pad_token_id=0,
        )
        words = {f"w{number}": number for number in range(vocab_size)}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
        fast_tokenizer: Any = transformers.PreTrainedTokenizerFast
        fast_tokenizer(tokenizer_object=tokenizer, eos_token="w0").save_pretrained(path)
        logging: Any = transformers.utils.logging
        logging.disable_progress_bar()
        if weights:
            # bf16, as checkpoints are: so are then the states on the wire.
            torch.manual_seed(21)
            model: Any = transformers.Qwen3ForCausalLM(config)
            model.to(torch.bfloat16).save_pretrained(path)
        else:
            config.save_pretrained(path)
        return path
