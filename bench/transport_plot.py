"""The transport bench's figures as a picture: bytes a second by the size of a fill, beside CPU time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.records import Spread
from ring.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Line:
    """One way. `is_ours`: a transport, and not what one is held against. `speeds`: GB/s by bytes of a fill.

    `cpu_s_per_gb`: of the largest fills; None: not known."""

    name: str
    is_ours: bool
    speeds: Sequence[tuple[int, Spread]]
    cpu_s_per_gb: Spread | None


def plot(lines: Sequence[Line], *, path: Path) -> None:
    """Drawn into a file whose suffix says the format. Raises ConfigError: matplotlib is not installed."""
    try:
        from matplotlib import colormaps
        from matplotlib.colors import to_rgba
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib; pip install -e '.[report]' in a clone of DisaggKD") from error
    figure = Figure(figsize=(11, 5), layout="constrained")
    speed_axes, cpu_axes = figure.subplots(1, 2, width_ratios=(3, 2))
    colors = {line.name: colormaps["tab20"](number % 20) for number, line in enumerate(lines)}
    for line in lines:
        sizes = [size / 2**20 for size, _ in line.speeds]
        medians = [spread.median for _, spread in line.speeds]
        style = "-o" if line.is_ours else "--"
        speed_axes.plot(sizes, medians, style, color=colors[line.name], label=line.name, markersize=4)
        low, high = [spread.p10 for _, spread in line.speeds], [spread.p90 for _, spread in line.speeds]
        speed_axes.fill_between(sizes, low, high, color=colors[line.name], alpha=0.12, linewidth=0)
    speed_axes.set_xscale("log", base=2)
    speed_axes.set_yscale("log")
    ticks = [size / 2**20 for size, _ in lines[0].speeds]
    speed_axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    speed_axes.set_xlabel("MiB of a fill")
    speed_axes.set_title("GB/s (log); dashed: what the transports are held against")
    speed_axes.grid(alpha=0.3, which="both", linewidth=0.5)
    speed_axes.legend(fontsize=8, ncols=2)
    known = [(line, line.cpu_s_per_gb) for line in lines if line.cpu_s_per_gb is not None]
    drawn = cpu_axes.barh(
        [line.name for line, _ in known],
        [cpu.median for _, cpu in known],
        color=[to_rgba(colors[line.name], 1.0 if line.is_ours else 0.45) for line, _ in known],
    )
    cpu_axes.bar_label(drawn, fmt="%.2f", padding=3, fontsize=8)
    cpu_axes.invert_yaxis()
    cpu_axes.margins(x=0.12)
    cpu_axes.set_title("CPU seconds per GB, both sides, largest fills")
    for axes in (speed_axes, cpu_axes):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
