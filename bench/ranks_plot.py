"""The figures of the bench of ranks as a picture: what an exchange costs a step, and what a fill costs the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.ranks_ring import RingCase, RingTimes
from bench.ranks_step import Times
from bench.records import Spread
from ring.core.errors import ConfigError


def plot(steps: Mapping[str, Sequence[Times]], rings: Mapping[RingCase, Sequence[RingTimes]], *, path: Path) -> None:
    """Drawn into a file whose suffix says the format. Raises ConfigError: matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib; pip install -e '.[report]' in a clone of DisaggKD") from error
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    step_axes, cpu_axes, pace_axes = figure.subplots(1, 3)

    times = {way: Spread.of([one.wall_s * 1e3 for one in values]) for way, values in steps.items()}
    colors = ["tab:blue" if way.endswith("heads") else "tab:green" for way in times]
    drawn = step_axes.barh(list(times), [spread.median for spread in times.values()], color=colors)
    step_axes.bar_label(drawn, fmt="%.0f", padding=3, fontsize=8)
    step_axes.invert_yaxis()
    step_axes.margins(x=0.12)
    step_axes.set_title("milliseconds of a loss (blue), a step (green)", fontsize=10)

    names = [case.name for case in rings]
    bottom = [0.0] * len(names)
    for what, label in (("trainer_cpu_s", "trainer"), ("teacher_cpu_s", "teacher")):
        medians = [Spread.of([getattr(one, what) * 1e3 for one in rounds]).median for rounds in rings.values()]
        cpu_axes.bar(names, medians, bottom=bottom, label=label)
        bottom = [below + median for below, median in zip(bottom, medians, strict=True)]
    cpu_axes.set_title("CPU milliseconds of a fill, by ranks x replicas", fontsize=10)
    cpu_axes.legend(fontsize=8, loc="upper center", ncols=2)
    cpu_axes.set_ylim(top=1.2 * max(bottom))
    pace_axes.bar(names, [Spread.of([one.fills_per_s for one in rounds]).median for rounds in rings.values()])
    pace_axes.set_title("fills a second, all ranks together", fontsize=10)
    for axes in (cpu_axes, pace_axes):
        axes.tick_params(axis="x", labelrotation=60, labelsize=8)
    for axes in (step_axes, cpu_axes, pace_axes):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
