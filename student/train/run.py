"""One training run, from its configuration to its summary: loads, connects, resumes, trains, exports.

What a run leaves in --out: run.json (its settings), metrics.jsonl, eval.jsonl, checkpoints/, summary.json and, once
every sample was trained, model/ in Hugging Face format.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

from planner.token_map import num_tokens_of, token_map_hash
from ring.core.errors import ConfigError, DisaggKDError, LocalProtocolError
from ring.core.stats import DropCause, RetryCause
from ring.determinism import fix_kernels
from student.checkpoint import Checkpoint, TrainState, export_model, write_checkpoint
from student.config import TrainConfig
from student.data import DataSettings, MicroBatchPlan, TokenDataset, load_data
from student.loss import FullLogitsLoss, Head, KDLoss
from student.loss.options import LossOptions
from student.metrics import MetricsFile, peak_rss_bytes, write_summary
from student.model import WEIGHT_DTYPES, DistilledStudent, LoadedStudent, load_student
from student.optim import AdamWSettings, Schedule, StudentOptimizer
from student.rng import capture_rng
from student.train.feed import Feed
from student.train.loop import Loop, LoopSettings, Progress
from student.train.resume import RunFiles, checkpoint_to_resume, claimed, curve_hash, identify, restore, warn_of_gaps
from student.train.teachers import Teachers, connected, resolve_device

logger = logging.getLogger(__name__)

#: Full windows of any vocabulary up to 200k columns fit.
DETERMINISTIC_WORKSPACE_BYTES = 256 * 2**20


def train(config: TrainConfig) -> None:
    """Raises ConfigError, TeacherLost, Interrupted, Diverged, CheckpointError; see docs/operations.md."""
    assert config.student is not None
    files = RunFiles(Path(config.out))
    started_s = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(claimed(files.root))
        checkpoint = checkpoint_to_resume(config, files)
        parts = _parts(stack, config, checkpoint)
        loop = _loop(stack, config, files, checkpoint, parts)
        ending = "failed"
        try:
            loop.run()
            _check_complete(parts.plan, loop.progress)
            export_model(files.model, model=parts.student.model, tokenizer=parts.student.tokenizer)
            ending = "finished"
        except DisaggKDError as error:
            ending = f"{type(error).__name__}: {error}"
            raise
        finally:
            wall_s = time.monotonic() - started_s
            summary = _summary(config, loop, parts, ending=ending, wall_s=wall_s)
            _leave(summary, files.summary, must=ending == "finished")
    print(f"trained {loop.progress.step} steps, {loop.progress.position} samples; model in {files.model}", flush=True)


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """What a run is made of, before it is known where it goes on from. `teachers`: None trains on labels alone."""

    device: torch.device
    student: LoadedStudent
    data: TokenDataset
    eval_data: TokenDataset | None
    plan: MicroBatchPlan
    schedule: Schedule
    adamw: AdamWSettings
    teachers: Teachers | None


def _parts(stack: ExitStack, config: TrainConfig, checkpoint: Checkpoint | None) -> _Parts:
    """The teachers come last: all that can be refused without them is refused before they are waited for."""
    assert config.student is not None
    adamw = AdamWSettings(beta1=config.beta1, beta2=config.beta2, weight_decay=config.weight_decay)
    _set_up_process(config)
    device = resolve_device(config.device)
    student = load_student(
        config.student if checkpoint is None else str(checkpoint.model_dir),
        dtype=WEIGHT_DTYPES[config.precision],
        from_config=config.from_config and checkpoint is None,
        seed=config.seed,
        device=device,
    )
    data, eval_data = _load_data(config, student)
    plan = _plan(config, data)
    schedule = Schedule(
        peak_lr=config.lr,
        num_steps=plan.num_steps,
        num_warmup_steps=config.warmup_steps,
        kind=config.schedule,
        min_lr_frac=config.min_lr_frac,
    )
    return _Parts(
        device=device,
        student=student,
        data=data,
        eval_data=eval_data,
        plan=plan,
        schedule=schedule,
        adamw=adamw,
        teachers=_connect(stack, config, student, data, plan),
    )


def _loop(stack: ExitStack, config: TrainConfig, files: RunFiles, checkpoint: Checkpoint | None, parts: _Parts) -> Loop:
    """The loop, where the checkpoint left it; from here on --out is this run's."""
    student, data, plan, teachers = parts.student, parts.data, parts.plan, parts.teachers
    module = _module(config, student, teachers).to(parts.device)
    optimizer = StudentOptimizer(module, parts.adamw)
    fingerprint = None if teachers is None else teachers.fingerprint
    identify(config, files, resumes=checkpoint is not None, teacher_fingerprint=fingerprint)
    fixed = curve_hash(config, data, teacher_fingerprint=fingerprint)
    progress = restore(checkpoint, plan=plan, optimizer=optimizer, files=files, fixed=fixed)
    step_file = MetricsFile(files.metrics, resume_step=progress.step)
    stack.callback(step_file.close)
    warn_of_gaps(step_file, step=progress.step)
    eval_file = MetricsFile(files.evaluations, resume_step=progress.step)
    stack.callback(eval_file.close)

    def save(now: Progress) -> None:
        # First: no checkpoint may survive a power cut without the metrics that lead to it.
        step_file.sync()
        eval_file.sync()
        state = TrainState(
            step=now.step,
            position=now.position,
            config_hash=fixed,
            schedule=asdict(parts.schedule),
            rng=(capture_rng(),),
        )
        write_checkpoint(
            files.checkpoints,
            state,
            model=student.model,
            optimizer_tensors=optimizer.state_tensors(),
            tokenizer=student.tokenizer,
            keep=config.keep_checkpoints,
        )

    ring, pad_id = None if teachers is None else teachers.ring, _pad_id(student)
    return Loop(
        module=module,
        optimizer=optimizer,
        schedule=parts.schedule,
        plan=plan,
        feed=Feed(plan, data, ring, position=progress.position, pad_id=pad_id, device=parts.device),
        ring=ring,
        eval_data=parts.eval_data,
        settings=_loop_settings(config, pad_id=pad_id, device=parts.device),
        progress=progress,
        save=save,
        step_file=step_file,
        eval_file=eval_file,
        eval_losses=eval_file.column("eval_loss"),
    )


