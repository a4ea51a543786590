"""The models that the report trains: a teacher of its own on real text, or the user's; and a larger pair for memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils.hub import cached_file

from bench.claimed import claim, is_made, remove, renew
from bench.claims.runs import Command, trained
from bench.corpus import Corpus, build_corpus, write_model_config
from planner.hub import is_only_cached
from ring.core.errors import ConfigError

#: Tokens of the report's own tokenizer: enough that the loss is a real part of a step.
VOCAB_SIZE = 16_384
TEACHER_SHAPE = {"hidden_size": 256, "num_layers": 4}
STUDENT_SHAPE = {"hidden_size": 128, "num_layers": 2}
TEACHER_LR = 1.5e-3


#: What `own_pair` and `random_pair` write below their root; the latter also directories of `pair_directories`.
DIRECTORIES = ("corpus", "student", "teacher-shape", "teacher-run", "teacher.copy", "teacher", "teacher.aside")
FILES = ("teacher-recipe.json", "teacher-run.log")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A teacher, a student and their text. `from_config`: the student starts from random weights."""

    teacher: Path | str
    student: Path | str
    data: tuple[str, ...]
    held_out: tuple[str, ...]
    from_config: bool


def config_of(model: Path | str, *, flag: str) -> dict[str, object]:
    """The config.json of a directory or hub id. Raises ConfigError, naming the flag: there is none, or it can't be had
    or read."""
    allowed = "allowed: a checkpoint directory, or a hub id that is in the cache or can be fetched"
    find: Any = cached_file
    try:
        path = Path(model)
        if path.is_dir():
            file = path / "config.json"
        else:
            file = Path(find(str(model), "config.json", local_files_only=is_only_cached(str(model))))
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag} {model}: {str(error).splitlines()[0]}; {allowed}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{flag} {model}: its config.json holds no object; {allowed}")
    return config


def own_pair(root: Path, *, steps: int, sequence_tokens: int, batch_size: int, device: str) -> Pair:
    """The report's pair on the standard library's source. The teacher is trained for `steps`, once: a second report
    finds it. Raises StageFailed."""
    claim(root / "corpus")
    corpus = build_corpus(root / "corpus", vocab_size=VOCAB_SIZE)
    student, teacher, shape = root / "student", root / "teacher", root / "teacher-shape"
    claim(student)
    write_model_config(student, corpus, **STUDENT_SHAPE)
    recipe = {"shape": TEACHER_SHAPE, "steps": steps, "tokens": sequence_tokens, "batch": batch_size}
    marker = root / "teacher-recipe.json"
    if not (marker.exists() and json.loads(marker.read_text()) == recipe and is_made(teacher)):
        for old in (teacher, root / "teacher-run"):
            remove(old)
        claim(shape)
        write_model_config(shape, corpus, **TEACHER_SHAPE)
        arguments = (
            *("--student", str(shape), "--from-config", "--kd-weight", "0", "--ce-weight", "1"),
            *("--data", str(corpus.train), "--max-length", str(sequence_tokens), "--batch-size", str(batch_size)),
            *("--steps", str(steps), "--lr", str(TEACHER_LR), "--warmup-steps", str(min(20, steps // 4))),
            *("--cache-dir", str(root / "cache"), "--device", device),
        )
        trained(Command(name="the teacher itself", arguments=arguments), out=root / "teacher-run")
        copy = root / "teacher.copy"
        renew(copy)
        shutil.copytree(root / "teacher-run" / "model", copy, dirs_exist_ok=True)
        copy.rename(teacher)
        marker.write_text(json.dumps(recipe))
    return Pair(
        teacher=teacher,
        student=student,
        data=(str(corpus.student),),
        held_out=(str(corpus.held_out),),
        from_config=True,
    )


def random_pair(root: Path, corpus: Corpus, *, teacher: Mapping[str, int], student: Mapping[str, int]) -> Pair:
    """Models of those shapes (hidden_size, num_layers) for questions of memory alone: the teacher has random bf16
    weights, the student starts from its config."""
    shape, stored, taught = (root / name for name in pair_directories(teacher, student))
    claim(taught)
    write_model_config(taught, corpus, **student)
    if not is_made(stored):
        claim(shape)
        write_model_config(shape, corpus, **teacher)
        torch.manual_seed(0)
        build: Any = transformers.AutoModelForCausalLM.from_config
        model = build(transformers.AutoConfig.from_pretrained(shape), dtype=torch.bfloat16)
        aside = root / "teacher.aside"
        renew(aside)
        bars: Any = transformers.utils.logging
        bars.disable_progress_bar()
        # Small files: what fails for want of memory is to be the weights, not the map of a file that holds all of them.
        model.save_pretrained(aside, max_shard_size="32MB")
        transformers.AutoTokenizer.from_pretrained(shape).save_pretrained(aside)
        aside.rename(stored)
    return Pair(
        teacher=stored,
        student=taught,
        data=(str(corpus.student),),
        held_out=(str(corpus.held_out),),
        from_config=True,
    )


def pair_directories(teacher: Mapping[str, int], student: Mapping[str, int]) -> tuple[str, str, str]:
    """Of a `random_pair`: the teacher's shape, the teacher, the student."""
    return f"shape-{_named(teacher)}", f"teacher-{_named(teacher)}", f"student-{_named(student)}"


def _named(shape: Mapping[str, int]) -> str:
    return f"{shape['hidden_size']}x{shape['num_layers']}"
