"""A new drafter against the one that serves: over windows that alternate, who is accepted more?

Each serves every other window, so that both meet the same traffic. A window is over when enough of
the drafts that it made were verified. What is compared is how often the first token of a draft is
accepted, which does not depend on how long drafts are. After a few windows of each the new one
stays if it did no worse.

Pure: what was verified comes in, who is to serve goes out.
"""

from typing import Final, Literal

WINDOWS_PER_SIDE: Final = 3
"""Of each."""
WINDOW_DRAFTS: Final = 200

Side = Literal["old", "new"]
Verdict = Literal["promoted", "rolled_back"]


class AbTest:
    """The new one begins. `update` returns who serves next, or the verdict."""

    def __init__(self) -> None:
        self.side: Side = "new"
        self._windows_left = 2 * WINDOWS_PER_SIDE
        self._drafted = {"old": 0, "new": 0}
        self._accepted = {"old": 0, "new": 0}
        self._window_drafts = 0

    def update(self, num_drafted: int, num_accepted: int) -> Side | Verdict:
        """First tokens of drafts that were verified since the last call, while `side` served."""
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
