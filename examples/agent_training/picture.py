"""Plot of a training run: reward, tool calls, and tokens that the trainer forwards."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from examples.agent_training.loop import AgentStep
from examples.grpo.history import Gain
from examples.grpo.picture import GREEN, GREY, add_headroom, draw_plots, plot_rewards, smooth


def draw(steps: Sequence[AgentStep], gain: Gain, path: Path) -> None:
    draw_plots(
        [
            lambda axes: plot_rewards(axes, steps, gain),
            lambda axes: _tool_calls(axes, steps),
            lambda axes: _tokens(axes, steps),
        ],
        len(steps),
        path,
    )


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
