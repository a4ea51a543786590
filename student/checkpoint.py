"""Checkpoints that are whole or not there (`student.durable`), every file with its size and sha256.

    <root>/step-00000040/model/               the student as `from_pretrained` reads it, in its own dtype
                         optimizer.safetensors
                         state.json            step, position, generators, and what the files must be

A process that is killed at any moment leaves the checkpoints before it untouched. Nothing is pickled. One process
writes to a root.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from ring.core.errors import ConfigError, DisaggKDError
from student.durable import recover, remove_directory, sync, write_directory
from student.load import quiet_transformers
from student.rng import RngState

FORMAT_VERSION = 1
STATE_FILE, OPTIMIZER_FILE, MODEL_DIR = "state.json", "optimizer.safetensors", "model"
#: In place of the weights and of OPTIMIZER_FILE where several ranks wrote it; see student.parallel.checkpoint.
SHARDS_DIR = "shards"
_STEP_DIR = re.compile(r"step-(\d{8,})")
_READ_BYTES = 1 << 20


class CheckpointError(DisaggKDError):
    """A checkpoint could not be written; those that were there before still are."""


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """What a run is, beside its tensors.

    `step`: updates made. `position`: of the next sample. `config_hash`: of what must not change over a resume, of the
    learning-rate schedule too. `rng`: the generators of each rank. `samples_left_out`: before `position`, of steps that
    changed nothing; `steps_left_out_in_a_row`: the last so many were such steps.
    """

    step: int
    position: int
    config_hash: str
    rng: tuple[RngState, ...]
    samples_left_out: int = 0
    steps_left_out_in_a_row: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk, verified when it was opened."""

    path: Path
    state: TrainState

    @property
    def model_dir(self) -> Path:
        """Where the student is loaded from to go on training; where it is sharded without its weights."""
        return self.path / MODEL_DIR

    @property
    def is_sharded(self) -> bool:
        """Weights and optimizer are in the parts that several ranks had of them."""
        return (self.path / SHARDS_DIR).is_dir()

    def optimizer_tensors(self) -> dict[str, torch.Tensor]:
        """The optimizer's state, on the CPU. Raises ConfigError: the file holds no tensors."""
        try:
            return safetensors.torch.load_file(self.path / OPTIMIZER_FILE)
        except (OSError, ValueError, KeyError, RuntimeError, safetensors.SafetensorError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"checkpoint {self.path}: {OPTIMIZER_FILE} can't be read: {reason}") from error


@dataclass(frozen=True)
class SkippedCheckpoint:
    """A directory that looks like a checkpoint and is none, and why."""

    path: Path
    reason: str


def write_checkpoint(
    root: Path,
    state: TrainState,
    *,
    model: Any,
    optimizer_tensors: Mapping[str, torch.Tensor],
    tokenizer: Any | None = None,
    keep: int = 2,
) -> Path:
    """Writes `<root>/step-<step>` whole and durable, then removes all but the newest `keep` up to this step. An older
    checkpoint of the same step is replaced.

    Raises CheckpointError: the disk is full or fails; what was written of it is removed, the others are untouched.
    """

    def fill(directory: Path) -> None:
        _save_model(directory / MODEL_DIR, model, tokenizer)
        tensors = {name: tensor.detach().contiguous() for name, tensor in optimizer_tensors.items()}
        safetensors.torch.save_file(tensors, directory / OPTIMIZER_FILE)

    needed_bytes = _model_bytes(model) + _num_bytes(optimizer_tensors.values())
    return write_checkpoint_directory(root, state, fill, needed_bytes=needed_bytes, keep=keep)


def write_checkpoint_directory(
    root: Path, state: TrainState, fill: Callable[[Path], None], *, needed_bytes: int, keep: int
) -> Path:
    """As `write_checkpoint`, of what `fill` writes into the directory that it is given."""

    def complete(directory: Path) -> None:
        fill(directory)
        _write_state(directory, state)

    path = checkpoint_path(root, state.step)
    with _failure(f"checkpoint of step {state.step}"):
        recover_checkpoints(root)
        write_directory(path, complete, needed_bytes=needed_bytes)
    _remove_oldest(root, upto_step=state.step, keep=keep)
    return path


def export_model(directory: Path, *, model: Any, tokenizer: Any | None) -> None:
    """Writes a model that `from_pretrained` loads, replacing what is in `directory` at once.

    Raises CheckpointError: the disk is full or fails; `directory` is as it was.
    """
    with _failure(f"model to {directory}"):
        write_directory(
            directory,
            lambda aside: _save_model(aside, model, tokenizer),
            needed_bytes=_model_bytes(model),
        )


def checkpoint_path(root: Path, step: int) -> Path:
    """Where the checkpoint of a step is, if there is one."""
    return root / f"step-{step:08d}"


def recover_checkpoints(root: Path) -> None:
    """Put right what a killed process left in `root`; whoever resumes calls it before it looks for a checkpoint."""
    recover(root, "step-*")


def open_checkpoint(path: Path, *, read_all: bool = True) -> Checkpoint:
    """The checkpoint at a path, every byte of it verified; without `read_all` (another rank did that) only the sizes.

    Raises ConfigError: it is missing, torn, damaged, or of another format.
    """
    if not path.is_dir():
        raise ConfigError(f"checkpoint {path}: no such directory")
    return Checkpoint(path, _verified_state(path, read_all=read_all))


