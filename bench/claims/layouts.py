"""Claims about one pair in three layouts: the same loss, the pace, and what the fused loss is worth by itself.

Every layout gets the same two cores: two threads where one process does all the work, one for each process where there
are two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.claims import charts
from bench.claims.loss_part import Kind, LossSizes, loss_seconds
from bench.claims.pair import Pair
from bench.claims.runs import Command, Run, trained
from bench.claims.section import Bars, Chart, Section, Table, mebibytes, milliseconds

FULL, FUSED, APART = "colocated, full loss", "colocated, fused loss", "disaggregated, fused loss"
OVER_ZMQ = "disaggregated over zmq"
#: What each side takes alone, on the one thread that it has in the disaggregated layout.
IN_TURNS = "teacher and student in turns, one thread"
#: Curves in float32 that differ by more than this, relative, are not the same.
SAME_CURVE_FRAC = 1e-4
#: Of a step; a pipeline of equal stages with some jitter reaches it.
MIN_OVERLAP_FRAC = 0.8


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
        f"whatever carries the states; the full loss differs from them by "
        + ("nothing." if differences[FULL] == 0.0 else f"at most {differences[FULL]:.1e}, relative.")
    )
    chart = charts.lines(
        {name: [(step["step"], step["lm_loss"]) for step in run.steps] for name, run in runs.items()},
        x_label="optimizer step",
        y_label="lm loss, nats per token",
    )
    return Section(
        title="The same loss",
        claim="Where the teacher runs, what carries its states, and whether logits are ever whole, changes nothing.",
        number=f"{max(differences.values()):.0e}" if any(differences.values()) else "0",
        measured=f"largest relative difference of four loss curves over {len(reference)} steps in float32",
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
    """Each layout as one would run it, in bf16, on two cores; and both sides one after the other on one."""
    flags = shape.flags(pair, cache=root / "cache")
    both = (*flags, "--threads", "2", "--teacher", str(pair.teacher), "--layout", "colocated")
    serving = ("--model", str(pair.teacher), "--dtype", "bf16", "--threads", "1", "--device", shape.device)
    apart = (*flags, "--threads", "1", "--ring-depth", str(shape.ring_depth), "--transport", "shm")
    one = (*flags, "--threads", "1", "--teacher", str(pair.teacher), "--layout", "colocated")
    for command in (
        Command(name=FULL, arguments=(*both, "--teacher-dtype", "bf16", "--loss", "full")),
        Command(name=FUSED, arguments=(*both, "--teacher-dtype", "bf16")),
        Command(name=IN_TURNS, arguments=(*one, "--teacher-dtype", "bf16")),
        Command(name=APART, arguments=apart, serving=serving),
    ):
        yield trained(command, out=root / "pace" / command.name.replace(" ", "-").replace(",", ""))


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Means over the steps that count: a teacher may serve several requests in one pass, so no step is typical.

    student_s: a step without its waiting; teacher_s: the teacher's passes for it."""

    step_s: float
    student_s: float
    teacher_s: float
    student_stall_frac: float
    teacher_stall_frac: float

    @classmethod
    def of(cls, run: Run) -> Pace:
        step_s, wait_s = run.mean_of("step_s"), run.mean_of("student_stall_s")
        return cls(
            step_s=step_s,
            student_s=step_s - wait_s,
            teacher_s=run.mean_of("teacher_s"),
            student_stall_frac=wait_s / step_s,
            teacher_stall_frac=min(1.0, run.mean_of("teacher_stall_s") / step_s),
        )


def pace(runs: Mapping[str, Run], loss_s: Mapping[str, float]) -> Section:
    """Steps of `paced`, taken apart. loss_s: what the loss alone takes in each layout."""
    paces = {name: Pace.of(runs[name]) for name in (FULL, FUSED, APART)}
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
            milliseconds(loss_s[name]),
            milliseconds(found.teacher_s),
            f"{found.student_stall_frac:.1%}",
            "-" if name != APART else f"{found.teacher_stall_frac:.1%}",
            f"{runs[name].mean_of('rows') / found.step_s:,.0f}",
        )
        for name, found in paces.items()
    ]
    parts = {name: _parts_ms(found, loss_s[name]) for name, found in paces.items()}
    columns = ("layout", "step", "student", "its loss", "teacher", "student waits", "teacher waits", "rows/s")
    return Section(
        title="The pace",
        claim="Teacher and student overlap: a step takes about as long as the slower of the two.",
        number=f"{overlap_frac:.0%}",
        measured=f"of a disaggregated step the slower side works; {ratio:.2f} x as fast as colocated, same cores",
        finding=finding,
        verdict="holds" if overlap_frac >= MIN_OVERLAP_FRAC else "fails",
        tables=[Table(columns=columns, rows=rows)],
        charts=[
            Chart(
                svg=charts.bars(
                    parts,
                    x_label="ms a step",
                    labels="{:,.0f} ms",
                ),
                caption="Where a step's time goes. What the teacher does while the student computes costs no time. "
                "The loss is measured alone, at the same sizes and threads.",
            )
        ],
        commands={name: runs[name].shell for name in paces},
        facts={
            "overlap_efficiency": overlap_frac,
            "layouts": {name: vars(found) | {"loss_alone_s": loss_s[name]} for name, found in paces.items()},
        },
        overview=Bars(title="Where a step's time goes", groups=parts, unit="ms"),
    )


def _parts_ms(found: Pace, loss_s: float) -> dict[str, float]:
    """A step as it passes: what waits for the teacher, then the student's own parts."""
    loss_s = min(loss_s, found.student_s)
    parts_s = {
        "waiting for the teacher": found.step_s - found.student_s,
        "student's model and optimizer": found.student_s - loss_s,
        "loss": loss_s,
    }
    return {name: seconds * 1e3 for name, seconds in parts_s.items()}


def losses_alone(sizes: LossSizes, *, device: str) -> dict[str, float]:
    """Seconds of the loss in each layout of `paced`, by itself. Raises StageFailed."""
    ways: dict[str, tuple[Kind, int]] = {FULL: ("full", 2), FUSED: ("fused", 2), APART: ("fused", 1)}
    return {
        name: loss_seconds(kind, sizes, num_threads=threads, device=device) for name, (kind, threads) in ways.items()
    }


def fused_alone(runs: Mapping[str, Run]) -> Section:
    """Both colocated runs of `paced`: nothing differs but the loss."""
    full, fused = runs[FULL], runs[FUSED]
    saved = full.peak_bytes - fused.peak_bytes
    speed = full.mean_of("step_s") / fused.mean_of("step_s")
    rows = [
        (name, mebibytes(run.peak_bytes), milliseconds(run.mean_of("step_s")))
        for name, run in ((FULL, full), (FUSED, fused))
    ]
    return Section(
        title="The fused loss by itself",
        claim="The fused loss saves memory in anybody's pipeline, without a ring or a second process.",
        number=mebibytes(saved),
        measured=f"less at the peak of one process with both models; a step {speed:.2f} x as fast as with full logits",
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
                    labels="{:,.0f} MiB",
                ),
                caption="Peak resident memory of the trainer, libraries and both models included.",
            )
        ],
        commands={name: runs[name].shell for name in (FULL, FUSED)},
        facts={"saved_bytes": saved, "speedup": speed},
    )
