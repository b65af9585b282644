"""Plot of a GRPO run: reward, response length, and time per step."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.grpo.history import WINDOW, Gain, Step
from examples.grpo.stopwatch import PARTS

GREEN, BROWN, GREY = "#2f7d4f", "#b5793a", "#8a8f98"
LABELS = {
    "samples": "waiting for samples",
    "rewards": "rewards",
    "gradients": "gradients and update",
    "weights": "publishing weights",
}
PART_COLOURS = dict(zip(PARTS, ("#cfd4da", "#d9b48a", "#2f7d4f", "#7fb795"), strict=True))

STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw(steps: Sequence[Step], gain: Gain, path: Path) -> None:
    draw_plots(
        [
            lambda axes: plot_rewards(axes, steps, gain),
            lambda axes: _lengths(axes, steps),
            lambda axes: _times(axes, steps),
        ],
        len(steps),
        path,
    )


def draw_plots(plots: Sequence[Callable[[Axes], None]], num_steps: int, path: Path) -> None:
    """Saves plots over the steps of a run, side by side."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 3.6), dpi=150, layout="constrained")
        for plot, axes in zip(plots, figure.subplots(1, len(plots)), strict=True):
            plot(axes)
            axes.set_xlabel("step")
            axes.set_xlim(0.5, num_steps + 0.5)
            axes.grid(axis="y", color="#e6e8eb", linewidth=0.7)
            axes.set_axisbelow(True)
        figure.savefig(path)


def plot_rewards(axes: Axes, steps: Sequence[Step], gain: Gain) -> None:
    numbers = [step.number for step in steps]
    held_out = [step.held_out_reward for step in steps]
    training = [step.training_reward for step in steps]
    axes.plot(numbers, training, ".", color=GREY, markersize=3, label="training, each step")
    axes.plot(numbers, held_out, ".", color=GREEN, markersize=5, label="held out, each step")
    axes.plot(numbers, smooth(held_out), color=GREEN, linewidth=1.8)
    for side, first in ((gain.before, numbers[0]), (gain.after, numbers[-WINDOW])):
        axes.hlines(side, first, first + WINDOW - 1, color=BROWN, linewidth=2.2, zorder=3)
    axes.set_title(
        f"Held-out reward {gain.before:.2f} \N{RIGHTWARDS ARROW} {gain.after:.2f}"
        f" (+{gain.size:.2f} \N{PLUS-MINUS SIGN} {gain.standard_error:.2f})"
    )
    add_headroom(axes)
    axes.legend(loc="upper left", frameon=False)


def _lengths(axes: Axes, steps: Sequence[Step]) -> None:
    numbers = [step.number for step in steps]
    means, p95 = [step.mean_tokens for step in steps], [step.p95_tokens for step in steps]
    axes.plot(numbers, p95, ".", color=GREY, markersize=3)
    axes.plot(numbers, smooth(p95), color=GREY, linewidth=1.4, label="95th percentile")
    axes.plot(numbers, means, ".", color=GREEN, markersize=5)
    axes.plot(numbers, smooth(means), color=GREEN, linewidth=1.8, label="mean")
    axes.set_ylim(bottom=0)
    add_headroom(axes)
    axes.set_title("Response length, tokens")
    axes.legend(loc="upper left", frameon=False)


def _times(axes: Axes, steps: Sequence[Step]) -> None:
    numbers = [step.number for step in steps]
    below = np.zeros(len(steps))
    for part in PARTS:
        seconds = np.array([step.seconds[part] for step in steps])
        label = f"{LABELS[part]}, {seconds.mean():.2f}"
        axes.bar(numbers, seconds, 1.0, bottom=below, color=PART_COLOURS[part], label=label)
        below += seconds
    axes.set_title(f"Seconds of a step, mean {below.mean():.2f}")
    add_headroom(axes, 0.5)
    axes.legend(loc="upper left", frameon=False)


def add_headroom(axes: Axes, share: float = 0.2) -> None:
    """Adds free space for the legend at the top of a plot."""
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + share * (high - low))


def smooth(values: Sequence[float]) -> list[float]:
    """Moving average over up to four neighbors on either side."""
    return [float(np.mean(values[max(0, at - 4) : at + 5])) for at in range(len(values))]
