"""The report's pictures, as SVG text that a page can hold.

Ink and colours are the page's own variables, so that one picture serves a light and a dark page; letters are text in
the page's font. Pictures are narrow: a phone shows them at nearly their size.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from bench.claims.section import Bars
from ring.core.errors import ConfigError

#: Ours and the page's name of each colour; the page has a lighter one of each for a dark scheme.
INK, LINE = "#1d2530", "#dfe4ea"
BLUE, ORANGE, GREEN, GREY, VIOLET, RED = "#2563a8", "#d9772b", "#3f8f5b", "#8a8f98", "#7d5ba6", "#b5473c"
VARIABLES = {
    INK: "--ink",
    LINE: "--line",
    BLUE: "--blue",
    ORANGE: "--orange",
    GREEN: "--green",
    GREY: "--grey",
    VIOLET: "--violet",
    RED: "--red",
}
#: By what is drawn, so that a layout has one colour on the whole page.
COLORS = {
    "colocated, full loss": GREY,
    "colocated, fused loss": ORANGE,
    "disaggregated, fused loss": BLUE,
    "disaggregated over zmq": GREEN,
}
FALLBACK_COLORS = (BLUE, ORANGE, GREEN, GREY, VIOLET, RED)
MARKERS = ("o", "s", "^", "D", "v", "P")
WIDTH_IN = 5.2
_STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}


def require() -> None:
    """Raises ConfigError: nothing can be drawn here."""
    _blank(1.0, 1.0)


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]], *, x_label: str, y_label: str, height_in: float = 3.3
) -> str:
    """Curves over one axis; a later one is drawn thinner, so that those below it still show where they are equal."""
    figure, axes = _figure(height_in)
    last = len(series) - 1
    widths = [5.0 - 3.6 * place / last for place in range(len(series))] if last else [2.0]
    for (name, points), width in zip(series.items(), widths, strict=True):
        axes.plot([x for x, _ in points], [y for _, y in points], lw=width, label=name, color=_color(name, series))
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.grid(axis="y", color=LINE, lw=0.8)
    if len(series) > 1:
        axes.legend(frameon=False)
    return _svg(figure)


def sizes(
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    dashed: Sequence[str],
    x_label: str,
    y_label: str,
    height_in: float = 3.9,
) -> str:
    """Speeds by size, both in powers; `dashed` are what the others are held against."""
    figure, axes = _figure(height_in)
    for number, (name, points) in enumerate(series.items()):
        style = "--" if name in dashed else "-"
        color, marker = FALLBACK_COLORS[number % len(FALLBACK_COLORS)], MARKERS[number % len(MARKERS)]
        axes.plot([x for x, _ in points], [y for _, y in points], style, marker=marker, ms=5, color=color, label=name)
    ticks = sorted({x for points in series.values() for x, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.grid(axis="y", color=LINE, lw=0.8)
    figure.legend(frameon=False, loc="outside lower center", ncols=3, fontsize=9)
    return _svg(figure)


def bars(groups: Mapping[str, Mapping[str, float]], *, x_label: str, labels: str = "{:,.0f}") -> str:
    """Horizontal bars: each entry of `groups` is one bar, stacked from its named parts."""
    num_parts = len({part for group in groups.values() for part in group})
    figure, axes = _figure(0.9 + 0.42 * len(groups) + (0.3 if num_parts > 1 else 0.0))
    _draw_bars(axes, groups, labels=labels)
    axes.set_xlabel(x_label)
    if num_parts > 1:
        figure.legend(frameon=False, loc="outside lower center", ncols=num_parts, fontsize=9)
    return _svg(figure)


def overview(panels: Sequence[Bars]) -> bytes:
    """The panels side by side, as a PNG on white: for pages that are not ours."""
    figure = _blank(2 * WIDTH_IN, 2.9)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw_bars(axes, panel.groups, labels=f"{{:,.0f}} {panel.unit}")
        axes.set_title(panel.title, fontsize=10, loc="left")
        axes.set_xlabel(panel.unit)
        if len(next(iter(panel.groups.values()))) > 1:
            axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.4, -0.22), ncols=3, fontsize=8)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110, facecolor="white", metadata={"Software": None})
    return file.getvalue()


def _draw_bars(axes: Any, groups: Mapping[str, Mapping[str, float]], *, labels: str) -> None:
    parts = list(dict.fromkeys(part for group in groups.values() for part in group))
    names = [name.replace(", ", ",\n", 1) if len(name) > 22 else name for name in groups]
    left = [0.0] * len(names)
    for number, part in enumerate(parts):
        values = [group.get(part, 0.0) for group in groups.values()]
        color = FALLBACK_COLORS[number % len(FALLBACK_COLORS)]
        colors = [_layout_color(name) or color for name in groups] if len(parts) == 1 else color
        drawn = axes.barh(names, values, left=left, color=colors, label=part, height=0.6)
        left = [start + value for start, value in zip(left, values, strict=True)]
        if number == len(parts) - 1:
            axes.bar_label(drawn, labels=[labels.format(total) for total in left], padding=4)
    axes.invert_yaxis()
    axes.set_xlim(right=1.24 * max(left))


def _layout_color(name: str) -> str | None:
    """Of the layout that the name begins with."""
    return next((color for layout, color in COLORS.items() if name.startswith(layout)), None)


def _color(name: str, series: Mapping[str, object]) -> str:
    return COLORS.get(name, FALLBACK_COLORS[list(series).index(name) % len(FALLBACK_COLORS)])


def _figure(height_in: float) -> tuple[Any, Any]:
    figure = _blank(WIDTH_IN, height_in)
    return figure, figure.subplots()


def _blank(width_in: float, height_in: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("the report needs matplotlib; pip install -e '.[report]' in a clone of DisaggKD") from error
    import matplotlib as mpl

    mpl.rcParams.update(_STYLE)
    return Figure(figsize=(width_in, height_in), layout="constrained")


def _svg(figure: Any) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    for color, variable in VARIABLES.items():
        text = text.replace(color, f"var({variable})")
    return text[text.index("<svg") :]
