"""The configuration of a training run: every flag of `python -m student.train`, validated whole at start."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ring.command import flag
from ring.core.config import MAX_COUNT, MAX_SECONDS
from ring.core.errors import ConfigError

DEFAULT_ENDPOINT = "tcp://127.0.0.1:5555"
#: Where `make demo` leaves its models; the bare command uses them.
DEMO_DIR = Path("runs/demo")

#: More would only fail later: no machine has that many cores.
MAX_THREADS = 4096
#: Of a run's name, as messages to replicas may carry it.
MAX_NAME_BYTES = 256

Precision = Literal["bf16", "fp32", "fp64"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Raises ConfigError on construction: a value out of its range, or two that don't go together."""

    student: str | None = flag(None, "Hugging Face causal LM to train: a directory or hub id", metavar="DIR|ID")
    from_config: bool = flag(False, "start from random weights, made from the student's config.json and --seed")
    teacher: tuple[str, ...] = flag(
        (), "disagg: replica endpoints; colocated: the teacher's directory or hub id", metavar="TCP|DIR|ID"
    )
    teacher_dtype: Literal["auto", "bf16", "fp16", "fp32", "fp64"] = flag(
        "auto", "colocated: dtype of the teacher's weights; auto is the checkpoint's"
    )
    layout: Literal["disagg", "colocated"] = flag("disagg", "where the teacher runs")
    max_batch_tokens: int = flag(16384, "colocated: tokens of one teacher pass, padding included")
    transport: str = flag("auto", "how states travel: auto, or a transport by name (shm, zmq, ucx)")
    bind_host: str | None = flag(
        None, "address at which replicas reach this trainer; default: the one it reaches them from"
    )
    auth: str | None = flag(None, "keys of this trainer and of its teachers, made by `disaggkd keys`", metavar="DIR")
    insecure: bool = flag(False, "allow endpoints beyond this machine, though nothing is authenticated or encrypted")
    crc: Literal["auto", "on", "off"] = flag("auto", "check every fill with crc32c; auto is what the transport advises")

    data: tuple[str, ...] = flag((), "training files or globs: JSONL, Parquet or text", metavar="FILE")
    eval_data: tuple[str, ...] = flag((), "held-out files, same formats", metavar="FILE")
    max_length: int = flag(512, "tokens of the longest sequence")
    long_documents: Literal["split", "truncate", "error", "auto"] = flag(
        "auto", "documents over --max-length; auto: split text, truncate chats"
    )
    packing: bool = flag(False, "several documents in a sequence, without attention from one to another")
    cache_dir: str | None = flag(
        None, "where tokenized data is kept; default: the datasets library's place", metavar="DIR"
    )

    steps: int | None = flag(None, "optimizer steps; give this or --epochs")
    epochs: int | None = flag(None, "passes over the data")
    batch_size: int = flag(8, "sequences in a microbatch")
    grad_accum: int = flag(1, "microbatches in an optimizer step")
    lr: float = flag(1e-4, "peak learning rate")
    schedule: Literal["cosine", "linear", "constant"] = flag("cosine", "learning rate after the warm-up")
    warmup_steps: int = flag(0, "optimizer steps of linear warm-up")
    min_lr_frac: float = flag(0.0, "final learning rate as a fraction of --lr")
    weight_decay: float = flag(0.01, "AdamW's, on matrices only")
    beta1: float = flag(0.9, "AdamW's")
    beta2: float = flag(0.95, "AdamW's")
    clip_norm: float = flag(1.0, "largest gradient norm; 0 clips nothing")
    max_left_out: int = flag(0, "steps in a row that are left out because their gradient is not finite; then it ends")
    precision: Precision = flag("bf16", "arithmetic: bf16 is autocast over fp32 weights")
    gradient_checkpointing: bool = flag(False, "recompute activations in the backward pass")

    loss: Literal["fused", "full"] = flag("fused", "the fused loss, or the textbook one over full logits")
    divergence: Literal["forward_kl", "reverse_kl", "jsd", "skew_forward_kl", "skew_reverse_kl", "tvd"] = flag(
        "forward_kl", "how far the student is from the teacher"
    )
    temperature: float = flag(1.0, "divides both logits in the KD term, which is multiplied by its square")
    kd_weight: float = flag(0.9, "weight of the KD term; 0 trains on labels alone and needs no teacher")
    ce_weight: float = flag(0.1, "weight of the cross entropy on labels")
    jsd_teacher_weight: float = flag(0.5, "jsd: weight of the teacher in the mixture")
    skew_alpha: float = flag(0.1, "skew divergences: weight of the other model in the mixture")
    loss_precision: Literal["fp32", "fast"] = flag("fp32", "logits of fp32 quality, or as the inputs' dtype gives")
    workspace_bytes: int | None = flag(None, "bytes the fused loss may use; default: it chooses")

    fsdp: bool = flag(False, "torchrun: each rank keeps a part of every parameter (FSDP2), gathered where it is used")
    reshard_after_forward: bool = flag(True, "--fsdp: blocks let go of whole weights between forward and backward")
    vocab_parallel: int = flag(1, "torchrun: ranks that share one pair of heads, each with a part of the vocabulary")
    replicas_per_rank: int = flag(0, "replicas of --teacher that each rank uses, in turn; 0: all")
    rank_timeout: float = flag(300.0, "seconds that a silent rank is waited for before the others end", metavar="S")
    checkpoint_timeout: float = flag(
        1800.0, "seconds that the ranks wait for one that writes its part of a checkpoint, or the model", metavar="S"
    )

    ring_depth: int = flag(3, "slots: microbatches asked for, filled or being read at one time")
    ring_spares: int = flag(2, "further slots that replace quarantined ones")
    teacher_timeout: float = flag(60.0, "seconds without any replica before the run ends with exit 3", metavar="S")
    peer_timeout: float = flag(5.0, "seconds of silence before a replica counts as lost", metavar="S")
    request_timeout: float = flag(60.0, "seconds before a request is given to another replica", metavar="S")
    poison_released: bool = flag(False, "debug: overwrite released slots with NaN")

    seed: int = flag(0, "data order and random weights")
    device: str = flag("auto", "where the student is trained: cpu, cuda, cuda:N; auto: cuda where there is one")
    threads: int = flag(0, "CPU threads of this process; 0 leaves the library's choice")
    deterministic: bool = flag(False, "bit-identical reruns: deterministic kernels, fixed threads")
    out: str = flag("runs/train", "directory of metrics, checkpoints and the final model", metavar="DIR")
    checkpoint_every: int = flag(0, "optimizer steps between checkpoints; 0: only at the end")
    background_checkpoints: bool = flag(True, "torchrun: train on while a checkpoint is written, from a copy in memory")
    keep_checkpoints: int = flag(2, "newest checkpoints that are kept")
    resume: bool = flag(False, "go on from the newest whole checkpoint in --out")
    eval_every: int = flag(0, "optimizer steps between evaluations; 0: before the first and after the last")
    eval_samples: int = flag(0, "held-out samples per evaluation; 0: all")
    run_name: str = flag("", "name shown to replicas; default: the name of --out")
    debug: bool = flag(False, "log more, and print tracebacks")

    def __post_init__(self) -> None:
        for name in (
            "batch_size",
            "grad_accum",
            "ring_depth",
            "max_batch_tokens",
            "keep_checkpoints",
            "vocab_parallel",
        ):
            _require(self, name, getattr(self, name) >= 1, ">= 1")
        _require(self, "max_batch_tokens", self.max_batch_tokens <= MAX_COUNT, f"<= {MAX_COUNT}")
        _require(self, "max_length", self.max_length >= 2, ">= 2")
        for name in (
            *("ring_spares", "warmup_steps", "checkpoint_every", "eval_every", "eval_samples", "threads"),
            *("replicas_per_rank", "max_left_out"),
        ):
            _require(self, name, getattr(self, name) >= 0, ">= 0")
        for name in ("kd_weight", "ce_weight", "weight_decay", "clip_norm"):
            _require(self, name, 0 <= getattr(self, name) < float("inf"), ">= 0")
        for name in (
            *("lr", "temperature", "teacher_timeout", "peer_timeout", "request_timeout", "rank_timeout"),
            "checkpoint_timeout",
        ):
            _require(self, name, 0 < getattr(self, name) < float("inf"), "> 0")
        for name in ("teacher_timeout", "peer_timeout", "request_timeout", "rank_timeout", "checkpoint_timeout"):
            _require(self, name, getattr(self, name) <= MAX_SECONDS, f"<= {MAX_SECONDS:g}")
        _require(self, "min_lr_frac", 0 <= self.min_lr_frac <= 1, "0 to 1")
        for name in ("jsd_teacher_weight", "skew_alpha"):
            _require(self, name, 0 < getattr(self, name) < 1, "between 0 and 1, both excluded")
        for name in ("steps", "epochs", "workspace_bytes"):
            value = getattr(self, name)
            _require(self, name, value is None or value >= 1, ">= 1")
        _require(self, "seed", 0 <= self.seed < 2**63, "0 to 2^63 - 1")
        _require(self, "threads", self.threads <= MAX_THREADS, f"at most {MAX_THREADS}")
        if len(self.run_name.encode()) > MAX_NAME_BYTES:
            num_bytes = len(self.run_name.encode())
            raise ConfigError(f"--run-name must have at most {MAX_NAME_BYTES} bytes, got {num_bytes}")
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(f"--steps {self.steps} and --epochs {self.epochs}: give one of them")
        if self.auth is not None and self.insecure:
            raise ConfigError("--auth and --insecure: give one of them")
        if self.vocab_parallel > 1 and self.loss != "fused":
            raise ConfigError(f"--vocab-parallel {self.vocab_parallel} and --loss {self.loss}: allowed with fused only")
        if self.kd_weight == 0 and self.ce_weight == 0:
            raise ConfigError("--kd-weight and --ce-weight are both 0: nothing to learn from; raise one of them")

    def check_alone(self) -> None:
        """Raises ConfigError: a setting that only several ranks can have."""
        # Each by itself: True equals 1, so one list of defaults for both would let --fsdp through.
        for name, is_set in (("fsdp", self.fsdp), ("vocab-parallel", self.vocab_parallel != 1)):
            if is_set:
                wanted = "ranks, as torchrun --nproc-per-node N -m student.train starts them"
                raise ConfigError(f"--{name} needs {wanted}")

    @property
    def endpoints(self) -> tuple[str, ...]:
        """--teacher, split at commas: both `a,b` and `a b` name two replicas."""
        return tuple(part for item in self.teacher for part in item.split(",") if part)

    @property
    def shown_name(self) -> str:
        """The run's name in replicas' logs."""
        return self.run_name or Path(self.out).name


