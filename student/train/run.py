"""One training run, from its configuration to its summary: loads, connects, resumes, trains, exports.

What a run leaves in --out: run.json (its settings), metrics.jsonl, eval.jsonl, checkpoints/, summary.json and, once
every sample was trained, model/ in Hugging Face format. Of several ranks the first writes all but its checkpoint's
shards.
"""

from __future__ import annotations

import logging
import platform
import secrets
import signal
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from ring.core.errors import DisaggKDError, LocalProtocolError
from ring.core.stats import DropCause, RetryCause
from ring.devices import find_device
from student.checkpoint import Checkpoint, CheckpointError
from student.config import TrainConfig
from student.data import MicroBatchPlan, TokenDataset
from student.metrics import peak_rss_bytes, print_result, write_summary
from student.parallel.ranks import Launch, RankLost, Ranks
from student.train.claim import Claim, check_shared, claimed
from student.train.feed import Feed
from student.train.loop import Loop, LoopSettings
from student.train.parts import Parts, load_parts, make_trained
from student.train.records import Records
from student.train.resume import (
    Progress,
    RunFiles,
    choose_checkpoint,
    curve_hash,
    identify,
    launched_by,
    restore,
    teacher_before,
)
from student.train.saver import Saver
from student.train.teachers import check_teachers

if TYPE_CHECKING:
    from student.parallel.checkpoint import BackgroundWriter

logger = logging.getLogger(__name__)

#: Of the configuration, what each rank may have for itself: machines differ.
OWN_SETTINGS = frozenset({"device", "debug", "bind_host", "cache_dir", "auth", "threads"})


def train(config: TrainConfig, launch: Launch | None = None) -> None:
    """launch: who this process is among the ranks of the run; None: it is alone.

    Raises ConfigError, TeacherLost, Interrupted, StepFailed, Diverged, CheckpointError, RankFailed, RankLost; see
    docs/operations.md."""
    files = RunFiles(Path(config.out))
    started_s = time.monotonic()
    with ExitStack() as stack:
        ranks = _meet(config, launch)
        config = _with_its_threads(config)
        ranks.check_equal("settings", shared_settings(config))
        ranks.together(lambda: check_teachers(config))
        word = ranks.from_first(secrets.token_hex(8) if ranks.are_many else "")
        claim = ranks.together(lambda: stack.enter_context(claimed(files.root, word)) if ranks.is_first else None)
        if ranks.are_many:
            ranks.together(lambda: check_shared(files.root, word))
        run_ids = _run_ids(ranks, launch)
        config = replace(config, resume=config.resume or _is_restart(files, ranks, launch, run_ids))
        checkpoint = choose_checkpoint(config, files, ranks)
        fingerprint = ranks.from_first(None if checkpoint is None else teacher_before(files))
        parts = load_parts(stack, config, ranks, checkpoint, fingerprint=fingerprint)
        loop, saver = _loop(stack, config, files, claim, checkpoint, parts, run_ids=run_ids)
        ending, is_agreed = "failed", False
        ranks.begin_training()
        try:
            loop.run()
            _check_complete(parts.plan, loop.progress)
            saver.export(step=loop.progress.step)
            ending, is_agreed = "finished", True
        except DisaggKDError as error:
            ending, is_agreed = f"{type(error).__name__}: {error}", ranks.is_known_to_all(error)
            raise
        finally:
            wall_s = time.monotonic() - started_s
            _end(config, files, claim, loop, parts, ending=ending, is_agreed=is_agreed, wall_s=wall_s)
    ranks.part()
    if ranks.is_first:
        left_out = loop.progress.samples_left_out
        done = (
            f"trained {loop.progress.step} steps, {loop.progress.position - left_out} samples; model in {files.model}"
        )
        if left_out:
            done += f"; {left_out} samples were left out, their gradient was not finite"
        print_result(done)


def _with_its_threads(config: TrainConfig) -> TrainConfig:
    """With --deterministic the number of threads makes the curve what it is, also where the library chose it."""
    return replace(config, threads=config.threads or torch.get_num_threads()) if config.deterministic else config


def shared_settings(config: TrainConfig) -> dict[str, object]:
    """What must be the same on all ranks."""
    shared = {name: value for name, value in asdict(config).items() if name not in OWN_SETTINGS}
    # None of them may go without protection where the others have it.
    shared["has_auth"] = config.auth is not None
    if config.deterministic:
        # A resume looks at those of rank 0.
        shared["threads"] = config.threads
    return shared


