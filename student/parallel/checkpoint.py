"""Checkpoints that all ranks write together: torch's distributed checkpoint (DCP), in safetensors files.

    <root>/step-00000040/shards/   each rank's parts of the model and of the optimizer, with their places in the whole
                         model/    config and tokenizer
                         state.json

Parts know their place, so that another number of ranks, or one process, can read them. Rank 0 makes the directory whole
or not at all, as for one process; a shared file system is the user's part.
"""

from __future__ import annotations

import copy
import logging
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ring.core.errors import ConfigError
from student.checkpoint import SHARDS_DIR, Checkpoint, CheckpointError, TrainState, write_checkpoint_directory
from student.load import quiet_transformers
from student.parallel.ranks import Ranks
from student.parallel.shares import Shares

logger = logging.getLogger(__name__)

_MODEL, _OPTIMIZER = "model/", "optimizer/"
#: How the module's names begin where the model's own end.
_PREFIX = "model."


@dataclass(frozen=True)
class CheckpointParts:
    """What a checkpoint is made of: tensors by name, as parts of the whole; and what the model's directory needs.

    config: a copy, that names the dtype in which the weights are kept. Asked for it while it trains, a model that FSDP
    gathers names the one that it computes in."""

    tensors: dict[str, Tensor]
    config: Any
    generation_config: Any | None
    tokenizer: Any | None

    @classmethod
    def of(
        cls, model: Any, shares: Shares, *, optimizer_tensors: Mapping[str, Tensor], tokenizer: Any | None
    ) -> CheckpointParts:
        """The live tensors, not copies."""
        tensors = {_MODEL + name: tensor for name, tensor in _model_tensors(model, shares).items()}
        tensors |= {_OPTIMIZER + name: _as_whole(name, t, shares) for name, t in optimizer_tensors.items()}
        config = copy.deepcopy(model.config)
        config.dtype = next(share.local.dtype for name, share in shares.by_name.items() if name.startswith(_PREFIX))
        return cls(tensors, config, model.generation_config if model.can_generate() else None, tokenizer)

    def staged(self) -> CheckpointParts:
        """Copies in host memory. Raises CheckpointError: there is no room for them."""
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
        stager = DefaultStager(options)
        try:
            tensors: Any = stager.stage(self.tensors)
        except (RuntimeError, MemoryError) as error:
            raise CheckpointError(f"a checkpoint could not be copied to host memory: {error}") from error
        finally:
            stager.close()
        return replace(self, tensors=tensors)


def write_sharded_checkpoint(root: Path, state: TrainState, *, ranks: Ranks, parts: CheckpointParts, keep: int) -> None:
    """All ranks together write `<root>/step-<step>`, whole and durable; see `student.checkpoint.write_checkpoint`.

    Raises CheckpointError, on every rank: one of them could not write its part. Raises RankLost."""

    def shards(directory: Path | None) -> None:
        """What every rank does once rank 0 has a directory for it (None: it has none, and says why itself)."""
        target = ranks.from_first(None if directory is None else str(directory))
        if target is None:
            raise CheckpointError(f"checkpoint of step {state.step}: rank 0 could not begin it")
        ranks.together(lambda: _save(Path(target), parts.tensors, ranks))

    def fill(directory: Path) -> None:
        began.append(True)
        shards(directory / SHARDS_DIR)
        with quiet_transformers():
            # What the model's own `save_pretrained` would write, but for the weights.
            parts.config.save_pretrained(directory / "model")
            if parts.generation_config is not None:
                parts.generation_config.save_pretrained(directory / "model")
            if parts.tokenizer is not None:
                parts.tokenizer.save_pretrained(directory / "model")

    def lead() -> None:
        try:
            write_checkpoint_directory(root, state, fill, needed_bytes=_num_bytes(parts.tensors), keep=keep)
        finally:
            if not began:
                ranks.from_first(None)

    began: list[bool] = []
    # The last word is rank 0's: a checkpoint exists for all or for none.
    ranks.together(lead if ranks.is_first else lambda: shards(None))


class BackgroundWriter:
    """Writes sharded checkpoints in a thread while training goes on. At most one is under way.

    Its tensors are copied to host memory first, so that the next step may change them. One that fails costs neither the
    run nor the next checkpoint; but training waits for that one, so that a run that can save nothing more ends."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks.in_background()
        self._thread: threading.Thread | None = None
        self._step = 0
        self._error: Exception | None = None

    def write(self, root: Path, state: TrainState, *, parts: CheckpointParts, keep: int) -> None:
        """Begin; all ranks together. After one that failed: begin, and wait for it.

        Raises what `parts.staged` raises, here or on another rank, RankLost, and, where it waits, as `finish`."""
        failed_step = self._step if self._has_failed() else None
        # The thread, whose words these are otherwise, is at its end.
        staged = self._ranks.together(parts.staged)

        def run() -> None:
            try:
                write_sharded_checkpoint(root, state, ranks=self._ranks, parts=staged, keep=keep)
            except Exception as error:  # noqa: BLE001 - said or raised once the thread is waited for
                self._error = error
            except BaseException as error:
                # Or what was never written would count as written.
                self._error = CheckpointError(f"checkpoint of step {state.step}: {type(error).__name__}: {error}")
                raise

        self._step = state.step
        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()
        if failed_step is not None:
            self.finish()
            if self._ranks.is_first:
                logger.info("checkpoint of step %d is there, after that of step %d failed", state.step, failed_step)

    def finish(self) -> None:
        """Wait for the one under way. Raises what it failed with: CheckpointError, RankFailed, RankLost."""
        if (error := self._settle()) is not None:
            raise error

    def _has_failed(self) -> bool:
        """Whether the one under way failed, which is said. Raises RankLost."""
        error = self._settle()
        if error is None:
            return False
        if not self._ranks.is_known_to_all(error):
            raise error
        if self._ranks.is_first:
            logger.warning(
                "no checkpoint of step %d: %s; training goes on, and waits for the next one", self._step, error
            )
        return True

    def _settle(self) -> Exception | None:
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            _empty_frames(error)
        return error


def _empty_frames(error: BaseException) -> None:
    """Let go of what the failed calls worked with, a copy of the checkpoint among it: whoever keeps an error keeps
    them too, and an error in one of its own frames is only found by the next full collection."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, CheckpointException):
            waiting += [cause for cause, _ in one.failures.values()]


