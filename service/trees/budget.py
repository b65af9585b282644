"""How many more tokens a tree may sample, and how they are shared out.

A path holds what it may grow to while it grows, so the bound is never passed; what it did not use
goes to whoever starts next. Every leaf still to come gets an equal part of what is left.
"""


class Budget:
    """Owner of a tree's tokens: `reserve` is followed by one `release`."""

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
        """What so many leaves get if so many start now, beside those that are still to come."""
        return self._remaining * leaves // (num_starting_leaves + self.num_future_leaves)

    def reserve(self, tokens: int) -> None:
        assert 0 < tokens <= self._remaining, "a tree's tokens are used up"
        self._remaining -= tokens
        self._reserved += tokens

    def release(self, reserved: int, *, used: int) -> None:
        assert 0 <= used <= reserved, "a path outgrew what it held"
        self._reserved -= reserved
        self._remaining += reserved - used
        self._used += used

    def check(self) -> None:
        assert self._remaining + self._reserved + self._used == self._total, "tokens are lost"
        assert self._remaining >= 0 and self._reserved >= 0
