"""What is the most that each layout can hold: the largest teacher, the largest student, the most tokens.

Teachers and students grow by layers of their own kind, so that a size stands for a model that could exist. Memory grows
with each of the three, so that a bisection finds the largest that fits, to the layer or the token. Each size is asked
as a plan of its own would be: where less is left, the fused loss chooses its mode anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from planner.errors import PlanError
from planner.models import PRESETS, find_model
from planner.plan import LAYOUTS, Question, node_counts, trainer_setup
from planner.settings import PlanSettings
from planner.trainer_memory import Layout, Loss, trainer_memory

#: Layers and tokens up to which is looked; a frontier beyond them is "any".
MAX_LAYERS = 10_000
MAX_TOKENS = 1 << 22
#: Tokens per GPU of the sweep over them.
SWEPT_TOKENS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """One layout's largest of each, all else as asked. None: not even the smallest fits; *_is_open: the search ended
    without a limit in sight."""

    layout: Layout
    loss: Loss
    teacher_params: int | None
    student_params: int | None
    tokens: int | None
    teacher_is_open: bool = False


@dataclass(frozen=True, kw_only=True)
class Point:
    """One point of a sweep. label: what was swept, as text; x: as a number."""

    label: str
    x: float
    layout: Layout
    loss: Loss
    peak_bytes: int
    needed_bytes: int
    fits: bool


def frontier_of(question: Question) -> tuple[Frontier, ...]:
    """Of every layout on the asked GPUs."""
    return tuple(_frontier(question, layout, loss) for layout, loss in LAYOUTS)


def _frontier(question: Question, layout: Layout, loss: Loss) -> Frontier:
    def holds(asked: Question) -> bool:
        return asked.needed(trainer_memory(trainer_setup(asked, layout, loss))) <= asked.gpu.memory_bytes

    def teacher_holds(layers: int) -> bool:
        return holds(replace(question, teacher=question.teacher.with_layers(layers)))

    def student_holds(layers: int) -> bool:
        return holds(replace(question, student=question.student.with_layers(layers)))

    def tokens_hold(tokens: int) -> bool:
        return holds(_with(question, tokens_per_gpu=tokens))

    teacher, student = _largest(teacher_holds, MAX_LAYERS), _largest(student_holds, MAX_LAYERS)
    return Frontier(
        layout=layout,
        loss=loss,
        teacher_params=None if teacher is None else question.teacher.with_layers(teacher).num_params,
        student_params=None if student is None else question.student.with_layers(student).num_params,
        tokens=_largest(tokens_hold, MAX_TOKENS),
        teacher_is_open=teacher == MAX_LAYERS,
    )


def _largest(holds: Callable[[int], bool], most: int) -> int | None:
    """The largest number in 1..most for which it holds, given that it holds below it too."""
    if not holds(1):
        return None
    low, high = 1, 2
    while high < most and holds(high):
        low, high = high, high * 2
    high = min(high, most)
    if holds(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def sweep_of(question: Question) -> tuple[Point, ...]:
    """Memory of every layout over what the settings sweep. Raises PlanError: nothing to sweep."""
    kind = question.settings.sweep
    if kind == "tokens":
        return tuple(
            point
            for tokens in SWEPT_TOKENS
            for point in _points(_with(question, tokens_per_gpu=tokens), label=f"{tokens:,}", x=float(tokens))
        )
    if kind == "gpus":
        return tuple(
            point
            for nodes in node_counts(question.settings)
            for changed in [_with(question, nodes=nodes)]
            for point in _points(changed, label=f"{changed.settings.num_gpus:,}", x=float(changed.settings.num_gpus))
        )
    if kind == "teachers":
        teachers = [find_model(name, flag="--teacher") for name in PRESETS]
        same_vocabulary = [shape for shape in teachers if shape.vocab_size == question.teacher.vocab_size]
        if question.teacher.name not in {shape.name for shape in same_vocabulary}:
            same_vocabulary.append(question.teacher)
        return tuple(
            point
            for shape in sorted(same_vocabulary, key=lambda shape: shape.num_params)
            for point in _points(replace(question, teacher=shape), label=shape.name, x=shape.num_params / 1e9)
        )
    raise PlanError(f"--sweep {kind}: nothing to sweep; allowed: tokens, gpus, teachers")


def _with(question: Question, **changes: int) -> Question:
    values = {**vars(question.settings), **changes}
    return replace(question, settings=PlanSettings(**values))


def _points(question: Question, *, label: str, x: float) -> list[Point]:
    points = []
    for layout, loss in LAYOUTS:
        memory = trainer_memory(trainer_setup(question, layout, loss))
        needed = question.needed(memory)
        points.append(
            Point(
                label=label,
                x=x,
                layout=layout,
                loss=loss,
                peak_bytes=memory.peak_bytes,
                needed_bytes=needed,
                fits=needed <= question.gpu.memory_bytes,
            )
        )
    return points
