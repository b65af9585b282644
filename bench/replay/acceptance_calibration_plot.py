"""Plots predicted against observed acceptance of drafted tokens, to docs/performance/drafts.png.

python -m bench.replay.acceptance_calibration_plot
"""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.replay.drafters import StoreDrafter
from bench.replay.replay import Fixed, Replay
from bench.replay.traces import TRACES, Trace
from kernels.draft_index.store_protocol import Reliability, Scope

PICTURE = Path(__file__).parents[2] / "docs" / "performance" / "drafts.png"
NAMES = {
    Scope.SELF: "the request itself",
    Scope.SIBLINGS: "its siblings",
    Scope.PROMPT: "earlier responses to its prompt",
    Scope.ALL: "responses to other prompts",
}
COLOURS = ("#b5793a", "#2f7d4f", "#3f6fa8", "#8a8f98")
FEWEST = 50


def learnt(trace: Trace) -> Reliability:
    replayer = Replay(drafter=(drafter := StoreDrafter()), controller=Fixed(16))
    for number, groups in enumerate(trace.epochs):
        replayer.epoch(number, groups)
        drafter.age()
    return drafter.store.reliability()


def draw(axes: Axes, found: Reliability, title: str) -> None:
    axes.plot([0, 1], [0, 1], color="#cfd4da", linewidth=1)
    for scope, colour in zip(Scope, COLOURS, strict=True):
        enough = found.tried[scope] >= FEWEST
        if not enough.any():
            continue
        tried = found.tried[scope][enough]
        axes.scatter(
            found.predicted[scope][enough] / tried,
            found.accepted[scope][enough] / tried,
            s=6 + 6 * np.log10(tried / FEWEST) ** 2,
            color=colour,
            label=f"{NAMES[scope]} ({found.tried[scope].sum():,})",
        )
    axes.set_title(f"{title}; {found.error():.3f} apart")
    axes.set_xlabel("probability that a drafted token came with")
    axes.set_ylabel("share that came true")
    axes.legend(frameon=False, fontsize=7, loc="upper left")


def main() -> None:
    style: dict[Any, Any] = {
        "font.size": 8,
        "axes.titlesize": 9,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(9, 3.8), dpi=110, layout="constrained")
        paths = sorted(TRACES.glob("*.npz"), reverse=True)
        for axes, path in zip(figure.subplots(1, len(paths)), paths, strict=True):
            trace = Trace.load(path)
            draw(axes, learnt(trace), f"{trace.model}, temperature {trace.temperature}")
        figure.savefig(PICTURE)


if __name__ == "__main__":
    main()
