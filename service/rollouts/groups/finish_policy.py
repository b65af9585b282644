"""Early-finish policies: rules for when a group ends before all samples, and which it returns.

Samples that run concurrently finish in order of length, so selecting the first to finish biases the
selection towards short samples. docs/concepts/group.md has measurements.
"""

import random
from collections.abc import Sequence
from typing import Literal

FinishPolicyName = Literal["first", "random", "balanced_length"]


class FinishPolicy:
    """Early-finish policy of one group: selects `num_required` of its `n` samples.

    Only samples that finish by themselves count, not aborted ones. `on_sample_end` must be called
    exactly once for each of them.
    """

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
            case "random":
                return all(index in self._lengths for index in self._random_indices)
            case "balanced_length":
                return len(self._lengths) > self._length_ranks[-1]

    def on_sample_end(self, index: int, length: int) -> bool:
        """Record a finished sample; returns True if it is the one that meets the policy."""
        before = self.is_met
        self._lengths[index] = length
        return self.is_met and not before

    @property
    def selected(self) -> list[int] | None:
        """Indices of the samples that the finish policy selects, ascending; None until it is met.

        first: the samples that finished first. random: samples drawn before any of them started,
        independent of their lengths. balanced_length: samples at evenly spaced ranks of the order
        by length, including the shortest; longer samples than the last selected rank are not waited
        for.
        """
        if not self.is_met:
            return None
        return sorted(self._selected())

    def _selected(self) -> Sequence[int]:
        match self._policy:
            case "first":
                return list(self._lengths)[: self._num_required]
            case "random":
                return self._random_indices
            case "balanced_length":
                by_length = sorted(self._lengths, key=lambda index: self._lengths[index])
                return [by_length[place] for place in self._length_ranks]
