"""Which segments of a tree are trained on. What was sampled stays as it is.

BranchGRPO's two ways. A loss that leaves segments out has another expectation than one that does
not: rewards are to be fused on the whole tree first, and only then are segments left out.
"""

from collections import defaultdict
from collections.abc import Collection
from typing import Literal

from coppice.credit import Rewards
from coppice.tree import Tree

Width = Literal["best_half", "extremes"]


def pruned_by_depth(tree: Tree, depths: Collection[int]) -> frozenset[str]:
    """The ids that are left without the segments of these depths."""
    return frozenset(segment.id for segment in tree.segments if segment.depth not in depths)


def pruned_by_width(tree: Tree, rewards: Rewards, width: Width) -> frozenset[str]:
    """The ids that are left without some of the leaves; what leads to them stays.

    best_half: of the leaves of each fork the better half, rounded up. extremes: of all leaves the
    best and the worst.
    """
    if len(rewards) != len(tree.leaves):
        raise ValueError(f"{len(rewards)} rewards for {len(tree.leaves)} leaves")
    ranked = sorted(zip(tree.leaves, rewards, strict=True), key=lambda pair: -float(pair[1]))
    order = [leaf for leaf, _ in ranked]
    if width == "extremes":
        kept = {order[0], order[-1]} if order else set()
    elif width == "best_half":
        kept = _best_half_of_forks(tree, order)
    else:
        raise ValueError(f"no such width: {width}")
    inner = {segment.id for segment in tree.segments} - set(tree.leaves)
    return frozenset(inner | kept)


def _best_half_of_forks(tree: Tree, order: list[str]) -> set[str]:
    forks: defaultdict[str | None, list[str]] = defaultdict(list)
    for leaf in order:
        forks[tree.segment(leaf).parent].append(leaf)
    return {leaf for leaves in forks.values() for leaf in leaves[: (len(leaves) + 1) // 2]}