def _require(config: TrainConfig, name: str, holds: bool, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"--{name.replace('_', '-')} must be {allowed}, got {getattr(config, name)}")


def with_demo_defaults(config: TrainConfig) -> TrainConfig:
    """Fill in what the bare command leaves out from the demo's files.

    Raises ConfigError: a required flag is missing, and there is no demo to take it from."""
    for name, given in (("student", (config.student,)), ("data", config.data)):
        if "" in given:
            raise ConfigError(f"--{name} names nothing; allowed: a name, or no --{name} for the demo's")
    missing = [name for name in ("student", "data") if not getattr(config, name)]
    if not missing:
        return _with_end(_with_teacher(config))
    demo = {"student": DEMO_DIR / "student", "data": DEMO_DIR / "corpus" / "train.jsonl"}
    absent = [f"--{name}" for name in missing if not demo[name].exists()]
    if absent:
        raise ConfigError(
            f"{' and '.join(absent)} not given, and {DEMO_DIR} holds no demo to take it from: "
            f"give --student DIR|ID --teacher tcp://HOST:PORT --data FILE..., or run `make demo` first"
        )
    filled = replace(
        config,
        student=config.student or str(demo["student"]),
        data=config.data or (str(demo["data"]),),
        from_config=config.from_config or not config.student,
    )
    return _with_end(_with_teacher(filled))


def _with_teacher(config: TrainConfig) -> TrainConfig:
    if config.teacher or config.kd_weight == 0:
        return config
    if config.layout == "colocated":
        raise ConfigError("--layout colocated needs --teacher DIR|ID: the model to load into this process")
    return replace(config, teacher=(DEFAULT_ENDPOINT,))


def _with_end(config: TrainConfig) -> TrainConfig:
    return config if config.steps or config.epochs else replace(config, epochs=1)
