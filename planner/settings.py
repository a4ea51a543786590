"""What a plan is asked with: one frozen dataclass, each field a flag of `python -m planner`, checked whole."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, TypeVar

from planner.errors import PlanError

FlagT = TypeVar("FlagT")

#: More of anything is a slip of the finger.
MAX_COUNT = 10**6
MAX_TOKENS = 10**8
#: Rates and sizes beyond these are no machine's, and would end in infinities.
MIN_NUMBER, MAX_NUMBER = 1e-6, 1e12

#: Of a weight, and of a state on the wire: a teacher's states have the dtype of its weights.
WEIGHT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def flag(default: FlagT, text: str, *, metavar: str | None = None) -> FlagT:
    """A field of the settings; `text` is its help."""
    made: FlagT = dataclasses.field(default=default, metadata={"help": text, "metavar": metavar})
    return made


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """Raises PlanError on construction: a value out of its range, or two that don't go together."""

    teacher: str | None = flag(
        None, "preset, checkpoint directory, config.json, or hub id in the cache", metavar="MODEL"
    )
    student: str | None = flag(None, "likewise", metavar="MODEL")

    gpus: int = flag(8, "GPUs that train, in each node")
    nodes: int = flag(1, "nodes that train")
    gpu: str = flag("H100-80", "preset of the GPUs that train")
    gpu_memory_gb: float | None = flag(None, "their memory, in 1e9 bytes; default: the preset's", metavar="GB")
    gpu_tflops: float | None = flag(
        None, "their rate of products in --precision; default: the preset's", metavar="TFLOPS"
    )

    tokens_per_gpu: int = flag(8192, "tokens of a microbatch")
    counted_frac: float = flag(1.0, "part of the tokens that count in the loss")
    sequence_tokens: int = flag(4096, "tokens of a sequence")
    grad_accum: int = flag(1, "microbatches in an optimizer step")
    precision: Literal["bf16", "fp32"] = flag("bf16", "arithmetic of the student")
    master: Literal["fp32", "bf16"] = flag("fp32", "dtype that the student's weights are kept and updated in")
    optimizer: Literal["adamw", "adamw8bit"] = flag("adamw", "AdamW in the master's dtype, or in 8 bits")
    checkpointing: bool = flag(True, "recompute activations in the backward pass")
    fsdp_ranks: int = flag(0, "ranks that share the student's state; 0: all")
    student_tp: int = flag(1, "ranks that share each of the student's layers")
    vocab_parallel: int = flag(1, "ranks that share the columns of both heads")
    workspace_bytes: int | None = flag(None, "of the fused loss; default: it chooses")
    full_logit_bytes: int = flag(18, "bytes that the full loss holds for one logit; the textbook here takes 37")

    teacher_dtype: Literal["bf16", "fp16", "fp32"] = flag("bf16", "of the teacher's weights and of its states")
    teacher_gpu: str = flag("", "preset of the teacher's GPUs; default: as --gpu")
    teacher_gpus_per_node: int = flag(8, "GPUs in a node of the teacher's")
    teacher_tp: int = flag(0, "GPUs that share each of the teacher's layers; 0: the fewest that fit")
    teacher_pp: int = flag(1, "pipeline stages of a replica")
    teacher_replicas: int = flag(0, "replicas; 0: as many as keep the trainers busy")
    teacher_batch_tokens: int = flag(16384, "tokens of one teacher pass")

    student_mfu: float = flag(0.4, "part of their peak that the training GPUs reach")
    teacher_mfu: float = flag(0.3, "part of their peak that the teacher's GPUs reach")
    student_tokens_per_s: float | None = flag(None, "measured, of one training GPU; replaces the estimate")
    teacher_tokens_per_s: float | None = flag(None, "measured, of one replica; replaces the estimate")

    link: str = flag("100GbE", "preset of the link from teachers to each node that trains")
    link_gbit: float | None = flag(None, "its rate in Gbit/s; default: the preset's", metavar="GBIT")
    link_latency_us: float | None = flag(None, "its round trip; default: the preset's", metavar="US")
    fabric: str = flag("IB-400", "preset of each training GPU's port to other nodes")
    ring_depth: int = flag(3, "slots of each trainer's ring")
    ring_spares: int = flag(2, "further slots for quarantine")
    slots: Literal["host", "device"] = flag("host", "where slots lie; on the host a microbatch's states are copied")
    top_k: int = flag(64, "kept logits of the signal that hidden states are compared with")
    jitter_frac: float = flag(0.05, "relative standard deviation of each stage's time")

    reserve_gb: float = flag(2.0, "of each GPU, for contexts and communication buffers")
    fragmentation_frac: float = flag(0.1, "what the allocator loses, as a part of the peak")

    simulate: bool = flag(False, "also simulate the pipeline event by event")
    sweep: Literal["none", "tokens", "gpus", "teachers"] = flag("none", "plot and write memory over one of these")
    out: str = flag("runs/plan", "directory of a sweep's plot, CSV and JSON", metavar="DIR")
    json: bool = flag(False, "print JSON instead of tables")
    explain: bool = flag(False, "print each formula with its numbers")
    list: bool = flag(False, "print the presets and end")

    def __post_init__(self) -> None:
        for name in (
            "gpus",
            "nodes",
            "grad_accum",
            "student_tp",
            "vocab_parallel",
            "teacher_pp",
            "ring_depth",
            "top_k",
        ):
            _require(self, name, 1 <= getattr(self, name) <= MAX_COUNT, f"1 to {MAX_COUNT}")
        for name in ("fsdp_ranks", "teacher_tp", "teacher_replicas", "ring_spares"):
            _require(self, name, 0 <= getattr(self, name) <= MAX_COUNT, f"0 to {MAX_COUNT}")
        for name in ("tokens_per_gpu", "sequence_tokens", "teacher_batch_tokens"):
            _require(self, name, 1 <= getattr(self, name) <= MAX_TOKENS, f"1 to {MAX_TOKENS}")
        _require(self, "teacher_gpus_per_node", 1 <= self.teacher_gpus_per_node <= MAX_COUNT, f"1 to {MAX_COUNT}")
        _require(self, "full_logit_bytes", 1 <= self.full_logit_bytes <= 1000, "1 to 1000")
        for name in ("student_mfu", "teacher_mfu", "counted_frac"):
            _require(self, name, MIN_NUMBER <= getattr(self, name) <= 1, f"{MIN_NUMBER:g} to 1")
        for name in ("fragmentation_frac", "jitter_frac"):
            _require(self, name, 0 <= getattr(self, name) <= 1, "0 to 1")
        for name in ("gpu_memory_gb", "gpu_tflops", "student_tokens_per_s", "teacher_tokens_per_s", "link_gbit"):
            value = getattr(self, name)
            holds = value is None or MIN_NUMBER <= value <= MAX_NUMBER
            _require(self, name, holds, f"{MIN_NUMBER:g} to {MAX_NUMBER:g}")
        for name in ("link_latency_us", "reserve_gb"):
            value = getattr(self, name)
            _require(self, name, value is None or 0 <= value <= MAX_NUMBER, f"0 to {MAX_NUMBER:g}")
        _require(self, "workspace_bytes", self.workspace_bytes is None or self.workspace_bytes >= 1, "1 or more")
        self._check_groups()

    def _check_groups(self) -> None:
        ranks = self.num_gpus
        if ranks > MAX_COUNT:
            raise PlanError(f"--gpus {self.gpus} x --nodes {self.nodes} are {ranks} GPUs; allowed: at most {MAX_COUNT}")
        if ranks % self.student_tp:
            raise PlanError(f"--student-tp {self.student_tp} does not divide the {ranks} GPUs that train")
        trainers = self.num_trainers
        for name, size in (("fsdp-ranks", self.fsdp_ranks), ("vocab-parallel", self.vocab_parallel)):
            if size and trainers % size:
                raise PlanError(f"--{name} {size} does not divide the {trainers} trainers")
        if self.precision == "fp32" and self.master == "bf16":
            raise PlanError("--precision fp32 with --master bf16: bf16 weights can't be trained in fp32 arithmetic")

    @property
    def num_gpus(self) -> int:
        """GPUs that train."""
        return self.gpus * self.nodes

    @property
    def num_trainers(self) -> int:
        """Data-parallel ranks: each has a ring of its own."""
        return self.num_gpus // self.student_tp

    @property
    def shards(self) -> int:
        return self.fsdp_ranks or self.num_trainers

    @property
    def rows(self) -> int:
        """Counted rows of a microbatch."""
        return max(1, round(self.tokens_per_gpu * self.counted_frac))

    @property
    def teacher_bytes(self) -> int:
        """Of a weight of the teacher's, and of a number of its states: a run has no other dtype on the wire."""
        return WEIGHT_BYTES[self.teacher_dtype]


def _require(settings: PlanSettings, name: str, holds: bool, allowed: str) -> None:
    if not holds:
        raise PlanError(f"--{name.replace('_', '-')} must be {allowed}, got {getattr(settings, name)}")
