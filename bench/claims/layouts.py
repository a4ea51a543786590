"""Claims about one pair in three layouts: the same loss, the pace, and what the fused loss is worth by itself.

Every layout gets the same two cores: two threads where one process does all the work, one for each process where there
are two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.claims import charts
from bench.claims.pair import Pair
from bench.claims.runs import Command, Run, trained
from bench.claims.section import Chart, Section, Table, mebibytes, milliseconds

FULL, FUSED, APART = "colocated, full loss", "colocated, fused loss", "disaggregated, fused loss"
OVER_ZMQ = "disaggregated over zmq"
#: Curves in float32 that differ by more than this, relative, are not the same.
SAME_CURVE_FRAC = 1e-4


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the runs of this page share."""

    steps: int
    sequence_tokens: int
    batch_size: int
    ring_depth: int
    device: str
    seed: int = 0

    def flags(self, pair: Pair, *, cache: Path) -> tuple[str, ...]:
        """Of `student.train`, whatever the layout."""
        return (
            *("--student", str(pair.student), *(("--from-config",) if pair.from_config else ())),
            *("--data", *pair.data, "--cache-dir", str(cache)),
            *("--max-length", str(self.sequence_tokens), "--batch-size", str(self.batch_size)),
            *("--steps", str(self.steps), "--warmup-steps", str(self.steps // 8), "--lr", "1.5e-3"),
            *("--seed", str(self.seed), "--device", self.device),
        )


def curves(pair: Pair, shape: Shape, root: Path) -> Iterator[Run]:
    """The same data and seed in every layout, deterministic, in float32, on one thread a process."""
    same = (*shape.flags(pair, cache=root / "cache"), "--deterministic", "--threads", "1", "--precision", "fp32")
    inside = (*same, "--teacher", str(pair.teacher), "--layout", "colocated")
    serving = ("--model", str(pair.teacher), "--deterministic", "--threads", "1", "--device", shape.device)
    for command in (
        Command(name=FULL, arguments=(*inside, "--loss", "full")),
        Command(name=FUSED, arguments=inside),
        Command(name=APART, arguments=(*same, "--transport", "shm"), serving=serving),
        Command(name=OVER_ZMQ, arguments=(*same, "--transport", "zmq"), serving=serving),
    ):
        yield trained(command, out=root / "curves" / command.name.replace(" ", "-").replace(",", ""))


def same_loss(runs: Mapping[str, Run]) -> Section:
    """The curves of `curves`, one against the others."""
    reference = [float(step["lm_loss"]) for step in runs[FUSED].steps]
    differences = {
        name: max(
            abs(float(step["lm_loss"]) - wanted) / wanted for step, wanted in zip(run.steps, reference, strict=True)
        )
        for name, run in runs.items()
        if name != FUSED
    }
    rows = [(name, f"{run.steps[-1]['lm_loss']:.6f}", _difference(differences.get(name))) for name, run in runs.items()]
    bits = all(differences[name] == 0.0 for name in (APART, OVER_ZMQ))
    finding = (
        f"Over {len(reference)} steps the fused curves are {'equal to the bit' if bits else 'not equal to the bit'} "
        f"whatever carries the states; the full loss differs from them by at most {differences[FULL]:.1e}, relative."
    )
    chart = charts.lines(
        {name: [(step["step"], step["lm_loss"]) for step in run.steps] for name, run in runs.items()},
        x_label="optimizer step",
        y_label="lm loss, nats per token",
    )
    return Section(
        title="The same loss",
        claim="Where the teacher runs, what carries its states, and whether logits are ever whole, changes nothing.",
        finding=finding,
        verdict="holds" if bits and differences[FULL] <= SAME_CURVE_FRAC else "fails",
        tables=[Table(columns=("run", "last lm loss", "largest difference to colocated, fused"), rows=rows)],
        charts=[Chart(svg=chart, caption="Training loss of each run; lines that are equal lie on each other.")],
        commands={name: run.shell for name, run in runs.items()},
        facts={
            "largest_relative_difference": differences,
            "last_lm_loss": {n: r.steps[-1]["lm_loss"] for n, r in runs.items()},
        },
    )


def _difference(value: float | None) -> str:
    return "-" if value is None else "none" if value == 0.0 else f"{value:.1e}"


def paced(pair: Pair, shape: Shape, root: Path) -> Iterator[Run]:
    """Each layout as one would run it, in bf16, on two cores."""
    flags = shape.flags(pair, cache=root / "cache")
    both = (*flags, "--threads", "2", "--teacher", str(pair.teacher), "--layout", "colocated")
    serving = ("--model", str(pair.teacher), "--dtype", "bf16", "--threads", "1", "--device", shape.device)
    apart = (*flags, "--threads", "1", "--ring-depth", str(shape.ring_depth), "--transport", "shm")
    for command in (
        Command(name=FULL, arguments=(*both, "--teacher-dtype", "bf16", "--loss", "full")),
        Command(name=FUSED, arguments=(*both, "--teacher-dtype", "bf16")),
        Command(name=APART, arguments=apart, serving=serving),
    ):
        yield trained(command, out=root / "pace" / command.name.replace(" ", "-").replace(",", ""))


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Medians over the steps that count. `student_s`: a step without its waiting; `teacher_s`: its forward passes."""

    step_s: float
    student_s: float
    teacher_s: float
    student_stall_frac: float
    teacher_stall_frac: float

    @classmethod
    def of(cls, run: Run) -> Pace:
        step_s = run.median_of("step_s")
        waits = [float(step["student_stall_s"]) for step in run.paced]
        total_s = sum(float(step["step_s"]) for step in run.paced)
        return cls(
            step_s=step_s,
            student_s=step_s - run.median_of("student_stall_s"),
            teacher_s=run.median_of("teacher_s"),
            student_stall_frac=sum(waits) / total_s,
            teacher_stall_frac=min(1.0, run.median_of("teacher_stall_s") / step_s),
        )


def pace(runs: Mapping[str, Run]) -> Section:
    """Steps of `paced`, taken apart."""
    paces = {name: Pace.of(run) for name, run in runs.items()}
    apart, together = paces[APART], paces[FUSED]
    overlap_frac = max(apart.student_s, apart.teacher_s) / apart.step_s
    fastest = min(paces, key=lambda name: paces[name].step_s)
    ratio = together.step_s / apart.step_s
    finding = (
        f"Fastest here: {fastest}. Disaggregated, a step takes {milliseconds(apart.step_s)}; the same models in one "
        f"process take {milliseconds(together.step_s)} on the same two cores ({ratio:.2f} x). The slower side is busy "
        f"for {overlap_frac:.0%} of a step."
    )
    rows = [
        (
            name,
            milliseconds(found.step_s),
            milliseconds(found.student_s),
            milliseconds(found.teacher_s),
            f"{found.student_stall_frac:.1%}",
            "-" if name != APART else f"{found.teacher_stall_frac:.0%}",
            f"{runs[name].median_of('tokens_per_s'):,.0f}",
        )
        for name, found in paces.items()
    ]
    columns = ("layout", "step", "student", "teacher", "student waits", "teacher waits", "tokens/s")
    chart = charts.bars(
        {
            name: {
                "student": found.student_s * 1e3 if name == APART else (found.step_s - found.teacher_s) * 1e3,
                "teacher, not overlapped": (found.step_s - found.student_s) * 1e3
                if name == APART
                else found.teacher_s * 1e3,
            }
            for name, found in paces.items()
        },
        x_label="ms a step",
    )
    return Section(
        title="The pace",
        claim="Teacher and student overlap: a step takes about as long as the slower of the two.",
        finding=finding,
        verdict="holds" if overlap_frac >= 1 / 1.25 else "fails",
        tables=[Table(columns=columns, rows=rows)],
        charts=[
            Chart(
                svg=chart,
                caption="Where a step's time goes. What the teacher does while the student computes costs no time.",
            )
        ],
        commands={name: run.shell for name, run in runs.items()},
        facts={"overlap_efficiency": overlap_frac, "layouts": {name: vars(found) for name, found in paces.items()}},
    )


def fused_alone(runs: Mapping[str, Run]) -> Section:
    """Both colocated runs of `paced`: nothing differs but the loss."""
    full, fused = runs[FULL], runs[FUSED]
    saved = full.peak_bytes - fused.peak_bytes
    speed = full.median_of("step_s") / fused.median_of("step_s")
    rows = [
        (name, mebibytes(run.peak_bytes), milliseconds(run.median_of("step_s")))
        for name, run in ((FULL, full), (FUSED, fused))
    ]
    return Section(
        title="The fused loss by itself",
        claim="The fused loss saves memory in anybody's pipeline, without a ring or a second process.",
        finding=(
            f"In one process, with the same models, the fused loss takes {mebibytes(saved)} less at the peak, and a "
            f"step is {speed:.2f} x as fast."
        ),
        verdict="holds" if saved > 0 else "fails",
        tables=[Table(columns=("run", "peak memory of the process", "step"), rows=rows)],
        charts=[
            Chart(
                svg=charts.bars(
                    {name: {"peak": run.peak_bytes / 2**20} for name, run in ((FULL, full), (FUSED, fused))},
                    x_label="MiB, whole process",
                    size=(6.4, 1.8),
                ),
                caption="Peak resident memory of the trainer, libraries and both models included.",
            )
        ],
        commands={name: runs[name].shell for name in (FULL, FUSED)},
        facts={"saved_bytes": saved, "speedup": speed},
    )
