"""Drawing of charts as SVG files whose text depends only on the data.

The colours of a chart follow the reader's preference for light or dark pages. Viewers without
media queries show the light ones.
"""

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PAPER, INK, FAINT, GRID = "#ffffff", "#1f2328", "#59636e", "#d1d9e0"
GAIN, LOSS, NEUTRAL = "#0a7a68", "#c2410c", "#6e7781"
SERIES = (GAIN, "#3f6fa8", "#b5793a", "#8a8f98")
DARK = {
    PAPER: "#1b1f24",
    INK: "#e6edf3",
    FAINT: "#a9b4c0",
    GRID: "#3d444d",
    GAIN: "#35c4aa",
    LOSS: "#ff8a5c",
    NEUTRAL: "#9aa4af",
    "#3f6fa8": "#7fb0ea",
    "#b5793a": "#e0a566",
    "#8a8f98": "#b6bcc5",
}
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": FAINT,
    "axes.facecolor": PAPER,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": PAPER,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "savefig.facecolor": PAPER,
    "svg.hashsalt": "coppice",
    "xtick.color": FAINT,
    "ytick.color": FAINT,
}
WIDTH = 8.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A measured ratio with its 95 % interval; above one is a gain.

    `ceiling` is what the ratio would be if the measured part took no time.
    """

    label: str
    baseline: str = ""
    median: float
    low: float
    high: float
    ceiling: float | None = None

    @property
    def is_clear(self) -> bool:
        return self.low > 1 or self.high < 1

    @property
    def colour(self) -> str:
        if not self.is_clear:
            return NEUTRAL
        return GAIN if self.median > 1 else LOSS


def svg(figure: Figure) -> str:
    with matplotlib.rc_context(STYLE), io.StringIO() as file:
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        text = file.getvalue()
    return text.replace("<defs>", f"<style>{_dark_style()}</style>\n <defs>", 1)


def _dark_style() -> str:
    rules = "".join(
        f'[style*="{name}: {light}"] {{ {name}: {dark} !important }} '
        for light, dark in DARK.items()
        for name in ("fill", "stroke")
    )
    return f"@media (prefers-color-scheme: dark) {{ {rules}}}"


def ratio_chart(
    rows: Sequence[Ratio], *, xlabel: str, ticks: Sequence[float], title: str = ""
) -> Figure:
    """Medians and intervals on a logarithmic axis, one row for each ratio.

    A filled dot has an interval without one; a hollow dot is no clear difference.
    """
    with matplotlib.rc_context(STYLE):
        figure, axes = _rows_figure(len(rows), left=0.47, right=0.9)
        for y, row in enumerate(rows):
            _draw_ratio(axes, y, row)
        axes.axvline(1, color=FAINT, linewidth=1)
        axes.set_title(title, loc="right", fontsize=9, color=FAINT)
        _logarithmic(axes, ticks, xlabel)
        if any(row.ceiling for row in rows):
            axes.scatter(
                [], [], marker="|", s=60, color=FAINT, label="limit: attention takes no time"
            )
            axes.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0, fontsize=8)
    return figure


def bar_chart(bars: Sequence[tuple[str, float, str]], *, xlabel: str, goal: float = 0) -> Figure:
    """Horizontal bars of (label, value, text of the value), with a line at the goal."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _rows_figure(len(bars), left=0.47, right=0.9)
        for y, (label, value, text) in enumerate(bars):
            axes.barh(y, value, height=0.55, color=LOSS if goal and value > goal else GAIN)
            axes.annotate(
                text,
                (value, y),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
                bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1},
            )
            _label(axes, y, label, "")
        if goal:
            axes.axvline(goal, color=LOSS, linewidth=1.2, linestyle="--")
            axes.text(goal, -0.75, "goal ", ha="right", color=LOSS, fontsize=8)
        axes.set_xlim(0, 1.18 * max(goal, *(value for _, value, _ in bars)))
        axes.set_xlabel(xlabel)
    return figure


def grouped_bars(
    groups: Sequence[str], series: Mapping[str, Sequence[float]], *, ylabel: str
) -> Figure:
    """Vertical bars: one group for each name of `groups`, one bar for each series."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
        axes = figure.subplots()
        width = 0.8 / len(series)
        for number, (name, values) in enumerate(series.items()):
            places = [
                place + (number - (len(series) - 1) / 2) * width for place in range(len(groups))
            ]
            axes.bar(places, values, 0.92 * width, color=SERIES[number], label=name)
            for place, value in zip(places, values, strict=True):
                axes.text(place, value, f"{value:,.0f}", ha="center", va="bottom", fontsize=7)
        axes.set_xticks(range(len(groups)), groups, color=INK)
        axes.set_ylabel(ylabel)
        axes.set_ylim(0, 1.25 * max(max(values) for values in series.values()))
        axes.legend(loc="upper left", fontsize=8, ncols=2)
    return figure


def line_chart(
    axes: Axes, places: Sequence[float], series: Mapping[str, Sequence[float]], **settings: Any
) -> None:
    for number, (name, values) in enumerate(series.items()):
        axes.plot(places, values, marker="o", markersize=4, color=SERIES[number], label=name)
    axes.set(**settings)
    axes.grid(axis="y")
    axes.legend(loc="upper left", fontsize=8)


def parse_ratio(value: str) -> tuple[float, float, float]:
    """Median and interval of a table's cell such as `1.83x [1.79, 1.88]: ...`."""
    found = re.search(r"([\d.]+)(?:x| times)? \[([\d.]+), ([\d.]+)\]", value)
    assert found, value
    return float(found[1]), float(found[2]), float(found[3])


def _rows_figure(count: int, *, left: float, right: float) -> tuple[Figure, Axes]:
    height = 0.85 + 0.42 * count
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.add_axes((left, 0.52 / height, right - left, 1 - 0.85 / height))
    axes.set_ylim(count - 0.4, -0.6)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    return figure, axes


def _draw_ratio(axes: Axes, y: int, row: Ratio) -> None:
    axes.hlines(y, row.low, row.high, color=row.colour, linewidth=2)
    face = row.colour if row.is_clear else PAPER
    axes.scatter(
        [row.median], [y], s=38, zorder=3, facecolor=face, edgecolor=row.colour, linewidth=1.6
    )
    if row.ceiling:
        axes.scatter([row.ceiling], [y], marker="|", s=60, color=FAINT)
    axes.text(1.03, y, f"{row.median:.2f}x", transform=axes.get_yaxis_transform(), va="center")
    _label(axes, y, row.label, row.baseline)


def _label(axes: Axes, y: int, label: str, baseline: str) -> None:
    place = axes.get_yaxis_transform()
    upper = y - 0.17 if baseline else y
    axes.text(-0.03, upper, label, transform=place, ha="right", va="center", fontsize=8.5)
    if baseline:
        axes.text(
            -0.03,
            y + 0.2,
            baseline,
            transform=place,
            ha="right",
            va="center",
            fontsize=7.5,
            color=FAINT,
        )


def _logarithmic(axes: Axes, ticks: Sequence[float], xlabel: str) -> None:
    axes.set_xscale("log")
    axes.set_xlim(ticks[0], ticks[-1])
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    axes.set_xlabel(xlabel)