def _loop_settings(config: TrainConfig, *, pad_id: int, device: torch.device) -> LoopSettings:
    return LoopSettings(
        batch_size=config.batch_size,
        clip_norm=config.clip_norm or None,
        checkpoint_every=config.checkpoint_every,
        eval_every=config.eval_every,
        eval_samples=config.eval_samples or None,
        pad_id=pad_id,
        device=device,
    )


def _leave(summary: Mapping[str, object], path: Path, *, must: bool) -> None:
    """Write the summary. A full disk that ended the run already must not hide how: unless `must`, it only warns."""
    try:
        write_summary(path, summary)
    except OSError as error:
        if must:
            raise
        logger.warning("%s could not be written: %s", path, error)


def _set_up_process(config: TrainConfig) -> None:
    if config.threads:
        torch.set_num_threads(config.threads)
    if config.deterministic:
        fix_kernels(num_threads=config.threads or torch.get_num_threads())
    torch.manual_seed(config.seed)


def _load_data(config: TrainConfig, student: LoadedStudent) -> tuple[TokenDataset, TokenDataset | None]:
    if student.max_positions is not None and config.max_length > student.max_positions:
        raise ConfigError(
            f"--max-length {config.max_length}: the student has positions for {student.max_positions} tokens"
        )

    def load(names: tuple[str, ...]) -> TokenDataset:
        settings = DataSettings(
            files=names,
            max_length=config.max_length,
            long_documents=config.long_documents,
            cache_dir=config.cache_dir,
        )
        return load_data(settings, student.tokenizer, vocab_size=student.num_ids)

    data = load(config.data)
    logger.info("data: %s", data.report.line())
    eval_data = load(config.eval_data) if config.eval_data else None
    if eval_data is not None:
        logger.info("held-out data: %s", eval_data.report.line())
    return data, eval_data


def _plan(config: TrainConfig, data: TokenDataset) -> MicroBatchPlan:
    return MicroBatchPlan(
        row_counts=data.row_counts,
        lengths=data.lengths,
        batch_size=config.batch_size,
        grad_accum=config.grad_accum,
        epochs=config.epochs,
        max_steps=config.steps,
        seed=config.seed,
        packed_tokens=config.max_length if config.packing else None,
    )


def _connect(
    stack: ExitStack, config: TrainConfig, student: LoadedStudent, data: TokenDataset, plan: MicroBatchPlan
) -> Teachers | None:
    if config.kd_weight == 0:
        return None
    if student.tokenizer is None:
        raise ConfigError(
            f"student {student.source}: no tokenizer, so nothing says that its token ids mean what the teacher's do; "
            f"allowed: a directory with the tokenizer, or --kd-weight 0"
        )
    token_ids = student.tokenizer.get_vocab()
    return stack.enter_context(
        connected(
            config,
            token_map_hash=token_map_hash(token_ids),
            vocab_size=num_tokens_of(token_ids),
            max_rows=plan.max_microbatch_rows(),
            max_tokens=plan.max_microbatch_tokens(),
            max_document_tokens=int(data.lengths.max()),
        )
    )


