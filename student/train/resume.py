"""Which checkpoint a run goes on from, and whether it is the same run: what makes its curve must not have changed."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ring.core.errors import ConfigError
from student.checkpoint import (
    Checkpoint,
    TrainState,
    latest_checkpoint,
    open_checkpoint,
    recover_checkpoints,
    set_aside_later,
)
from student.config import TrainConfig
from student.data import MicroBatchPlan, TokenDataset
from student.metrics import MetricsFile, write_summary
from student.parallel.ranks import Ranks
from student.rng import restore_rng, seed_rng
from student.train.parts import Trained
from student.train.teachers import check_same_teacher

logger = logging.getLogger(__name__)

#: Settings that make the curve what it is: a resumed run must have the same.
CURVE_SETTINGS = (
    "student",
    "from_config",
    "kd_weight",
    "ce_weight",
    "divergence",
    "temperature",
    "jsd_teacher_weight",
    "skew_alpha",
    "loss",
    "loss_precision",
    "data",
    "max_length",
    "long_documents",
    "packing",
    "steps",
    "epochs",
    "lr",
    "schedule",
    "warmup_steps",
    "min_lr_frac",
    "weight_decay",
    "beta1",
    "beta2",
    "clip_norm",
    "precision",
    "seed",
)
#: Their product with the number of ranks is one of them; on as many ranks each of the two is.
CUT_SETTINGS = ("batch_size", "grad_accum")
#: With --deterministic they are part of the curve too, as is the number of ranks: each changes the order of some sum.
EXACT_SETTINGS = ("deterministic", "threads", "workspace_bytes", "device", "fsdp", "vocab_parallel")


@dataclass(kw_only=True)
class Progress:
    """Where the run is: its last step, and the position that a checkpoint of it stores; `samples_left_out`: before
    that, of steps whose gradient was not finite; `steps_left_out_in_a_row`: the last so many were such steps."""

    step: int
    position: int
    samples_left_out: int = 0
    steps_left_out_in_a_row: int = 0


@dataclass(frozen=True)
class RunFiles:
    """Where things are in --out."""

    root: Path

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def settings(self) -> Path:
        return self.root / "run.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        return self.root / "eval.jsonl"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def model(self) -> Path:
        return self.root / "model"


def choose_checkpoint(config: TrainConfig, files: RunFiles, ranks: Ranks) -> Checkpoint | None:
    """The checkpoint that all ranks go on from; None = from the beginning. Raises as `checkpoint_to_resume`."""
    chosen = ranks.together(lambda: checkpoint_to_resume(config, files, ranks) if ranks.is_first else None)
    name = ranks.from_first(None if chosen is None else chosen.path.name)
    if name is None or not ranks.are_many:
        return chosen
    # Rank 0 has read every byte; that it is there for the others too is what a shared file system means.
    return ranks.together(lambda: chosen or open_checkpoint(files.checkpoints / str(name), read_all=False))


def checkpoint_to_resume(config: TrainConfig, files: RunFiles, ranks: Ranks) -> Checkpoint | None:
    """The checkpoint to go on from; None = from the beginning.

    Raises ConfigError: --out holds another run, or no whole checkpoint, or one of other settings; nothing is lost."""
    if not config.resume:
        # One that ended before its first step left nothing to lose.
        has_steps = files.metrics.exists() and files.metrics.stat().st_size > 0
        if has_steps or files.checkpoints.exists():
            raise ConfigError(f"--out {files.root} holds a run already; allowed: --resume, or another directory")
        return None
    recover_checkpoints(files.checkpoints)
    checkpoint, skipped = latest_checkpoint(files.checkpoints)
    for entry in skipped:
        logger.warning("not used: %s", entry.reason)
    if checkpoint is None and skipped:
        raise ConfigError(f"--resume: no whole checkpoint in {files.checkpoints}: {skipped[0].reason}")
    if checkpoint is None:
        logger.info("nothing to resume in %s: starting from the beginning", files.root)
        return None
    changed = _changed_settings(config, files, ranks)
    if changed:
        raise ConfigError(f"--resume: {'; '.join(changed)}; allowed: the settings that the run began with")
    logger.info("resuming from %s", checkpoint.path)
    return checkpoint


def curve_hash(config: TrainConfig, data: TokenDataset, ranks: Ranks, *, teacher_fingerprint: str | None) -> str:
    """Over everything that makes the curve what it is: settings, samples, teacher. A checkpoint carries it."""
    sequences_a_step = config.batch_size * config.grad_accum * ranks.world_size
    content = [_curve(config), sequences_a_step, data.content_hash(), teacher_fingerprint]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def launched_by(files: RunFiles) -> set[str]:
    """The `Launch.run_id` of each rank that the run in --out began with."""
    found = _settings_before(files).get("run_ids")
    return {name for name in found if isinstance(name, str)} if isinstance(found, list) else set()


def identify(
    config: TrainConfig,
    files: RunFiles,
    ranks: Ranks,
    run_ids: list[str],
    *,
    resumes: bool,
    teacher_fingerprint: str | None,
) -> None:
    """Write down what a new run is; see that a resumed one has the same teacher. run_ids: of its ranks' `Launch`es.

    Raises ConfigError: it has another one; nothing was changed."""
    if not resumes:
        settings = {**asdict(config), "ranks": ranks.world_size, "teacher_fingerprint": teacher_fingerprint}
        write_summary(files.settings, settings | {"run_ids": run_ids})
        return
    before = _settings_before(files).get("teacher_fingerprint", teacher_fingerprint)
    check_same_teacher(before=before, now=teacher_fingerprint)


def teacher_before(files: RunFiles) -> str | None:
    """The fingerprint of the teacher that the run in --out began with; None: without one, or nothing says so."""
    found = _settings_before(files).get("teacher_fingerprint")
    return found if isinstance(found, str) else None


def restore(
    checkpoint: Checkpoint | None,
    *,
    plan: MicroBatchPlan,
    trained: Trained,
    model: Any,
    ranks: Ranks,
    files: RunFiles,
    fixed: str,
    seed: int,
) -> Progress:
    """Where the run is, with weights, optimizer and random generators as they were there. fixed: its `curve_hash`.
    seed: of ranks that the checkpoint has no generators for.

    Nothing may draw random numbers between this and the first step. Raises ConfigError: the data is not the same."""
    if checkpoint is None:
        return Progress(step=0, position=0)
    state = checkpoint.state
    if state.config_hash != fixed or plan.step_at(state.position) != state.step:
        raise ConfigError(
            f"--resume: {checkpoint.path} was made with other data (or {files.settings} was changed or lost, so that "
            f"nothing says which setting or teacher is another one); allowed: what the run began with"
        )
    if ranks.is_first:
        set_aside_later(files.checkpoints, step=state.step)
    if checkpoint.is_sharded or ranks.has_groups:
        from student.parallel.checkpoint import load_model_parts, load_optimizer_parts

        if checkpoint.is_sharded:
            load_model_parts(checkpoint, model, trained.shares)
        trained.optimizer.load_state_tensors(load_optimizer_parts(checkpoint, trained.shares))
    else:
        trained.optimizer.load_state_tensors(checkpoint.optimizer_tensors())
    restore_generators(state, rank=ranks.rank, seed=seed)
    return Progress(
        step=state.step,
        position=state.position,
        samples_left_out=state.samples_left_out,
        steps_left_out_in_a_row=state.steps_left_out_in_a_row,
    )


def restore_generators(state: TrainState, *, rank: int, seed: int) -> None:
    """As this rank left them. On more ranks than before one may have no past: it draws what no other rank draws."""
    if rank < len(state.rng):
        restore_rng(state.rng[rank])
    else:
        seed_rng(seed, rank, state.step)


def warn_of_gaps(step_file: MetricsFile, *, step: int) -> None:
    """Say which lines of the run so far are not there: a file that was lost or damaged is not mended by going on."""
    missing = sorted(set(range(1, step + 1)) - set(step_file.column("step")))
    if missing:
        logger.warning(
            "metrics.jsonl lacks %d of the %d steps that the checkpoint contains, from step %d on; the run goes on",
            len(missing),
            step,
            missing[0],
        )


def _curve(config: TrainConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in CURVE_SETTINGS}


def _settings_before(files: RunFiles) -> Mapping[str, object]:
    try:
        before = json.loads(files.settings.read_text())
    except (OSError, ValueError, RecursionError):
        return {}  # the checkpoint's own hash still tells whether anything changed, only not what
    return before if isinstance(before, dict) else {}


def _count(settings: Mapping[str, object], name: str) -> int:
    """A number of run.json; 1 where somebody has made something else of it: the checkpoint's own hash tells then."""
    value = settings.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 1


