"""Memory of one device of a teacher replica: weights under tensor and pipeline parallelism, one pass, states."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.activations import Arithmetic, layer_activations
from planner.architecture import ModelShape
from planner.errors import PlanError
from planner.memory import DeviceMemory, Term, divided, moment

#: States of so many full passes may exist at once: two that wait to be sent, and the one under way.
PASSES_HELD = 3
#: More nodes than this for one replica are no plan.
MAX_STAGES = 16


@dataclass(frozen=True, kw_only=True)
class TeacherSetup:
    """A replica over tp x pp devices. element_bytes: of a weight. batch_tokens: of one pass."""

    teacher: ModelShape
    tp: int = 1
    pp: int = 1
    element_bytes: int = 2
    wire_bytes: int = 2
    batch_tokens: int = 16_384
    sequence_tokens: int = 4096

    def __post_init__(self) -> None:
        name, num_layers = self.teacher.name, self.teacher.num_layers
        heads = max(layer.attention.num_heads for layer in self.teacher.layers)
        if self.tp < 1 or heads % self.tp:
            raise PlanError(f"--teacher-tp {self.tp}: {name} has {heads} heads; allowed: a divisor of that")
        if not 1 <= self.pp <= num_layers:
            raise PlanError(f"--teacher-pp {self.pp}: {name} has {num_layers} layers; allowed: 1 to that")

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp


def pass_bytes(model: ModelShape, *, element_bytes: int, sequence_tokens: int, tp: int = 1) -> int:
    """Bytes a token of a pass without gradients: the widest layer's, nothing is saved, no cache is kept."""
    arithmetic: Arithmetic = "fp32" if element_bytes == 4 else "bf16"
    return max(
        layer_activations(layer, model, arithmetic, sequence_tokens=sequence_tokens, tp=tp).working
        for layer in model.layers
    )


def teacher_memory(setup: TeacherSetup) -> DeviceMemory:
    """The fullest device of a replica: with pipeline stages, the one that holds an end of the model too."""
    teacher, element = setup.teacher, setup.element_bytes
    layers = teacher.body.count - teacher.final_norm.count
    per_stage = -(-teacher.num_layers // setup.pp)
    stage = divided(layers * per_stage, by=teacher.num_layers)
    ends = teacher.embedding.count + teacher.head.count
    if setup.pp > 1:
        ends = max(teacher.embedding.count, teacher.head_width)
    count = divided(stage + ends + teacher.final_norm.count, by=setup.tp)
    activations = pass_bytes(teacher, element_bytes=element, sequence_tokens=setup.sequence_tokens, tp=setup.tp)
    states = PASSES_HELD * setup.batch_tokens * teacher.hidden_size * setup.wire_bytes
    return DeviceMemory(
        (
            moment(
                "pass",
                [
                    Term(
                        "teacher_weights",
                        element * count,
                        f"{element} x {count:,} of {teacher.num_params:,} (tp {setup.tp}, pp {setup.pp})",
                    ),
                    Term(
                        "teacher_activations",
                        setup.batch_tokens * activations,
                        f"M x {activations:,} a token, M = {setup.batch_tokens:,}",
                    ),
                    Term(
                        "states_to_send",
                        states,
                        f"3 M d_t b = 3 x {setup.batch_tokens:,} x {teacher.hidden_size:,} x {setup.wire_bytes}",
                    ),
                ],
            ),
        )
    )


def fewest_devices(setup: TeacherSetup, *, capacity_bytes: int, devices_per_node: int) -> TeacherSetup:
    """The smallest replica that fits: tensor parallelism over a power of two within a node first, then further nodes
    as pipeline stages. Where even MAX_STAGES do not fit, the largest of these, which then does not fit."""
    heads = max(layer.attention.num_heads for layer in setup.teacher.layers)
    candidate = replace(setup, tp=1)
    while teacher_memory(candidate).peak_bytes > capacity_bytes:
        wider = candidate.tp * 2
        if candidate.pp == setup.pp and wider <= devices_per_node and heads % wider == 0:
            candidate = replace(candidate, tp=wider)
        elif candidate.pp < min(MAX_STAGES, setup.teacher.num_layers):
            candidate = replace(candidate, pp=candidate.pp + 1)
        else:
            break
    return candidate