def _meet(config: TrainConfig, launch: Launch | None) -> Ranks:
    """Raises ConfigError: what needs several ranks is asked of one, or what they can't do together."""
    wants_groups = config.fsdp or config.vocab_parallel > 1
    if launch is None or (launch.world_size == 1 and not wants_groups):
        config.check_alone()
        return Ranks.alone(find_device(config.device, flag="--device"))
    return Ranks(
        launch,
        device=find_device(config.device, flag="--device", local_rank=launch.local_rank),
        timeout_s=config.rank_timeout,
        checkpoint_timeout_s=config.checkpoint_timeout,
        vocab_parallel=config.vocab_parallel,
        wants_groups=wants_groups,
    )


def _run_ids(ranks: Ranks, launch: Launch | None) -> list[str]:
    """Of the torchruns that have started this world, one a host."""
    return [] if launch is None else sorted(set(ranks.gather_words(launch.run_id)))


def _is_restart(files: RunFiles, ranks: Ranks, launch: Launch | None, run_ids: list[str]) -> bool:
    """Whether torchrun has started this world anew, and the run in --out is the one that it started before: one of its
    hosts is enough, for others may have come in their place."""
    if launch is None or not launch.restarts:
        return False
    is_ours = bool(ranks.from_first(not launched_by(files).isdisjoint(run_ids)))
    if is_ours:
        logger.info("started anew for the %d. time: going on from the last checkpoint", launch.restarts)
    return is_ours


def _loop(
    stack: ExitStack,
    config: TrainConfig,
    files: RunFiles,
    claim: Claim | None,
    checkpoint: Checkpoint | None,
    parts: Parts,
    *,
    run_ids: list[str],
) -> tuple[Loop, Saver]:
    """The loop, where the checkpoint left it; from here on --out is this run's."""
    ranks, plan = parts.ranks, parts.plan
    trained = make_trained(config, parts)

    def check_claim() -> None:
        # Loading takes minutes, in which somebody may have moved --out.
        if claim is not None:
            claim.check()

    def begin() -> None:
        check_claim()
        fingerprint = parts.fingerprint
        identify(config, files, ranks, run_ids, resumes=checkpoint is not None, teacher_fingerprint=fingerprint)

    ranks.together(begin if ranks.is_first else lambda: None)
    fixed = curve_hash(config, parts.data, ranks, teacher_fingerprint=parts.fingerprint)
    model = parts.student.model

    def go_on() -> Progress:
        check_claim()
        return restore(
            checkpoint, plan=plan, trained=trained, model=model, ranks=ranks, files=files, fixed=fixed, seed=config.seed
        )

    progress = ranks.together(go_on)

    def open_records() -> Records:
        check_claim()
        return Records.open(stack, files, step=progress.step)

    records = ranks.together(open_records if ranks.is_first else lambda: None)
    saver = Saver(
        config=config,
        files=files,
        claim=claim,
        parts=parts,
        trained=trained,
        records=records,
        fixed=fixed,
        background=_background(config, ranks),
    )
    eval_losses = ranks.from_first(None if records is None else list(records.evaluations.column("eval_loss").items()))
    feed = _feed(parts, position=progress.position)
    loop = Loop(
        trained=trained,
        schedule=parts.schedule,
        plan=plan,
        feed=feed,
        ring=None if parts.teachers is None else parts.teachers.ring,
        ranks=ranks,
        eval_data=parts.eval_data,
        settings=_loop_settings(config, parts),
        progress=progress,
        save=saver.save,
        finish_saving=saver.finish,
        records=records,
        eval_losses={int(step): loss for step, loss in eval_losses},
    )
    return loop, saver


def _background(config: TrainConfig, ranks: Ranks) -> BackgroundWriter | None:
    if not (ranks.has_groups and config.background_checkpoints):
        return None
    from student.parallel.checkpoint import BackgroundWriter

    return BackgroundWriter(ranks)


def _feed(parts: Parts, *, position: int) -> Feed:
    teachers = parts.teachers
    return Feed(
        parts.plan,
        parts.data,
        None if teachers is None else teachers.ring,
        ranks=parts.ranks,
        lockstep=None if teachers is None else teachers.lockstep,
        position=position,
        pad_id=parts.pad_id,
        device=parts.ranks.device,
    )


def _loop_settings(config: TrainConfig, parts: Parts) -> LoopSettings:
    return LoopSettings(
        batch_size=config.batch_size,
        clip_norm=config.clip_norm or None,
        max_left_out=config.max_left_out,
        checkpoint_every=config.checkpoint_every,
        eval_every=config.eval_every,
        eval_samples=config.eval_samples or None,
        pad_id=parts.pad_id,
        device=parts.ranks.device,
    )