def _changed_settings(config: TrainConfig, files: RunFiles, ranks: Ranks) -> list[str]:
    before = _settings_before(files)
    now = json.loads(json.dumps(_curve(config)))
    if before.get("deterministic"):
        now |= {name: getattr(config, name) for name in EXACT_SETTINGS}
    num_ranks = _count(before, "ranks")
    is_cut_anew = num_ranks != ranks.world_size
    cut = {name: getattr(config, name) for name in CUT_SETTINGS}
    if not is_cut_anew:
        now |= cut
    changed = [f"--{k.replace('_', '-')} was {before[k]}, now {v}" for k, v in now.items() if before.get(k, v) != v]
    if is_cut_anew and before.get("deterministic"):
        changed.append(
            f"the ranks were {num_ranks}, now {ranks.world_size}, and a --deterministic run goes on on as many only"
        )
    if is_cut_anew and all(name in before for name in CUT_SETTINGS):
        was = math.prod(_count(before, name) for name in CUT_SETTINGS) * num_ranks
        is_now = math.prod(cut.values()) * ranks.world_size
        if was != is_now:
            changed.append(
                f"--batch-size x --grad-accum x ranks was {before['batch_size']} x {before['grad_accum']} x {num_ranks}"
                f", now {config.batch_size} x {config.grad_accum} x {ranks.world_size}"
            )
    return changed