def _module(config: TrainConfig, student: LoadedStudent, teachers: Teachers | None) -> DistilledStudent:
    try:
        options = LossOptions(
            divergence=config.divergence,
            temperature=config.temperature,
            kd_weight=config.kd_weight,
            ce_weight=config.ce_weight,
            teacher_weight=config.jsd_teacher_weight,
            skew_alpha=config.skew_alpha,
            precision=config.loss_precision,
            workspace_bytes=_workspace_bytes(config),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    head = None
    if teachers is not None:
        head = Head(
            weight=teachers.weight,
            bias=teachers.bias,
            logit_softcap=teachers.head.logit_softcap,
            logit_scale=teachers.head.logit_scale,
            real_vocab=teachers.head.real_vocab,
        )
    loss_type = KDLoss if config.loss == "fused" else FullLogitsLoss
    return DistilledStudent(
        student.model,
        student.head_spec,
        loss=loss_type.from_options(options),
        teacher_head=head,
        precision=config.precision,
        packed=config.packing,
        gradient_checkpointing=config.gradient_checkpointing,
    )


def _workspace_bytes(config: TrainConfig) -> int | None:
    """The loss's window, and so the order of its sums, follows from this; by itself it follows from free memory."""
    if config.workspace_bytes is None and config.deterministic:
        return DETERMINISTIC_WORKSPACE_BYTES
    return config.workspace_bytes


def _pad_id(student: LoadedStudent) -> int:
    pad_id = getattr(student.tokenizer, "pad_token_id", None)
    return int(pad_id) if pad_id is not None and pad_id < student.num_ids else 0


def _check_complete(plan: MicroBatchPlan, progress: Progress) -> None:
    """No run ends well that left something out. Raises LocalProtocolError."""
    found, wanted = (progress.step, progress.position), (plan.num_steps, plan.end_position)
    if found != wanted:
        raise LocalProtocolError(
            f"the run came to its end after step {found[0]} at sample {found[1]}; asked for were {wanted[0]} steps and "
            f"{wanted[1]} samples"
        )


def _skipped(data: TokenDataset, plan: MicroBatchPlan) -> dict[str, int]:
    """What the files hold and nobody trains on, in all passes that the run begins, by reason."""
    num_passes = -(-plan.end_position // plan.num_samples)
    reasons = {
        "empty_document": data.report.num_empty_documents,
        "no_target": data.report.num_samples_without_target,
    }
    return {reason: num_passes * count for reason, count in reasons.items() if count}


def _summary(config: TrainConfig, loop: Loop, parts: _Parts, *, ending: str, wall_s: float) -> dict[str, object]:
    data, plan, teachers = parts.data, parts.plan, parts.teachers
    snapshot = None if teachers is None else teachers.ring.stats()
    evaluations = loop.eval_losses
    skipped = _skipped(data, plan)
    return {
        "ending": ending,
        "steps": loop.progress.step,
        "expected_steps": plan.num_steps,
        "samples_expected": plan.end_position + sum(skipped.values()),
        "samples_trained": loop.progress.position,
        "samples_skipped": skipped,
        "eval_loss_first": next(iter(evaluations.values()), None),
        "eval_loss_last": next(reversed(evaluations.values()), None),
        "wall_s": wall_s,
        "student_stall_s": 0.0 if snapshot is None else snapshot.student_stall_s,
        "teacher_stall_s": 0.0 if snapshot is None else snapshot.machine.teacher_stall_s,
        "bytes_received": 0 if snapshot is None else snapshot.machine.bytes_received,
        "retries": 0 if snapshot is None else snapshot.machine.retries,
        "retries_by_cause": {} if snapshot is None else _counts(snapshot.machine.retries_by_cause),
        "drops": 0 if snapshot is None else snapshot.machine.drops,
        "drops_by_cause": {} if snapshot is None else _counts(snapshot.machine.drops_by_cause),
        "slots_bytes": 0 if snapshot is None else snapshot.slots_bytes,
        "transports": {} if snapshot is None else dict(snapshot.backends),
        "teacher_fingerprint": None if teachers is None else teachers.fingerprint,
        "peak_rss_bytes": peak_rss_bytes(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "config": asdict(config),
    }


def _counts(by_cause: Mapping[RetryCause, int] | Mapping[DropCause, int]) -> dict[str, int]:
    """Without those that did not happen."""
    return {cause.value: count for cause, count in by_cause.items() if count}
