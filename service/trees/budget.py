"""How many more tokens a tree may sample, and how they are shared out.

A path holds what it may grow to while it grows, so the bound is never passed; what it did not use
goes to whoever starts next. Every leaf still to come gets an equal part of what is left.
"""


class Budget:
    """Owner of a tree's tokens: `take` is followed by one `give_back`."""

    def __init__(self, tokens: int) -> None:
        self._total = tokens
        self._left = tokens
        self._held = 0
        self._used = 0
        self.leaves_to_come = 0

    @property
    def left(self) -> int:
        return self._left

    def part(self, leaves: int, among: int) -> int:
        """What so many leaves get if so many start now, beside those that are still to come."""
        return self._left * leaves // (among + self.leaves_to_come)

    def take(self, tokens: int) -> None:
        assert 0 < tokens <= self._left, "a tree's tokens are used up"
        self._left -= tokens
        self._held += tokens

    def give_back(self, taken: int, *, used: int) -> None:
        assert 0 <= used <= taken, "a path outgrew what it held"
        self._held -= taken
        self._left += taken - used
        self._used += used

    def check(self) -> None:
        assert self._left + self._held + self._used == self._total, "tokens are lost"
        assert self._left >= 0 and self._held >= 0
