"""Selection of cut positions on a finished path by the entropy of its tokens.

A token's entropy is that of the distribution it was sampled from, so the fork belongs before that
token. The cut moves to the next position at which a child prefills a single token (`next_cut`),
and that position's score is the highest entropy of the tokens that move to it.
"""

from collections.abc import Sequence

from service.trees.plan import Plan, next_cut


def select_entropy_cuts(
    plan: Plan, entropy: Sequence[float], *, start: int, max_cuts: int
) -> list[int]:
    """At most `max_cuts` ascending path lengths at which the tokens from `start` on are cut."""
    scores = _scores(plan, entropy, start)
    gap = max(plan.branching.min_gap, 1)
    chosen: list[int] = []
    for position in sorted(scores, key=lambda position: (-scores[position], position)):
        if len(chosen) < max_cuts and all(abs(position - other) >= gap for other in chosen):
            chosen.append(position)
    return sorted(chosen)


def _scores(plan: Plan, entropy: Sequence[float], start: int) -> dict[int, float]:
    """Scores of the allowed positions: after the first split, and `min_gap` after the fork."""
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
    """Shares of leaves of the paths at each cut.

    A path at cut `i` can have at most `capacities[i]` leaves. Leaves are dealt one at a time, so
    that shares are even; leaves that exceed all capacities are left over.
    """
    shares = [[0] * per_cut for _ in capacities]
    seats = [(cut, seat) for seat in range(per_cut) for cut in range(len(capacities))]
    while leaves:
        free = [(cut, seat) for cut, seat in seats if shares[cut][seat] < capacities[cut]]
        for cut, seat in free[:leaves]:
            shares[cut][seat] += 1
        leaves -= min(leaves, len(free)) if free else leaves
    return [[share for share in at if share] for at in shares]
