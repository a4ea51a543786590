"""The loss bench's figures as a picture: time beside memory, ours and the others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.loss_ways import FLOOR, WAYS
from ring.core.errors import ConfigError

_OURS, _OTHERS = "#2a6f97", "#b8b8b8"


def plot(bars: Sequence[tuple[str, float, float]], *, title: str, path: Path) -> None:
    """(way, time over the floor's, extra bytes), drawn into a file whose suffix says the format.

    Raises ConfigError: matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib; pip install -e '.[report]' in a clone of DisaggKD") from error
    figure = Figure(figsize=(9, 0.42 * len(bars) + 1.3), layout="constrained")
    time_axes, memory_axes = figure.subplots(1, 2, sharey=True)
    names = [name for name, _, _ in bars]
    colors = [_OURS if WAYS[name].mode is not None else _OTHERS for name in names]
    drawn = time_axes.barh(names, [ratio for _, ratio, _ in bars], color=colors)
    time_axes.bar_label(drawn, fmt="%.2f", padding=3)
    time_axes.set_title("time over the floor's")
    time_axes.invert_yaxis()
    time_axes.margins(x=0.15)
    megabytes = [num_bytes / 1e6 for name, _, num_bytes in bars if name != FLOOR]
    drawn = memory_axes.barh(names[-len(megabytes) :], megabytes, color=colors[-len(megabytes) :])
    memory_axes.bar_label(drawn, fmt="{:,.0f}", padding=3)
    memory_axes.set_title("extra memory, MB (log)")
    memory_axes.set_xscale("log")
    memory_axes.margins(x=0.15)
    for axes in (time_axes, memory_axes):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
