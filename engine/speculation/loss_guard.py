"""Limit on the time lost to unhelpful drafts, per batch size class.

Whether drafts pay depends most on the number of running requests: verifying a token is almost free
for one row and costs its full share for 64. So gains, losses and pauses are recorded per size
class, the sizes of one bit length. A pause of drafts in large batches does not stop them in the
small batches that follow, which have the most to gain.
"""

MAX_LOSS = 4.0
"""Loss after which drafts are paused, in steps without drafts."""
ALLOWANCE = 0.02
"""Share of a step that is credited in every step with drafts.

Without it the sum of errors of measurement alone reaches MAX_LOSS sooner or later, and pauses
drafts that gain.
"""
MIN_REST_STEPS, MAX_REST_STEPS = 256, 16384


class LossGuard:
    """Balance of the time gained and lost by drafts in batches of one size class.

    The unit is the time of a step without drafts. The balance is limited to MAX_LOSS, so that
    earlier gains do not hide later losses.
    """

    def __init__(self) -> None:
        self._balance = 0.0
        self._rest = 0
        self._next_rest = MIN_REST_STEPS

    @property
    def is_resting(self) -> bool:
        """True while drafts are paused."""
        return self._rest > 0

    def rest(self) -> None:
        """Count one step of a pause."""
        self._rest -= 1

    def record(self, gain: float) -> None:
        """Add the time gained by drafts in a step; a loss is at most one step.

        The limit keeps a pause of the process from being charged to drafts. Drafts are paused if
        the balance falls below -MAX_LOSS, for twice as long each time.
        """
        self._balance = min(self._balance + max(gain, -MAX_LOSS / 4) + ALLOWANCE, MAX_LOSS)
        if self._balance < -MAX_LOSS:
            self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, MAX_REST_STEPS)
            self._balance = 0.0
        elif self._balance == MAX_LOSS:
            self._next_rest = MIN_REST_STEPS


class LossGuards:
    """Guards of all size classes."""

    def __init__(self) -> None:
        self._guards: dict[int, LossGuard] = {}

    def of(self, running: int) -> LossGuard:
        """Guard of the batches with about `running` rows."""
        return self._guards.setdefault(running.bit_length(), LossGuard())
