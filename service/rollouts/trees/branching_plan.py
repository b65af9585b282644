"""Branching plan of a rollout tree: the token positions of its forks, and their children.

Lengths are those of whole paths, prompt included, unless named response lengths.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from coppice.wire.branching import Branching, Entropy
from service.errors import InvalidRequest

UNUSED_FIELDS = {
    "interval": ("positions", "lease_seconds"),
    "positions": ("interval", "first_split", "lease_seconds"),
    "entropy": ("interval", "positions", "lease_seconds"),
    "external": ("interval", "positions", "factor", "min_gap", "first_split", "on_early_stop"),
}
"""Request fields that have no effect in a mode; rejected, as callers would expect an effect."""


def next_cut(length: int, block_size: int) -> int:
    """Smallest path length >= `length` at which a fork prefills only one token.

    Full KV blocks of a path are cached, and its last token is always recomputed, so the cheapest
    path to fork is one token longer than a multiple of the block size.
    """
    return length + (1 - length) % block_size


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Geometry of one rollout tree, from the branching parameters of the request.

    `prompt_length` and `max_length`, the maximum length of a path, are in tokens.
    """

    branching: Branching
    prompt_length: int
    max_length: int
    block_size: int

    def factor(self, depth: int) -> int:
        """Number of children into which a path splits at this depth (number of earlier splits)."""
        factor = self.branching.factor
        return factor if isinstance(factor, int) else factor[min(depth, len(factor) - 1)]

    @cached_property
    def max_depth(self) -> int:
        """Maximum number of splits between the prompt and a leaf of the tree."""
        if self.branching.mode == "positions":
            return min(self.branching.max_depth, len(self.branching.positions))
        return self.branching.max_depth

    @property
    def splits_at_prompt(self) -> bool:
        if self.branching.mode == "positions":
            return self.branching.positions[:1] == [0]
        return self.branching.first_split == 0

    def cut(self, start: int, depth: int) -> int | None:
        """Length at which to cut a path that starts at length `start`; None if it is never cut.

        `depth` is the number of splits before the path. The cut is at least `min_gap` tokens (in
        mode interval at most `interval`) and one token after the previous one, and below
        `max_length`.
        """
        if depth >= self.max_depth:
            return None
        position = self._response_position(depth)
        gap = self._min_gap if start > self.prompt_length else 0
        length = next_cut(
            max(self.prompt_length + position, start + max(gap, 1)), block_size=self.block_size
        )
        return length if length < self.max_length else None

    def capacity(self, depth: int) -> int:
        """Maximum number of leaves below a path that starts after `depth` splits."""
        return self._capacities[min(depth, self.max_depth)]

    @cached_property
    def _capacities(self) -> list[int]:
        """Capacities by depth, up to the maximum depth, at which a path has one leaf."""
        leaves = [1]
        for depth in range(self.max_depth - 1, -1, -1):
            leaves.append(min(self.branching.max_leaves, self._leaves_above(leaves[-1], depth)))
        return leaves[::-1]

    def _leaves_above(self, leaves: int, depth: int) -> int:
        """Number of leaves below a path at `depth` if each of its children has `leaves` leaves."""
        factor = self.factor(depth)
        if self.branching.mode == "entropy" and not (depth == 0 and self.splits_at_prompt):
            cuts = min(self.entropy.top_n, self.max_depth - depth)
            return 1 + cuts * (factor - 1) * leaves
        return factor * leaves

    @property
    def _min_gap(self) -> int:
        """Minimum number of tokens between two cuts: no more than those that the mode asks for."""
        gap, interval = self.branching.min_gap, self.branching.interval
        return min(gap, interval) if self.branching.mode == "interval" else gap

    def _response_position(self, depth: int) -> int:
        """Response length in tokens at which the request places the split at this depth."""
        branching = self.branching
        if branching.mode == "positions":
            return branching.positions[depth]
        return branching.first_split + depth * branching.interval

    @property
    def entropy(self) -> Entropy:
        return self.branching.entropy or Entropy()

    @property
    def needs_entropy(self) -> bool:
        return self.branching.mode == "entropy" or self.branching.entropy is not None


def check(branching: Branching, *, n: int) -> None:
    """Validate a branching request across its fields."""
    if n != 1:
        raise InvalidRequest("branching needs n = 1: the leaves of the tree are its samples")
    for name in UNUSED_FIELDS[branching.mode]:
        if getattr(branching, name) != Branching.model_fields[name].default:
            raise InvalidRequest(f"{name} has no effect in mode {branching.mode}: leave it out")
    positions = branching.positions
    if branching.mode == "positions" and not positions:
        raise InvalidRequest("mode positions needs positions")
    if any(later <= earlier for earlier, later in zip(positions, positions[1:], strict=False)):
        raise InvalidRequest("positions must be strictly ascending")


def split(share: int, parts: int) -> list[int]:
    """Distribute `share` leaves evenly over at most `parts` children, at least one leaf each."""
    parts = min(share, parts)
    return [math.ceil((share - i) / parts) for i in range(parts)]


def select_entropy_cuts(
    plan: Plan, entropy: Sequence[float], *, start: int, max_cuts: int
) -> list[int]:
    """Select the path lengths at which to cut a path, close to its tokens of highest entropy.

    `entropy` is that of the path's tokens, the first of which follows the length `start`. Returns
    at most `max_cuts` lengths in ascending order. A token's entropy is that of the distribution it
    was sampled from, so the fork belongs before that token. The cut moves to the next position at
    which a child prefills a single token, and that position's score is the highest entropy of the
    tokens that move to it.
    """
    scores = _scores(plan, entropy, start)
    gap = max(plan.branching.min_gap, 1)
    chosen: list[int] = []
    for position in sorted(scores, key=lambda position: (-scores[position], position)):
        if len(chosen) < max_cuts and all(abs(position - other) >= gap for other in chosen):
            chosen.append(position)
    return sorted(chosen)


def _scores(plan: Plan, entropy: Sequence[float], start: int) -> dict[int, float]:
    """Entropy score of every length at which a path may be cut.

    Cuts are allowed after `first_split` response tokens and, in a path that starts at a fork,
    `min_gap` tokens after that fork.
    """
    earliest = max(plan.prompt_length + plan.branching.first_split, start + 1)
    if start > plan.prompt_length:
        earliest = max(earliest, start + plan.branching.min_gap)
    scores: dict[int, float] = {}
    for length, value in enumerate(entropy, start):
        position = next_cut(length, plan.block_size)
        if length >= earliest and position < start + len(entropy):
            scores[position] = max(value, scores.get(position, 0.0))
    return scores


def distribute_leaves(leaves: int, capacities: Sequence[int], *, per_cut: int) -> list[list[int]]:
    """Distribute leaves over the new paths at each cut; returns the leaves per path, by cut.

    At most `per_cut` new paths start at a cut. A path at cut `i` can have at most `capacities[i]`
    leaves. Leaves are dealt one at a time, so that shares are even; leaves that exceed all
    capacities are left over.
    """
    shares = [[0] * per_cut for _ in capacities]
    seats = [(cut, seat) for seat in range(per_cut) for cut in range(len(capacities))]
    while leaves:
        free = [(cut, seat) for cut, seat in seats if shares[cut][seat] < capacities[cut]]
        for cut, seat in free[:leaves]:
            shares[cut][seat] += 1
        leaves -= min(leaves, len(free)) if free else leaves
    return [[share for share in at if share] for at in shares]
