"""What a run is made of: student, data, plan, teachers, and the module that is trained; for one rank of one or many."""

from __future__ import annotations

import logging
import warnings
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from planner.token_map import num_tokens_of, token_map_hash
from ring.core.errors import ConfigError
from ring.core.messages import HeadInfo
from ring.determinism import fix_kernels
from student.checkpoint import Checkpoint
from student.config import TrainConfig
from student.data import DataSettings, MicroBatchPlan, TokenDataset, load_data
from student.loss import FullLogitsLoss, Head, KDLoss
from student.loss.options import LossOptions
from student.model import WEIGHT_DTYPES, DistilledStudent, LoadedStudent, load_student
from student.optim import AdamWSettings, Schedule, StudentOptimizer
from student.parallel.ranks import Ranks
from student.parallel.shares import Shares
from student.parallel.vocabulary import VocabGroup, VocabShard, shard_vocabulary
from student.train.teachers import Teachers, connected

logger = logging.getLogger(__name__)

#: Full windows of any vocabulary up to 200k columns fit.
DETERMINISTIC_WORKSPACE_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run is made of, before it is known where it goes on from. `teachers`: None trains on labels alone.
    `vocab`: None where this rank has whole heads."""

    ranks: Ranks
    student: LoadedStudent
    data: TokenDataset
    eval_data: TokenDataset | None
    plan: MicroBatchPlan
    schedule: Schedule
    adamw: AdamWSettings
    vocab: VocabShard | None
    teachers: Teachers | None

    @property
    def pad_id(self) -> int:
        pad_id = getattr(self.student.tokenizer, "pad_token_id", None)
        return int(pad_id) if pad_id is not None and pad_id < self.student.num_ids else 0

    @property
    def fingerprint(self) -> str | None:
        """The teacher's."""
        return None if self.teachers is None else self.teachers.fingerprint


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run trains: the module, where its parameters lie, and their optimizer."""

    module: DistilledStudent
    shares: Shares
    optimizer: StudentOptimizer


def load_parts(
    stack: ExitStack, config: TrainConfig, ranks: Ranks, checkpoint: Checkpoint | None, *, fingerprint: str | None
) -> Parts:
    """The teachers come last: all that can be refused without them is refused before they are waited for.

    fingerprint: of the teacher that a resumed run began with, where that is known."""
    adamw = AdamWSettings(beta1=config.beta1, beta2=config.beta2, weight_decay=config.weight_decay)
    _set_up_process(config, ranks)
    student, data, eval_data = ranks.one_after_the_first(lambda: _load(config, ranks, checkpoint))
    ranks.check_equal("--data", data.content_hash())
    plan = _plan(config, data, ranks)
    schedule = Schedule(
        peak_lr=config.lr,
        num_steps=plan.num_steps,
        num_warmup_steps=config.warmup_steps,
        kind=config.schedule,
        min_lr_frac=config.min_lr_frac,
    )
    mesh = ranks.vocab_mesh
    vocab = None if mesh is None else shard_vocabulary(student, VocabGroup.of(mesh))
    teachers = ranks.together(lambda: _connect(stack, config, ranks, student, data, plan, vocab, fingerprint))
    ranks.check_equal("the teacher's fingerprint", None if teachers is None else teachers.fingerprint)
    return Parts(
        ranks=ranks,
        student=student,
        data=data,
        eval_data=eval_data,
        plan=plan,
        schedule=schedule,
        adamw=adamw,
        vocab=vocab,
        teachers=teachers,
    )


def make_trained(config: TrainConfig, parts: Parts) -> Trained:
    """Student and loss as one module on its device, cut over the ranks where that is asked for."""
    ranks, vocab = parts.ranks, parts.vocab
    module = _module(config, parts.student, parts.teachers, vocab).to(ranks.device)
    if config.fsdp:
        # Only here: it brings in more of torch than a single process needs.
        from student.parallel.sharding import shard_fully

        shard_fully(
            module,
            parts.student.model,
            ranks,
            mixed_precision=config.precision == "bf16",
            reshard_after_forward=config.reshard_after_forward,
            kept=() if vocab is None else vocab.parameters,
        )
    columns = {} if vocab is None else dict.fromkeys(vocab.parameters, vocab.num_columns)
    shares = Shares(module, ranks, vocab=columns)
    return Trained(module=module, shares=shares, optimizer=StudentOptimizer(shares.locals(), parts.adamw))


def _load(
    config: TrainConfig, ranks: Ranks, checkpoint: Checkpoint | None
) -> tuple[LoadedStudent, TokenDataset, TokenDataset | None]:
    assert config.student is not None
    # Of a checkpoint whose weights are in shards they are read later, each rank its own.
    from_config = config.from_config if checkpoint is None else checkpoint.is_sharded
    student = load_student(
        config.student if checkpoint is None else str(checkpoint.model_dir),
        dtype=WEIGHT_DTYPES[config.precision],
        from_config=from_config,
        seed=config.seed,
        device=ranks.device,
    )
    return student, *_load_data(config, student)


def _set_up_process(config: TrainConfig, ranks: Ranks) -> None:
    if config.threads:
        torch.set_num_threads(config.threads)
    if config.deterministic:
        fix_kernels(num_threads=config.threads or torch.get_num_threads())
    if ranks.are_many:
        # Nothing to be warned of where others have the rows.
        warnings.filterwarnings("ignore", message="distillation loss: no row of this call counts")
    # Dropout is drawn anew on every rank.
    torch.manual_seed(config.seed + ranks.rank)


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


def _plan(config: TrainConfig, data: TokenDataset, ranks: Ranks) -> MicroBatchPlan:
    return MicroBatchPlan(
        row_counts=data.row_counts,
        lengths=data.lengths,
        batch_size=config.batch_size,
        grad_accum=config.grad_accum,
        epochs=config.epochs,
        max_steps=config.steps,
        seed=config.seed,
        rank=ranks.rank,
        world_size=ranks.world_size,
        packed_tokens=config.max_length if config.packing else None,
    )


def _connect(
    stack: ExitStack,
    config: TrainConfig,
    ranks: Ranks,
    student: LoadedStudent,
    data: TokenDataset,
    plan: MicroBatchPlan,
    vocab: VocabShard | None,
    fingerprint: str | None,
) -> Teachers | None:
    if config.kd_weight == 0:
        return None
    if student.tokenizer is None:
        raise ConfigError(
            f"student {student.source}: no tokenizer, so nothing says that its token ids mean what the teacher's do; "
            f"allowed: a directory with the tokenizer, or --kd-weight 0"
        )
    token_ids = student.tokenizer.get_vocab()

    def columns(head: HeadInfo) -> tuple[int, int]:
        """The teacher's columns that go with the student's: padding aside, which only one of them may have."""
        assert vocab is not None
        return min(vocab.start, head.real_vocab), min(vocab.stop, head.real_vocab)

    return stack.enter_context(
        connected(
            config,
            token_map_hash=token_map_hash(token_ids),
            vocab_size=num_tokens_of(token_ids),
            max_rows=plan.max_microbatch_rows(),
            max_tokens=plan.max_microbatch_tokens(),
            max_document_tokens=int(data.lengths.max()),
            ranks=ranks,
            fingerprint=fingerprint,
            columns=None if vocab is None else columns,
        )
    )


def _module(
    config: TrainConfig, student: LoadedStudent, teachers: Teachers | None, vocab: VocabShard | None
) -> DistilledStudent:
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
            vocab_start=0 if vocab is None else vocab.start,
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
        vocab=vocab,
    )


def _workspace_bytes(config: TrainConfig) -> int | None:
    """The loss's window, and so the order of its sums, follows from this; by itself it follows from free memory."""
    if config.workspace_bytes is None and config.deterministic:
        return DETERMINISTIC_WORKSPACE_BYTES
    return config.workspace_bytes
