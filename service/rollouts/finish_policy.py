"""When a group has enough of its samples, and which of them it takes.

Samples that run side by side end in the order of their lengths, so whoever takes those that end
first takes short ones. docs/trees.md has figures.
"""

import random
from collections.abc import Sequence
from typing import Literal

FinishPolicyName = Literal["first", "random_k", "balanced_length"]


class FinishPolicy:
    """One group's: `num_required` of `n` samples that end by themselves. Told of each end once."""

    def __init__(
        self, policy: FinishPolicyName, *, num_required: int, n: int, seed: int | None
    ) -> None:
        self._policy = policy
        self._num_required = num_required
        self._lengths: dict[int, int] = {}
        self._random_indices = random.Random(seed).sample(range(n), num_required)
        self._length_ranks = [i * n // num_required for i in range(num_required)]

    @property
    def is_met(self) -> bool:
        match self._policy:
            case "first":
                return len(self._lengths) >= self._num_required
            case "random_k":
                return all(index in self._lengths for index in self._random_indices)
            case "balanced_length":
                return len(self._lengths) > self._length_ranks[-1]

    def on_sample_end(self, index: int, length: int) -> bool:
        """Whether it is enough now, and was not before."""
        before = self.is_met
        self._lengths[index] = length
        return self.is_met and not before

    @property
    def chosen(self) -> list[int] | None:
        """The samples' indices, once there are enough.

        first: those that ended first. random_k: those that were drawn before any had begun,
        whatever their lengths. balanced_length: evenly over the order of lengths, the shortest
        first; what is longer than the last of them is not waited for.
        """
        if not self.is_met:
            return None
        return sorted(self._selected())

    def _selected(self) -> Sequence[int]:
        match self._policy:
            case "first":
                return list(self._lengths)[: self._num_required]
            case "random_k":
                return self._random_indices
            case "balanced_length":
                by_length = sorted(self._lengths, key=lambda index: self._lengths[index])
                return [by_length[place] for place in self._length_ranks]
