"""Plot of a training run: reward, tool calls, and tokens that the trainer forwards."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.agent_training.loop import AgentStep
from examples.grpo.history import Gain
from examples.grpo.picture import (
    GREEN,
    GREY,
    STYLE,
    add_headroom,
    finish_axes,
    plot_rewards,
    smooth,
)


def draw(steps: Sequence[AgentStep], gain: Gain, path: Path) -> None:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 3.6), dpi=150, layout="constrained")
        rewards, calls, tokens = figure.subplots(1, 3)
        plot_rewards(rewards, steps, gain)
        _tool_calls(calls, steps)
        _tokens(tokens, steps)
        for axes in (rewards, calls, tokens):
            finish_axes(axes, len(steps))
        figure.savefig(path)


def _tool_calls(axes: Axes, steps: Sequence[AgentStep]) -> None:
    numbers = [step.number for step in steps]
    values = [step.tool_calls for step in steps]
    axes.plot(numbers, values, ".", color=GREEN, markersize=5)
    axes.plot(numbers, smooth(values), color=GREEN, linewidth=1.8)
    axes.set_ylim(bottom=0)
    axes.set_title("Tool calls of a held-out session")


def _tokens(axes: Axes, steps: Sequence[AgentStep]) -> None:
    numbers = [step.number for step in steps]
    for label, color, values in (
        ("one row per turn", GREY, [step.tokens_by_turn for step in steps]),
        ("trees of sessions", GREEN, [step.tokens_forwarded for step in steps]),
    ):
        axes.plot(numbers, values, color=color, linewidth=1.8, label=label)
    axes.set_ylim(bottom=0)
    add_headroom(axes)
    axes.set_title("Tokens that the trainer forwards")
    axes.legend(loc="upper left", frameon=False)
