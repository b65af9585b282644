"""When a group has enough of its samples, and which of them it takes.

Samples that run side by side end in the order of their lengths, so whoever takes those that end
first takes short ones. docs/trees.md has figures.
"""

import random
from collections.abc import Sequence
from typing import Literal

FinishPolicy = Literal["first", "random_k", "balanced_length"]


class Enough:
    """One group's: `needed` of `n` samples that end by themselves. Told of each end once."""

    def __init__(self, policy: FinishPolicy, *, needed: int, n: int, seed: int | None) -> None:
        self._policy = policy
        self._needed = needed
        self._lengths: dict[int, int] = {}
        self._drawn = random.Random(seed).sample(range(n), needed)
        self._places = [i * n // needed for i in range(needed)]

    @property
    def reached(self) -> bool:
        match self._policy:
            case "first":
                return len(self._lengths) >= self._needed
            case "random_k":
                return all(index in self._lengths for index in self._drawn)
            case "balanced_length":
                return len(self._lengths) > self._places[-1]

    def ended(self, index: int, length: int) -> bool:
        """Whether it is enough now, and was not before."""
        before = self.reached
        self._lengths[index] = length
        return self.reached and not before

    @property
    def chosen(self) -> list[int] | None:
        """The samples' indices, once there are enough.

        first: those that ended first. random_k: those that were drawn before any had begun,
        whatever their lengths. balanced_length: evenly over the order of lengths, the shortest
        first; what is longer than the last of them is not waited for.
        """
        if not self.reached:
            return None
        return sorted(self._chosen())

    def _chosen(self) -> Sequence[int]:
        match self._policy:
            case "first":
                return list(self._lengths)[: self._needed]
            case "random_k":
                return self._drawn
            case "balanced_length":
                by_length = sorted(self._lengths, key=lambda index: self._lengths[index])
                return [by_length[place] for place in self._places]
