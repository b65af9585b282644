"""Token budget of a tree and its distribution over paths.

A running path reserves its maximum length, so the bound is never exceeded. Unused tokens return to
the budget for the paths that start next. Every future leaf gets an equal part of the remainder.
"""


class Budget:
    """Token budget of one tree; every `reserve` must be followed by one `release`."""

    def __init__(self, tokens: int) -> None:
        self._total = tokens
        self._remaining = tokens
        self._reserved = 0
        self._used = 0
        self.num_future_leaves = 0

    @property
    def remaining(self) -> int:
        return self._remaining

    def part(self, leaves: int, num_starting_leaves: int) -> int:
        """Tokens for `leaves` of the `num_starting_leaves` leaves that start now.

        The remaining tokens are divided equally among these and the future leaves.
        """
        return self._remaining * leaves // (num_starting_leaves + self.num_future_leaves)

    def reserve(self, tokens: int) -> None:
        assert 0 < tokens <= self._remaining, "a tree's tokens are used up"
        self._remaining -= tokens
        self._reserved += tokens

    def release(self, reserved: int, *, used: int) -> None:
        assert 0 <= used <= reserved, "a path used more tokens than it had reserved"
        self._reserved -= reserved
        self._remaining += reserved - used
        self._used += used

    def check(self) -> None:
        assert self._remaining + self._reserved + self._used == self._total, (
            "the token budget does not add up"
        )
        assert self._remaining >= 0 and self._reserved >= 0
