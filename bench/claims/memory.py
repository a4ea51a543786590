"""Claims about memory: what a trainer process holds in each layout, and what does not fit colocated.

The pair is larger than that of the other claims: a teacher of random weights, since memory does not ask what they say.
Each run is measured beyond its imports, which is what the planner predicts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from bench.claims import charts
from bench.claims.layouts import APART, FUSED, Shape
from bench.claims.pair import Pair, config_of
from bench.claims.runs import Command, Run, attempted, trained
from bench.claims.section import Bars, Chart, Section, Table, Verdict, mebibytes
from planner.architecture import ModelShape
from planner.errors import PlanError
from planner.families import shape_of
from planner.trainer_memory import Layout, TrainerSetup, trainer_memory
from ring.core.errors import ConfigError
from student.loss.products import has_matrix_units

#: Of the prediction for the disaggregated trainer; fixed before anything is run.
CAP_FRAC = 1.15
#: What is resident and no tensor: threads, the allocator's rest, libraries that are loaded late.
TOLERANCE_FRAC, TOLERANCE_BYTES = 0.10, 64 << 20
DEPTH, SPARES = 3, 2
#: How torch, Python, the kernel and the C++ library say it.
_NO_MEMORY = re.compile(r"(can't|cannot|unable to) allocate|out of memory|MemoryError|bad_alloc", re.IGNORECASE)

Fate = Literal["trains to its end", "runs out of memory", "ends with another error"]
#: Student and colocated teacher are cut over so many processes by FSDP, in the runs that ask for ranks.
NUM_RANKS = 2


@dataclass(frozen=True, kw_only=True)
class Held:
    """The runs of this page. predicted: peak beyond imports by layout, in bytes. ranks: without a cap, on NUM_RANKS."""

    free: dict[str, Run]
    ranks: dict[str, Run]
    capped: Mapping[str, Run]
    predicted: Mapping[str, int]
    headroom_bytes: int


def runs(pair: Pair, shape: Shape, root: Path) -> Iterator[Run]:
    """Both layouts without a cap, on one rank and on more, then both under the cap that was fixed beforehand."""
    headroom = round(CAP_FRAC * predicted(pair, shape)[APART])
    for cap, title, num_ranks in ((0, "free", 1), (0, "ranks", NUM_RANKS), (headroom, "capped", 1)):
        for command in _commands(pair, shape, root, headroom_bytes=cap, num_ranks=num_ranks):
            # Under the cap an error is the answer; without it, a fault.
            run = (attempted if cap else trained)(
                replace(command, name=f"{command.name}, {title}"), out=root / title / command.name.split(",")[0]
            )
            yield run


def held(pair: Pair, shape: Shape, found: Mapping[str, Run]) -> Held:
    """`runs`, sorted."""
    by_title = {t: {name: found[f"{name}, {t}"] for name in (FUSED, APART)} for t in ("free", "ranks", "capped")}
    forecast = predicted(pair, shape)
    return Held(**by_title, predicted=forecast, headroom_bytes=round(CAP_FRAC * forecast[APART]))


def predicted(pair: Pair, shape: Shape) -> dict[str, int]:
    """The planner's peak of a trainer process beyond its imports, in bytes. Raises ConfigError: a model's config can't
    be read, or is of a type that the planner does not know."""
    tokens = shape.batch_size * shape.sequence_tokens
    student, teacher = (_shape(model, name) for model, name in ((pair.student, "student"), (pair.teacher, "teacher")))

    def peak(layout: Layout) -> int:
        setup = TrainerSetup(
            student=student,
            teacher=teacher,
            layout=layout,
            tokens=tokens,
            rows=shape.batch_size * (shape.sequence_tokens - 1),
            sequence_tokens=shape.sequence_tokens,
            pass_tokens=tokens,
            arithmetic="autocast",
            checkpointing=False,
            device="cpu",
            matrix_units=has_matrix_units(torch.bfloat16),
            wire_bytes=4,
            teacher_bytes=4,
            ring_depth=DEPTH,
            ring_spares=SPARES,
        )
        return trainer_memory(setup).peak_bytes

    return {FUSED: peak("colocated"), APART: peak("disagg")}


def _shape(model: Path | str, name: str) -> ModelShape:
    config = config_of(model, flag=f"--{name}")
    try:
        return shape_of(config, name=name)
    except PlanError as error:
        raise ConfigError(f"--{name} {model}: no prediction of its memory, which a claim is about: {error}") from error


def _commands(pair: Pair, shape: Shape, root: Path, *, headroom_bytes: int, num_ranks: int = 1) -> Iterator[Command]:
    tokens = str(shape.batch_size * shape.sequence_tokens)
    flags = (*shape.flags(pair, cache=root / "cache"), "--threads", "1", *(("--fsdp",) if num_ranks > 1 else ()))
    ring = ("--ring-depth", str(DEPTH), "--ring-spares", str(SPARES))
    # Stored in bf16, held in float32: weights are in memory, and not pages of a file.
    together = ("--teacher", str(pair.teacher), "--layout", "colocated", "--teacher-dtype", "fp32")
    serving = ("--model", str(pair.teacher), "--dtype", "fp32", "--threads", "1", "--max-batch-tokens", tokens)
    yield Command(
        name=FUSED,
        arguments=(*flags, *ring, *together, "--max-batch-tokens", tokens),
        headroom_bytes=headroom_bytes,
        num_ranks=num_ranks,
    )
    yield Command(
        name=APART,
        arguments=(*flags, *ring, "--transport", "shm"),
        serving=(*serving, "--device", shape.device),
        headroom_bytes=headroom_bytes,
        num_ranks=num_ranks,
    )


def trainer_process(found: Held) -> Section:
    """What each trainer process held, without a cap."""
    pairs = (found.free, found.ranks)
    colocated, apart = found.free[FUSED].grown_bytes, found.free[APART].grown_bytes
    rows = [
        (name, mebibytes(run.grown_bytes), mebibytes(found.predicted[name]), mebibytes(run.peak_bytes))
        for name, run in found.free.items()
    ]
    shared = {f"{name}, a rank of {NUM_RANKS}": run for name, run in found.ranks.items()}
    rows += [(name, mebibytes(run.grown_bytes), "-", mebibytes(run.peak_bytes)) for name, run in shared.items()]
    bars = {name: {"beyond its imports": run.grown_bytes / 2**20} for name, run in (found.free | shared).items()}
    return Section(
        title="Memory of a trainer process",
        claim="Away from the teacher, the trainer holds its own model, the ring, and the teacher's head: no more.",
        number=f"{apart / 2**20:,.0f} / {mebibytes(colocated)}",
        measured=f"peak of a trainer beyond its imports, disaggregated / colocated ({colocated / apart:.1f} x)",
        finding=(
            f"Beyond its imports the trainer takes {mebibytes(apart)} disaggregated and {mebibytes(colocated)} with "
            f"the teacher in its process: {colocated / apart:.1f} x. With both models cut over {NUM_RANKS} ranks it "
            f"is {mebibytes(found.ranks[APART].grown_bytes)} and {mebibytes(found.ranks[FUSED].grown_bytes)} a rank."
        ),
        verdict="holds" if all(runs[APART].grown_bytes < runs[FUSED].grown_bytes for runs in pairs) else "fails",
        tables=[Table(columns=("layout", "peak beyond imports", "predicted", "whole process"), rows=rows)],
        charts=[
            Chart(
                svg=charts.bars(bars, x_label="MiB beyond imports", labels="{:,.0f} MiB"),
                caption="The fused loss in all. The teacher's process, elsewhere, holds the rest.",
            )
        ],
        commands={name: run.shell for name, run in (found.free | shared).items()},
        facts={
            "grown_bytes": {name: run.grown_bytes for name, run in (found.free | shared).items()},
            "predicted_bytes": dict(found.predicted),
            "teacher_process_peak_bytes": found.free[APART].teacher_peak_bytes,
        },
        overview=Bars(title="Memory of a trainer process, beyond its imports", groups=bars, unit="MiB"),
    )


def out_of_memory(found: Held) -> Section:
    """Both layouts under one cap."""
    rows = []
    for name, run in found.capped.items():
        outcome = f"trained {len(run.steps)} steps" if run.error is None else run.error
        rows.append((name, fate(run.error), outcome))
    fates = {name: fate(run.error) for name, run in found.capped.items()}
    verdict: Verdict = "holds" if fates == {FUSED: "runs out of memory", APART: "trains to its end"} else "fails"
    if "ends with another error" in fates.values():
        # That says nothing of memory, either way.
        verdict = "open"
    result = " and ".join(f"{name}, {fates[name]}" for name in (APART, FUSED))
    apart = found.capped[APART]
    curve = charts.lines(
        {APART: [(step["step"], step["loss"]) for step in apart.steps]}, x_label="optimizer step", y_label="loss, nats"
    )
    return Section(
        title="Out of memory, and not",
        claim="Where teacher and student together do not fit, the disaggregated layout trains.",
        number=mebibytes(found.headroom_bytes),
        measured="what a trainer process may take beyond its imports: disaggregated has to train, colocated to fail",
        finding=f"With {mebibytes(found.headroom_bytes)} a trainer process beyond its imports: {result}.",
        verdict=verdict,
        tables=[Table(columns=("layout", "under the cap", "what came of it"), rows=rows)],
        charts=[Chart(svg=curve, caption=f"Under the cap: {APART}.")] if apart.steps else [],
        commands={name: run.shell for name, run in found.capped.items()},
        facts={
            "headroom_bytes": found.headroom_bytes,
            "cap": f"RLIMIT_DATA, {CAP_FRAC} x the planner's prediction for the disaggregated trainer",
            "errors": {name: run.error for name, run in found.capped.items()},
        },
    )


def fate(error: str | None) -> Fate:
    """What became of a run that ended with this error, or with none."""
    if error is None:
        return "trains to its end"
    return "runs out of memory" if _NO_MEMORY.search(error) else "ends with another error"


def within(found: int, forecast: int) -> bool:
    """Whether a prediction of memory is as near as it claims to be."""
    return abs(found - forecast) <= max(TOLERANCE_FRAC * forecast, TOLERANCE_BYTES)