def load_model_parts(checkpoint: Checkpoint, model: Any, shares: Shares) -> None:
    """Fill the student's parameters and buffers with what a sharded checkpoint holds of them, in place."""
    _load(checkpoint, {_MODEL + name: tensor for name, tensor in _model_tensors(model, shares).items()})


def load_optimizer_parts(checkpoint: Checkpoint, shares: Shares) -> dict[str, Tensor]:
    """This rank's part of the optimizer's state, from a checkpoint of either kind."""
    if not checkpoint.is_sharded:
        whole = checkpoint.optimizer_tensors()
        return {name: _cut(name, tensor, shares) for name, tensor in whole.items()}
    with _refusal(checkpoint):
        metadata = _reader(checkpoint).read_metadata()
    parts: dict[str, Tensor] = {}
    wanted: dict[str, Tensor] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if not key.startswith(_OPTIMIZER) or not isinstance(entry, TensorStorageMetadata):
            continue
        name = key.removeprefix(_OPTIMIZER)
        what, _, parameter = name.partition(".")
        dtype = entry.properties.dtype
        if what == "step" or parameter not in shares.by_name:
            parts[name] = torch.zeros(entry.size, dtype=dtype)
            wanted[key] = parts[name]
        else:
            share = shares.by_name[parameter]
            parts[name] = torch.zeros_like(share.local, dtype=dtype, requires_grad=False)
            wanted[key] = share.as_whole(parts[name])
    _load(checkpoint, wanted)
    return parts


def load_whole_model(checkpoint: Checkpoint, model: Any) -> None:
    """Fill a model of this process alone with a sharded checkpoint's weights: for export."""
    tensors = {**dict(model.named_parameters()), **_buffers(model)}
    _load(checkpoint, {_MODEL + name: tensor.detach() for name, tensor in tensors.items()})


def _save(directory: Path, tensors: dict[str, Tensor], ranks: Ranks) -> None:
    try:
        writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
        save(tensors, storage_writer=writer, process_group=ranks.patient_group)
    except (OSError, ValueError, RuntimeError, CheckpointException) as error:
        # Of the failure of one rank all others hear too.
        failed = sorted(error.failures) if isinstance(error, CheckpointException) else [ranks.rank]
        raise CheckpointError(f"rank {failed[0]} could not write its part: {_reason(error)}") from error


def _load(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
    """Raises ConfigError: the shards are damaged, or hold something else."""
    # Without coordination: each rank knows what it needs, and where in the files it lies.
    with _refusal(checkpoint), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(tensors, storage_reader=_reader(checkpoint), no_dist=True)


def _reader(checkpoint: Checkpoint) -> HuggingFaceStorageReader:
    return HuggingFaceStorageReader(str(checkpoint.path / SHARDS_DIR))


@contextmanager
def _refusal(checkpoint: Checkpoint) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, CheckpointException) as error:
        raise ConfigError(
            f"checkpoint {checkpoint.path}: its shards can't be read: {_reason(error)}; allowed: whole ones, of this "
            f"very model"
        ) from error


def _reason(error: BaseException) -> str:
    """In a line; torch's own error brings the traceback of every rank that failed."""
    if isinstance(error, CheckpointException):
        causes = [cause for _, (cause, _) in sorted(error.failures.items())]
        error = causes[0] if causes else error
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _model_tensors(model: Any, shares: Shares) -> dict[str, Tensor]:
    """By the model's own names: trained parameters as parts of the whole, frozen ones and buffers as they are."""
    tensors = {
        name.removeprefix(_PREFIX): share.as_whole(share.local.detach())
        for name, share in shares.by_name.items()
        if name.startswith(_PREFIX)
    }
    frozen = {name: p.detach() for name, p in model.named_parameters() if name not in tensors}
    return {**tensors, **frozen, **_buffers(model)}


def _buffers(model: Any) -> dict[str, Tensor]:
    """Those that a checkpoint holds."""
    persistent = set(model.state_dict())
    return {name: buffer for name, buffer in model.named_buffers() if name in persistent}


def _as_whole(name: str, tensor: Tensor, shares: Shares) -> Tensor:
    what, _, parameter = name.partition(".")
    return tensor if what == "step" else shares.by_name[parameter].as_whole(tensor)


def _cut(name: str, tensor: Tensor, shares: Shares) -> Tensor:
    what, _, parameter = name.partition(".")
    return tensor if what == "step" or parameter not in shares.by_name else shares.by_name[parameter].cut(tensor)


def _num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.shape.numel() * tensor.element_size() for tensor in tensors.values())
