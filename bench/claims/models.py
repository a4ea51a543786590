"""The claim about the closed forms: predicted beside measured, for the runs of the other claims."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from bench.claims.layouts import APART, IN_TURNS, Pace, Shape
from bench.claims.memory import Held, within
from bench.claims.runs import Run
from bench.claims.section import Section, Table, mebibytes, milliseconds
from planner.pace import Stages, pace
from planner.traffic import run_bytes

#: How near a predicted step must be to a measured one.
STEP_TOLERANCE_FRAC = 0.10
#: Predictions that are named where they fail; the table has all.
NUM_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Width:
    """Of a model, what traffic depends on. element_bytes: of its weights as they are stored."""

    hidden_size: int
    vocab_size: int
    element_bytes: int

    @classmethod
    def of(cls, model: Path | str) -> Width:
        """From its config."""
        config: Any = transformers.AutoConfig.from_pretrained(model).get_text_config()
        dtype = config.dtype or torch.float32
        return cls(hidden_size=config.hidden_size, vocab_size=config.vocab_size, element_bytes=dtype.itemsize)


Kind = Literal["bytes, exactly", "memory", "seconds"]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One figure twice."""

    what: str
    kind: Kind
    predicted: float
    measured: float

    @property
    def agrees(self) -> bool:
        if self.kind == "bytes, exactly":
            return self.predicted == self.measured
        if self.kind == "memory":
            return within(round(self.measured), round(self.predicted))
        return abs(self.measured - self.predicted) <= STEP_TOLERANCE_FRAC * self.predicted

    def row(self) -> tuple[str, ...]:
        """For the table."""
        show = {"bytes, exactly": lambda x: f"{x:,.0f} B", "memory": mebibytes, "seconds": milliseconds}[self.kind]
        error = self.measured / self.predicted - 1 if self.predicted else 0.0
        return (self.what, show(self.predicted), show(self.measured), f"{error:+.1%}", "yes" if self.agrees else "no")


def forms(paced: Mapping[str, Run], curves: Mapping[str, Run], held: Held, shape: Shape, teacher: Width) -> Section:
    """teacher: that of `paced` and `curves`."""
    served = [run for run in [*curves.values(), *paced.values()] if run.command.serving is not None]
    runs = {f"bytes: {run.name}": run for run in served} | {
        "each side alone": paced[IN_TURNS],
        **{f"memory: {name}": run for name, run in held.free.items()},
    }
    compared = [
        *(_received(run, teacher) for run in served),
        _step(paced[APART], paced[IN_TURNS], shape),
        *(
            Compared(
                what=f"peak beyond imports: {name}",
                kind="memory",
                predicted=held.predicted[name],
                measured=run.grown_bytes,
            )
            for name, run in held.free.items()
        ),
    ]
    wrong = [found.what for found in compared if not found.agrees]
    return Section(
        title="The models and the measurements",
        claim="Closed forms say beforehand what a layout takes: bytes exactly, memory and pace within a tenth.",
        number=f"{len(compared) - len(wrong)} of {len(compared)}",
        measured="predictions agree: bytes to the byte, memory within a tenth or 64 MiB, seconds within a tenth",
        finding=(
            f"{len(compared) - len(wrong)} of {len(compared)} predictions agree"
            + (
                f"; not: {'; '.join(wrong[:NUM_NAMED])}{' and others' if len(wrong) > NUM_NAMED else ''}."
                if wrong
                else ": bytes exactly, memory and seconds within a tenth or 64 MiB."
            )
        ),
        verdict="holds" if not wrong else "fails",
        tables=[
            Table(columns=("figure", "predicted", "measured", "error", "agrees"), rows=[one.row() for one in compared])
        ],
        commands={name: run.shell for name, run in runs.items()},
        facts={one.what: {"predicted": one.predicted, "measured": one.measured, "kind": one.kind} for one in compared},
    )


def _received(run: Run, teacher: Width) -> Compared:
    """Payload bytes of a run's ring, from the rows that it trained on. States travel in the dtype of the weights."""
    rows = sum(int(step["rows"]) for step in run.steps)
    in_bf16 = "bf16" in (run.command.serving or ())
    forecast = run_bytes(
        rows=rows,
        hidden_size=teacher.hidden_size,
        vocab_size=teacher.vocab_size,
        element_bytes=2 if in_bf16 else teacher.element_bytes,
    )
    return Compared(
        what=f"bytes received in {'bf16' if in_bf16 else 'fp32'}: {run.name} ({len(run.steps)} steps)",
        kind="bytes, exactly",
        predicted=forecast,
        measured=int(run.summary["bytes_received"]),
    )


def _step(run: Run, in_turns: Run, shape: Shape) -> Compared:
    """A disaggregated step, from what each side takes when the other rests."""
    alone = Pace.of(in_turns)
    # Same host and shared memory: the write is part of the teacher's turn.
    stages = Stages(teacher_s=alone.teacher_s, link_s=0.0, student_s=alone.student_s, depth=shape.ring_depth)
    return Compared(
        what="step: disaggregated, from each side's time alone",
        kind="seconds",
        predicted=pace(stages).step_s,
        measured=Pace.of(run).step_s,
    )
