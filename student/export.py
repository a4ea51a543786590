"""A checkpoint of any kind as one Hugging Face directory that `from_pretrained` loads."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import torch

from ring.core.errors import ConfigError
from student.checkpoint import Checkpoint, export_model, latest_checkpoint, open_checkpoint
from student.durable import write_directory
from student.load import load_student

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_checkpoint(source: Path, target: Path) -> int:
    """Write the model of a checkpoint to `target`, replacing what is there at once; returns the checkpoint's step.

    source: a checkpoint, the directory of several (the newest whole one is taken), or a run's --out.
    Raises ConfigError: no whole checkpoint there. Raises CheckpointError: the disk is full or fails."""
    checkpoint = _find(source)
    if checkpoint.is_sharded:
        # One process reads all shards: the whole model must fit its memory, without optimizer and gradients.
        from student.parallel.checkpoint import load_whole_model

        student = load_student(str(checkpoint.model_dir), dtype=_dtype_of(checkpoint), from_config=True)
        load_whole_model(checkpoint, student.model)
        export_model(target, model=student.model, tokenizer=student.tokenizer)
    else:
        files = [path for path in checkpoint.model_dir.rglob("*") if path.is_file()]

        def copy(directory: Path) -> None:
            shutil.copytree(checkpoint.model_dir, directory, dirs_exist_ok=True)

        write_directory(target, copy, needed_bytes=sum(path.stat().st_size for path in files))
    return checkpoint.state.step


def _find(source: Path) -> Checkpoint:
    if (source / "state.json").exists():
        return open_checkpoint(source)
    root = source / "checkpoints" if (source / "checkpoints").is_dir() else source
    checkpoint, skipped = latest_checkpoint(root)
    for entry in skipped:
        logger.warning("not used: %s", entry.reason)
    if checkpoint is None:
        reason = f": {skipped[0].reason}" if skipped else ""
        raise ConfigError(f"no whole checkpoint in {source}{reason}; allowed: a checkpoint, or the --out of a run")
    return checkpoint


def _dtype_of(checkpoint: Checkpoint) -> torch.dtype:
    name = str(json.loads((checkpoint.model_dir / "config.json").read_text()).get("dtype", "float32"))
    if name not in _DTYPES:
        raise ConfigError(f"checkpoint {checkpoint.path}: weights of {name}; allowed: {', '.join(_DTYPES)}")
    return _DTYPES[name]
