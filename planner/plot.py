"""What a sweep leaves behind: a picture (PNG and SVG), a CSV and a JSON file."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import TYPE_CHECKING

from planner.answer import Answer, point_record
from planner.errors import PlanError
from planner.plan import LAYOUTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NAMES = {
    ("colocated", "full"): "colocated, full loss",
    ("colocated", "fused"): "colocated, fused loss",
    ("disagg", "fused"): "disaggregated, fused loss",
}
# Told apart without colour too.
_STYLES = {
    ("colocated", "full"): ("#b5473c", "s", "--"),
    ("colocated", "fused"): ("#c98a1b", "^", "-."),
    ("disagg", "fused"): ("#2a6f97", "o", "-"),
}
#: A label on an axis in powers is so much further on than the one before it.
LABELS_APART = 1.3
_AXES = {
    "tokens": "tokens a GPU and microbatch",
    "gpus": "GPUs that train",
    "teachers": "teacher, by size",
}


def write_sweep(answer: Answer) -> list[Path]:
    """Writes sweep.png, sweep.svg, sweep.csv and sweep.json; returns their paths.

    Raises PlanError: they can't be written, or there is no matplotlib."""
    settings = answer.plan.question.settings
    directory = Path(settings.out)
    records = [point_record(point) for point in answer.sweep]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        paths = [directory / f"sweep.{ending}" for ending in ("csv", "json", "png", "svg")]
        with paths[0].open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(records[0]))
            writer.writeheader()
            writer.writerows(records)
        paths[1].write_text(json.dumps({"swept": settings.sweep, "points": records}, indent=2) + "\n")
        _draw(answer, paths[2:])
    except OSError as error:
        raise PlanError(f"--out {directory}: can't be written: {error.strerror}") from error
    return paths


def _draw(answer: Answer, paths: list[Path]) -> None:
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise PlanError("--sweep needs matplotlib; pip install -e '.[report]' in a clone of DisaggKD") from error
    question = answer.plan.question
    kind = question.settings.sweep
    figure, axes = plt.subplots(figsize=(8.5, 5.0), layout="constrained")
    _lines(axes, answer)
    capacity_gb = question.gpu.memory_bytes / 1e9
    axes.axhline(capacity_gb, color="#444444", linewidth=1)
    axes.annotate(
        f"{question.gpu.name}:\n{capacity_gb:.0f} GB",
        xy=(1, capacity_gb),
        xycoords=("axes fraction", "data"),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        color="#444444",
    )
    if kind != "teachers":
        axes.set_xscale("log")
    points = {point.label: x for point, x in zip(answer.sweep, _positions(answer), strict=True)}
    if kind == "gpus":
        points = _with_room(points)
    rotation, align = (25, "right") if kind == "teachers" else (0, "center")
    axes.set_xticks(list(points.values()), list(points), rotation=rotation, ha=align)
    axes.minorticks_off()
    axes.set_xlabel(_AXES[kind])
    axes.set_ylabel("needed on a training GPU, GB")
    axes.set_ylim(bottom=0, top=_top(answer, capacity_gb))
    axes.set_title(f"{_title(answer)}: what a training GPU must hold", loc="left", fontsize=11)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    # Below: within the axes it would cover a line sooner or later.
    figure.legend(frameon=False, loc="outside lower center", ncols=len(LAYOUTS))
    for path in paths:
        figure.savefig(path, dpi=150)
    plt.close(figure)


def _lines(axes: Axes, answer: Answer) -> None:
    placed = list(zip(answer.sweep, _positions(answer), strict=True))
    for layout in LAYOUTS:
        own = [(x, point.needed_bytes / 1e9) for point, x in placed if (point.layout, point.loss) == layout]
        colour, marker, line = _STYLES[layout]
        xs, ys = [x for x, _ in own], [y for _, y in own]
        axes.plot(xs, ys, color=colour, linestyle=line, marker=marker, markersize=5, label=_NAMES[layout])


def _positions(answer: Answer) -> list[float]:
    """Where each point stands: teachers side by side in the order of their size, so that their names have room."""
    if answer.plan.question.settings.sweep != "teachers":
        return [point.x for point in answer.sweep]
    order = list(dict.fromkeys(point.label for point in answer.sweep))
    return [float(order.index(point.label)) for point in answer.sweep]


def _with_room(points: dict[str, float]) -> dict[str, float]:
    """Those that stand far enough from the one before for both to be read."""
    kept: dict[str, float] = {}
    for label, x in points.items():
        if not kept or x >= LABELS_APART * max(kept.values()):
            kept[label] = x
    return kept


def _top(answer: Answer, capacity_gb: float) -> float:
    """Up to four times the capacity: what lies beyond fits nowhere near."""
    largest = max(point.needed_bytes for point in answer.sweep) / 1e9
    return min(max(largest, capacity_gb) * 1.1, 4 * capacity_gb)


def _title(answer: Answer) -> str:
    question = answer.plan.question
    if question.settings.sweep == "teachers":
        return question.student.name
    return f"{question.teacher.name} to {question.student.name}"