def latest_checkpoint(root: Path) -> tuple[Checkpoint | None, tuple[SkippedCheckpoint, ...]]:
    """The whole checkpoint of the highest step, and the newer ones that are none; None where there is no whole one."""
    skipped: list[SkippedCheckpoint] = []
    for _, path in reversed(_step_directories(root)):
        try:
            return open_checkpoint(path), tuple(skipped)
        except ConfigError as error:
            skipped.append(SkippedCheckpoint(path, str(error)))
    return None, tuple(skipped)


def set_aside_later(root: Path, *, step: int) -> tuple[Path, ...]:
    """Renames all checkpoints behind `step` to `abandoned-...`, and returns their new paths.

    For a resume that starts from an earlier one: the next crash must not bring back a lineage that was left.
    """
    moved = []
    for found, path in _step_directories(root):
        if found > step:
            target, attempt = root / f"abandoned-{path.name}", 1
            while target.exists():
                attempt += 1
                target = root / f"abandoned-{path.name}-{attempt}"
            path.rename(target)
            moved.append(target)
    if moved:
        sync(root)
    return tuple(moved)


@contextlib.contextmanager
def _failure(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"{what} could not be written: {error}; nothing of it was kept, and earlier checkpoints are untouched"
        ) from error


def _save_model(directory: Path, model: Any, tokenizer: Any | None) -> None:
    with quiet_transformers():
        model.save_pretrained(directory)
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)


def _write_state(directory: Path, state: TrainState) -> None:
    files = {
        file.relative_to(directory).as_posix(): {"num_bytes": file.stat().st_size, "sha256": _sha256(file)}
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }
    content: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "step": state.step,
        "position": state.position,
        "samples_left_out": state.samples_left_out,
        "steps_left_out_in_a_row": state.steps_left_out_in_a_row,
        "config_hash": state.config_hash,
        "rng": [entry.to_json() for entry in state.rng],
        "files": files,
    }
    content["state_sha256"] = _state_digest(content)
    (directory / STATE_FILE).write_text(json.dumps(content, indent=1), encoding="utf-8")


def _state_digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _verified_state(path: Path, *, read_all: bool) -> TrainState:
    """read_all: every byte of every file; otherwise only their sizes. Raises ConfigError: see `open_checkpoint`."""
    try:
        content = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        version, digest = content["format_version"], content.pop("state_sha256")
        if version != FORMAT_VERSION:
            raise ConfigError(f"checkpoint {path}: format {version}; allowed: {FORMAT_VERSION}")
        if digest != _state_digest(content):
            raise ConfigError(f"checkpoint {path}: {STATE_FILE} is damaged (its sha256 differs)")
        for name, entry in content["files"].items():
            _verify_file(path, name, int(entry["num_bytes"]), str(entry["sha256"]) if read_all else None)
        return TrainState(
            step=int(content["step"]),
            position=int(content["position"]),
            samples_left_out=int(content.get("samples_left_out", 0)),
            steps_left_out_in_a_row=int(content.get("steps_left_out_in_a_row", 0)),
            config_hash=str(content["config_hash"]),
            rng=tuple(RngState.from_json(entry) for entry in content["rng"]),
        )
    except FileNotFoundError as error:
        raise ConfigError(f"checkpoint {path}: {STATE_FILE} is missing") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"checkpoint {path}: {STATE_FILE} can't be read: {type(error).__name__} {error}") from error


def _verify_file(path: Path, name: str, num_bytes: int, sha256: str | None) -> None:
    file = path / name
    try:
        # A link that leads back to itself is a RuntimeError.
        if not file.resolve().is_relative_to(path.resolve()):
            raise ConfigError(f"checkpoint {path}: {name} lies outside of it")
        found_bytes = file.stat().st_size
        if found_bytes != num_bytes:
            raise ConfigError(f"checkpoint {path}: {name} has {found_bytes} bytes, {num_bytes} were written")
        if sha256 is not None and _sha256(file) != sha256:
            raise ConfigError(f"checkpoint {path}: {name} is damaged (its sha256 differs)")
    except FileNotFoundError as error:
        raise ConfigError(f"checkpoint {path}: {name} is missing") from error
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"checkpoint {path}: {name} can't be read: {error}") from error


def _step_directories(root: Path) -> list[tuple[int, Path]]:
    """Steps and paths of what is named like a checkpoint, ascending."""
    if not root.is_dir():
        return []
    matches = [(_STEP_DIR.fullmatch(entry.name), entry) for entry in root.iterdir()]
    return sorted((int(match[1]), entry) for match, entry in matches if match is not None)


def _remove_oldest(root: Path, *, upto_step: int, keep: int) -> None:
    # Later ones belong to another lineage: they are not ours to count.
    own = [(step, path) for step, path in _step_directories(root) if step <= upto_step]
    # Damaged ones, as far as sizes tell, don't count either: they must not push out a whole one.
    whole = [step for step, path in own if _looks_whole(path)]
    oldest_kept = min(whole[-max(keep, 1) :], default=upto_step)
    for step, path in own:
        if step < oldest_kept:
            remove_directory(path)


def _looks_whole(path: Path) -> bool:
    try:
        _verified_state(path, read_all=False)
    except ConfigError:
        return False
    return True


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _model_bytes(model: Any) -> int:
    # Tied parameters are written once, and `parameters` names them once.
    return _num_bytes([*model.parameters(), *model.buffers()])


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