def _end(
    config: TrainConfig,
    files: RunFiles,
    claim: Claim | None,
    loop: Loop,
    parts: Parts,
    *,
    ending: str,
    is_agreed: bool,
    wall_s: float,
) -> None:
    """The summary, of all ranks where they still talk to each other; then none leaves before the others."""
    ranks = parts.ranks
    if ranks.are_many:
        # Whoever started the ranks ends the others as soon as one has ended: each is about to.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    own = {"peak_rss_bytes": peak_rss_bytes(), **_ring_numbers(parts)}
    try:
        numbers = ranks.gather_words(own) if is_agreed else [own]
        if claim is not None:  # the first
            summary = _summary(config, loop, parts, numbers, ending=ending, wall_s=wall_s)
            _leave(summary, files.summary, claim, must=ending == "finished")
        if is_agreed:
            ranks.wait_for_all()
    except RankLost as error:
        logger.warning("at the end of the run: %s", error)


def _leave(summary: Mapping[str, object], path: Path, claim: Claim, *, must: bool) -> None:
    """Write the summary. A full disk that ended the run already must not hide how: unless `must`, it only warns."""
    try:
        claim.check()
        write_summary(path, summary)
    except CheckpointError as error:
        if must:
            raise
        logger.warning("%s", error)


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


def _ring_numbers(parts: Parts) -> dict[str, Any]:
    """What this rank's ring counted."""
    if parts.teachers is None:
        return {}
    snapshot = parts.teachers.ring.stats()
    machine = snapshot.machine
    return {
        "student_stall_s": snapshot.student_stall_s,
        "teacher_stall_s": machine.teacher_stall_s,
        "bytes_received": machine.bytes_received,
        "retries": machine.retries,
        "retries_by_cause": _counts(machine.retries_by_cause),
        "drops": machine.drops,
        "drops_by_cause": _counts(machine.drops_by_cause),
        "slots_bytes": snapshot.slots_bytes,
        "transports": dict(snapshot.backends),
    }


def _summary(
    config: TrainConfig, loop: Loop, parts: Parts, numbers: list[dict[str, Any]], *, ending: str, wall_s: float
) -> dict[str, object]:
    """numbers: of each rank and its ring; they are added up, of the memory the most is told."""
    data, plan = parts.data, parts.plan
    evaluations = loop.eval_losses
    left_out = loop.progress.samples_left_out
    skipped = _skipped(data, plan)
    expected = plan.end_position + sum(skipped.values())
    if left_out:
        skipped["not_finite"] = left_out

    def total(name: str) -> float:
        added: float = sum(own.get(name, 0) for own in numbers)
        return added

    def totals(name: str) -> dict[str, int]:
        counters = [Counter(own.get(name, {})) for own in numbers]
        return dict(sum(counters, Counter()))

    return {
        "ending": ending,
        "ranks": parts.ranks.world_size,
        "steps": loop.progress.step,
        "expected_steps": plan.num_steps,
        "samples_expected": expected,
        "samples_trained": loop.progress.position - left_out,
        "samples_skipped": skipped,
        "eval_loss_first": next(iter(evaluations.values()), None),
        "eval_loss_last": next(reversed(evaluations.values()), None),
        "wall_s": wall_s,
        "student_stall_s": float(total("student_stall_s")),
        "teacher_stall_s": float(total("teacher_stall_s")),
        "bytes_received": total("bytes_received"),
        "retries": total("retries"),
        "retries_by_cause": totals("retries_by_cause"),
        "drops": total("drops"),
        "drops_by_cause": totals("drops_by_cause"),
        "slots_bytes": total("slots_bytes"),
        "transports": _transports(numbers),
        "teacher_fingerprint": parts.fingerprint,
        "peak_rss_bytes": max(own["peak_rss_bytes"] for own in numbers),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "config": asdict(config),
    }


def _transports(numbers: list[dict[str, Any]]) -> dict[str, str]:
    """Of each replica that some rank was connected to; several, where ranks reach it in several ways."""
    found: dict[str, set[str]] = {}
    for own in numbers:
        for name, backend in own.get("transports", {}).items():
            found.setdefault(name, set()).add(backend)
    return {name: ", ".join(sorted(backends)) for name, backends in found.items()}


def _counts(by_cause: Mapping[RetryCause, int] | Mapping[DropCause, int]) -> dict[str, int]:
    """Without those that did not happen."""
    return {cause.value: count for cause, count in by_cause.items() if count}
