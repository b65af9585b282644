"""A/B test of a new drafter against the one in use, over alternating windows of traffic.

The two serve alternate windows, so both see the same traffic. A window ends when WINDOW_DRAFTS
drafts made in it were verified. The test compares the acceptance rate of first tokens, which does
not depend on draft length. After WINDOWS_PER_SIDE windows of each, the new drafter is promoted if
it did no worse.

Pure: it receives counts and returns which drafter serves next.
"""

from typing import Final, Literal

WINDOWS_PER_SIDE: Final = 3
"""Windows of each drafter."""
WINDOW_DRAFTS: Final = 200

Side = Literal["old", "new"]
Verdict = Literal["promoted", "rolled_back"]


class AbTest:
    """State of one A/B test; the new drafter serves first."""

    def __init__(self) -> None:
        self.side: Side = "new"
        self._windows_left = 2 * WINDOWS_PER_SIDE
        self._drafted = {"old": 0, "new": 0}
        self._accepted = {"old": 0, "new": 0}
        self._window_drafts = 0

    def update(self, num_drafted: int, num_accepted: int) -> Side | Verdict:
        """Add first-token counts since the last call, and return the next side or the verdict."""
        self._drafted[self.side] += num_drafted
        self._accepted[self.side] += num_accepted
        self._window_drafts += num_drafted
        if self._window_drafts < WINDOW_DRAFTS:
            return self.side
        self._window_drafts = 0
        self._windows_left -= 1
        if self._windows_left == 0:
            return (
                "promoted"
                if self.acceptance_rate("new") >= self.acceptance_rate("old")
                else "rolled_back"
            )
        self.side = "old" if self.side == "new" else "new"
        return self.side

    def acceptance_rate(self, side: Side) -> float:
        return self._accepted[side] / max(self._drafted[side], 1)
