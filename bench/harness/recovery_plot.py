"""Plot of a drafter's acceptance around a policy update: docs/performance/drafter.png."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

PICTURE = Path(__file__).parents[2] / "docs" / "performance" / "drafter.png"
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
ARMS = (("with", "trained in the background", "#2f7d4f"), ("without", "not trained", "#8a8f98"))
RECOVERED_SHARE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Acceptance of a drafter in a time window before or after the policy update.

    `seconds` counts from the update; `acceptance` is the share of `drafts` whose first token is
    accepted.
    """

    seconds: float
    acceptance: float
    drafts: int
    drafter: str

    @property
    def is_after(self) -> bool:
        """True if the window is after the policy update.

        A window's time is its end, so the last window before it ends at zero.
        """
        return self.seconds > 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    points: list[Point]

    @property
    def before(self) -> float:
        return _mean([p for p in self.points if not p.is_after])

    @property
    def after(self) -> float:
        """Acceptance in the two windows after the update, before a new drafter can be tested."""
        return _mean([p for p in self.points if p.is_after][:2])

    @property
    def last(self) -> float:
        return _mean(self.points[-3:])

    @property
    def recovered_seconds(self) -> float | None:
        """Seconds from the policy update until acceptance has recovered, or None if it has not.

        In two consecutive windows it must be at least RECOVERED_SHARE of its old value.
        """
        wanted = RECOVERED_SHARE * self.before
        pairs = zip(self.points, self.points[1:], strict=False)
        return next(
            (
                one.seconds
                for one, two in pairs
                if one.is_after and min(one.acceptance, two.acceptance) >= wanted
            ),
            None,
        )


def _mean(points: list[Point]) -> float:
    """Mean acceptance over time windows, weighted by their numbers of drafts."""
    return sum(p.acceptance * p.drafts for p in points) / max(sum(p.drafts for p in points), 1)


def picture(raw: dict[str, Any]) -> Path:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 3.4), layout="constrained")
        axes = figure.subplots()
        goal = RECOVERED_SHARE * Curve(points=[Point(**point) for point in raw["with"]]).before
        axes.axhline(goal, color="#cfd4da", linewidth=1)
        axes.axvline(0, color="#b5793a", linewidth=1, linestyle=":")
        axes.annotate("new weights", (0, 0.02), xytext=(4, 0), textcoords="offset points")
        for arm, label, colour in ARMS:
            points = raw[arm]
            seconds = [point["seconds"] for point in points]
            axes.plot(seconds, [p["acceptance"] for p in points], color=colour, label=label)
            new = [
                (now["seconds"], now["acceptance"])
                for last, now in zip(points, points[1:], strict=False)
                if now["drafter"] != last["drafter"]
            ]
            if new:
                at, shares = [second for second, _ in new], [share for _, share in new]
                axes.scatter(at, shares, color=colour, s=12, label="a new drafter")
        axes.set(xlabel="seconds", ylabel="first drafted tokens accepted", ylim=(0, 1))
        axes.legend(frameon=False, loc="upper right")
        figure.savefig(PICTURE, dpi=120)
    return PICTURE
