"""Figure of a rollout tree, drawn with matplotlib: rewards, token entropies, finish reasons.

    color               reward of the segment, aggregated from its leaves as in segment_rewards
    area above a line   entropy of each token, on one scale for the whole figure
    marker at the end   finish reason of the leaf, with its reward

matplotlib is imported only when a plot is drawn.
"""

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from coppice.credit import Rewards, segment_rewards
from coppice.rollout_results import Segment, Tree

ROW_INCHES, LEAST_INCHES, WIDTH_INCHES = 0.42, 2.0, 9.0
ENTROPY_ROWS = 0.42
TEXT_COLOR, GREY = "#222222", "#8a8a8a"
ENDS = {"stop": "o", "length": "|", "cut": "|", "budget": "|"}


def plot_tree(
    tree: Tree,
    rewards: Rewards | None = None,
    path: str | Path | None = None,
    *,
    title: str | None = None,
) -> Any:
    """Draws a rollout tree and returns the matplotlib Figure.

    `rewards` are the rewards of tree.leaves, in order. With `path`, the figure is also saved as
    .png or .svg, depending on the file name.
    """
    return _Picture(tree, rewards, title).save(path)


class _Picture:
    """Matplotlib figure of a rollout tree, drawn by the constructor.

    It uses no pyplot state, so any thread may draw.
    """

    def __init__(self, tree: Tree, rewards: Rewards | None, title: str | None) -> None:
        self._tree = tree
        self._fused = None if rewards is None else segment_rewards(tree, rewards)
        self._starts = _starts(tree)
        self._rows = _rows(tree)
        self._most_entropy = _most_entropy(tree)
        height = max(LEAST_INCHES, ROW_INCHES * len(tree.leaves) + 1.0)
        self._figure = _module("figure").Figure((WIDTH_INCHES, height), layout="constrained")
        self._axes = self._figure.add_subplot()
        self._colours = self._colour_scale()
        for segment in tree.segments:
            self._draw(segment)
        self._finish(title)

    def save(self, path: str | Path | None) -> Any:
        if path is not None:
            self._figure.savefig(path, dpi=150)
        return self._figure

    def _colour_scale(self) -> Any:
        """Color scale of rewards from red (low) to blue (high), drawn as a bar beside the plot."""
        if self._fused is None:
            return None
        values = list(self._fused.values())
        norm = _module("colors").Normalize(min(values), max(values))
        scale = _module("cm").ScalarMappable(norm=norm, cmap="coolwarm_r")
        self._figure.colorbar(scale, ax=self._axes, label="reward", fraction=0.03, pad=0.01)
        return scale

    def _draw(self, segment: Segment) -> None:
        start, row = self._starts[segment.id], self._rows[segment.id]
        end = start + len(segment.token_ids)
        colour = self._colour(segment)
        self._draw_fork(segment, start, row)
        self._axes.plot([start, end], [row, row], color=colour, lw=2.6, solid_capstyle="butt")
        self._draw_entropy(segment, start, row)
        if segment.id in self._tree.leaves:
            self._draw_leaf(segment, end, row, colour)

    def _draw_fork(self, segment: Segment, start: int, row: float) -> None:
        """Draws the vertical line from a tree segment's start to the row of its parent."""
        forked = [self._rows[s.id] for s in self._tree.children(None)]
        above = float(np.mean(forked)) if segment.parent is None else self._rows[segment.parent]
        self._axes.plot([start, start], [above, row], color=GREY, lw=0.9, zorder=0)

    def _draw_entropy(self, segment: Segment, start: int, row: float) -> None:
        if segment.entropy is None or not len(segment.entropy):
            return
        places = start + np.arange(len(segment.entropy)) + 0.5
        tops = row - ENTROPY_ROWS * segment.entropy / self._most_entropy  # the y axis is inverted
        self._axes.fill_between(places, row, tops, color=GREY, alpha=0.5, lw=0, step="mid")

    def _draw_leaf(self, segment: Segment, end: int, row: float, colour: Any) -> None:
        mark = ENDS.get(segment.finish_reason, "x")
        self._axes.plot([end], [row], marker=mark, ms=6, mew=1.6, color=colour)
        reward = "" if self._fused is None else f"  {self._fused[segment.id]:.3g}"
        self._axes.annotate(
            f"{segment.finish_reason}{reward}",
            (end, row),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=TEXT_COLOR,
        )

    def _colour(self, segment: Segment) -> Any:
        if self._colours is None or self._fused is None:
            return "#33658a"
        return self._colours.to_rgba(self._fused[segment.id])

    def _finish(self, title: str | None) -> None:
        axes = self._axes
        axes.set_xlabel("response tokens")
        axes.set_yticks([])
        axes.invert_yaxis()
        axes.margins(x=0.02, y=0.06)
        axes.set_xlim(right=axes.get_xlim()[1] * 1.12)  # room for the annotations of the leaves
        for side in ("top", "left", "right"):
            axes.spines[side].set_visible(False)
        if title is not None:
            axes.set_title(title, loc="left", fontsize=10)


def _starts(tree: Tree) -> dict[str, int]:
    """Number of response tokens before each tree segment: the segment's horizontal start."""
    starts: dict[str, int] = {}
    for segment in tree.segments:
        if segment.parent is None:
            starts[segment.id] = 0
        else:
            above = tree.segment(segment.parent)
            starts[segment.id] = starts[above.id] + len(above.token_ids)
    return starts


def _rows(tree: Tree) -> dict[str, float]:
    """Vertical position of each tree segment; leaves are in depth-first order: no paths cross."""
    rows: dict[str, float] = {}
    waiting = list(tree.children(None)[::-1])
    while waiting:
        segment = waiting.pop()
        waiting += tree.children(segment.id)[::-1]
        if segment.id in tree.leaves:
            rows[segment.id] = float(len(rows))
    for segment in reversed(tree.segments):
        if segment.id not in rows:
            rows[segment.id] = float(np.mean([rows[c.id] for c in tree.children(segment.id)]))
    return rows


def _most_entropy(tree: Tree) -> float:
    known = [s.entropy for s in tree.segments if s.entropy is not None and s.entropy.size]
    return max([float(entropy.max()) for entropy in known], default=1.0) or 1.0


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"matplotlib.{name}")
    except ImportError:
        raise ImportError(
            "plot_tree needs matplotlib: pip install 'coppice-client[plot]'"
        ) from None
