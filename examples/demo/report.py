"""The demo's picture and its ten lines of summary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

Records = Sequence[Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What both students did. `kd`, `ce`: lines of metrics.jsonl; `*_eval`: lines of eval.jsonl; losses in nats/token.

    `*_peak_bytes`: extra memory of one loss call (examples.demo.memory). `teacher_eval`: held-out loss of the teacher,
    None where it is not known."""

    kd: Records
    ce: Records
    kd_eval: Records
    ce_eval: Records
    teacher_eval: float | None
    full_peak_bytes: int
    fused_peak_bytes: int
    loss_shape: str
    sample_prompt: str
    samples: Mapping[str, str]
    wall_s: float

    @property
    def gain_nats(self) -> float:
        return self.ce_eval[-1]["eval_loss"] - self.kd_eval[-1]["eval_loss"]


SMOOTHED_STEPS = 9
BLUE, ORANGE, GREY, GREEN = "#2563a8", "#d9772b", "#8a8f98", "#3f8f5b"


def draw(outcome: Outcome, path: Path) -> None:
    """Write the picture: held-out loss against steps, where step time goes, memory of the loss."""
    with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(1, 3, figsize=(15, 4.6), width_ratios=[1.5, 1.3, 0.8])
        _draw_loss(axes[0], outcome)
        draw_time(axes[1], outcome.kd)
        _draw_memory(axes[2], outcome)
        comparison = "better" if outcome.gain_nats >= 0 else "worse"
        figure.suptitle(
            f"Distilled student: {abs(outcome.gain_nats):.2f} nats/token {comparison} than the same student on labels "
            "alone, at equal steps",
            fontsize=12,
        )
        figure.tight_layout()
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _draw_loss(axis: Axes, outcome: Outcome) -> None:
    for records, color, label in (
        (outcome.ce_eval, ORANGE, "labels only (CE)"),
        (outcome.kd_eval, BLUE, "distilled (KD + CE)"),
    ):
        axis.plot([r["step"] for r in records], [r["eval_loss"] for r in records], "o-", color=color, ms=4, label=label)
        last = records[-1]
        axis.annotate(
            f"{last['eval_loss']:.2f}", (last["step"], last["eval_loss"]), textcoords="offset points", xytext=(6, 3)
        )
    if outcome.teacher_eval is not None:
        axis.axhline(outcome.teacher_eval, color=GREY, ls="--", lw=1)
        axis.annotate("teacher", (0, outcome.teacher_eval), color=GREY, textcoords="offset points", xytext=(2, 4))
    axis.set(title="Held-out loss", xlabel="optimizer step", ylabel="nats per token")
    axis.legend(frameon=False)


def draw_time(axis: Axes, records: Records) -> None:
    """Student and teacher, each as computing and waiting."""
    steps = [r["step"] for r in records]
    stalls = _smooth([r["student_stall_s"] for r in records])
    rest = _smooth([r["step_s"] - r["student_stall_s"] for r in records])
    axis.stackplot(
        steps,
        [1e3 * s for s in rest],
        [1e3 * s for s in stalls],
        colors=[BLUE, "#b9cde4"],
        labels=["student computes", "student waits"],
    )
    # A pass that serves two requests counts with the first of them: only a mean has its share in each.
    computes = _smooth([r["teacher_s"] for r in records], middle=fmean)
    waits = _smooth([r["teacher_stall_s"] for r in records])
    for values, color, label in ((computes, GREEN, "teacher computes"), (waits, ORANGE, "teacher waits")):
        axis.plot(steps, [1e3 * s for s in values], color=color, lw=1.4, label=label)
    axis.set(title="Where a step's time goes", ylabel="ms, smoothed", ylim=(0, None))
    axis.set_xlabel("optimizer step")
    axis.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4, fontsize=8)


def _smooth(values: Sequence[float], *, middle: Callable[[Sequence[float]], float] = median) -> list[float]:
    """A running median, unless said otherwise: a teacher also waits while the student evaluates, which is no part of
    any step."""
    half = SMOOTHED_STEPS // 2
    return [middle(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def _draw_memory(axis: Axes, outcome: Outcome) -> None:
    sizes = [outcome.full_peak_bytes / 2**20, outcome.fused_peak_bytes / 2**20]
    bars = axis.bar(["full logits", "fused"], sizes, color=[GREY, BLUE], width=0.6)
    axis.bar_label(bars, labels=[f"{size:,.0f} MiB" for size in sizes], padding=3)
    axis.set(title="Extra memory of the loss", ylabel="MiB", ylim=(0, 1.15 * max(sizes)))
    axis.set_xlabel(outcome.loss_shape, fontsize=8)


def summarize(outcome: Outcome) -> list[str]:
    """Ten lines that a person understands."""
    kd, steps = outcome.kd, len(outcome.kd)
    step_s = median([r["step_s"] for r in kd])
    ce_step_s = median([r["step_s"] for r in outcome.ce])
    stall = sum(r["student_stall_s"] for r in kd) / sum(r["step_s"] for r in kd)
    idle = median([r["teacher_stall_s"] for r in kd]) / step_s
    vs_teacher = "" if outcome.teacher_eval is None else f" (the teacher itself: {outcome.teacher_eval:.3f})"
    return [
        f"Held-out loss, distilled student:    {outcome.kd_eval[-1]['eval_loss']:.3f} nats/token{vs_teacher}",
        f"Held-out loss, labels only:          {outcome.ce_eval[-1]['eval_loss']:.3f} nats/token",
        f"Gain from the teacher:               {outcome.gain_nats:.3f} nats/token after {steps} steps each",
        f"This is at equal steps, not equal compute: a distilled step took {step_s * 1e3:.0f} ms, one on labels "
        f"{ce_step_s * 1e3:.0f} ms.",
        f"The student waited for the teacher:  {stall:.0%} of the steps' time",
        f"The teacher waited for the student:  {idle:.0%} of a typical step",
        f"States received through the ring:    {kd[-1]['bytes_received'] / 2**20:,.0f} MiB, asked again: "
        f"{kd[-1]['retries']:.0f}",
        f"Memory of the loss ({outcome.loss_shape}): fused {outcome.fused_peak_bytes / 2**20:,.0f} MiB, full logits "
        f"{outcome.full_peak_bytes / 2**20:,.0f} MiB",
        f"Peak memory of the student process:  {max(r['peak_rss_bytes'] for r in kd) / 2**20:,.0f} MiB",
        f"All of it took {outcome.wall_s / 60:.1f} minutes.",
    ]
