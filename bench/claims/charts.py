"""The report's pictures, as SVG text that a page can hold."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from ring.core.errors import ConfigError

#: By what is drawn, so that a layout has one colour on the whole page.
COLORS = {
    "colocated, full loss": "#8a8f98",
    "colocated, fused loss": "#d9772b",
    "disaggregated, fused loss": "#2563a8",
    "disaggregated over zmq": "#3f8f5b",
}
FALLBACK_COLORS = ("#2563a8", "#d9772b", "#3f8f5b", "#8a8f98", "#7d5ba6")
_STYLE: Any = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none"}


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x_label: str,
    y_label: str,
    size: tuple[float, float] = (6.4, 3.4),
) -> str:
    """Curves over one axis; a later one is drawn thinner, so that those below it still show where they are equal."""
    figure = _figure(size)
    axes = figure.subplots()
    widths = [5.0 - 3.6 * place / max(1, len(series) - 1) for place in range(len(series))]
    for (name, points), width in zip(series.items(), widths, strict=True):
        axes.plot([x for x, _ in points], [y for _, y in points], lw=width, label=name, color=_color(name, series))
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.legend(frameon=False)
    return _svg(figure)


def bars(
    groups: Mapping[str, Mapping[str, float]],
    *,
    x_label: str,
    size: tuple[float, float] = (6.4, 3.0),
    labels: str = "{:,.0f}",
) -> str:
    """Horizontal bars: each entry of `groups` is one bar, stacked from its named parts."""
    figure = _figure(size)
    axes = figure.subplots()
    names = list(groups)
    parts = list(dict.fromkeys(part for group in groups.values() for part in group))
    left = [0.0] * len(names)
    for number, part in enumerate(parts):
        values = [groups[name].get(part, 0.0) for name in names]
        color = FALLBACK_COLORS[number % len(FALLBACK_COLORS)]
        drawn = axes.barh(names, values, left=left, color=color, label=part, height=0.6)
        left = [start + value for start, value in zip(left, values, strict=True)]
        if number == len(parts) - 1:
            axes.bar_label(drawn, labels=[labels.format(total) for total in left], padding=4)
    axes.invert_yaxis()
    axes.set_xlabel(x_label)
    axes.margins(x=0.14)
    if len(parts) > 1:
        axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.4, -0.2), ncols=len(parts), fontsize=9)
    return _svg(figure)


def _color(name: str, series: Mapping[str, object]) -> str:
    return COLORS.get(name, FALLBACK_COLORS[list(series).index(name) % len(FALLBACK_COLORS)])


def _figure(size: tuple[float, float]) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("the report needs matplotlib; pip install 'disaggkd[report]'") from error
    import matplotlib as mpl

    mpl.rcParams.update(_STYLE)
    return Figure(figsize=size, layout="constrained")


def _svg(figure: Any) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    return text[text.index("<svg") :]
