"""Selection of the segments of a tree to train on; the tree itself is not changed.

These are the two pruning methods of BranchGRPO. A loss without some of the segments has another
expectation than the full loss. Compute segment rewards on the whole tree first, then prune.
"""

from collections import defaultdict
from collections.abc import Collection
from typing import Literal

from coppice.credit import Rewards
from coppice.tree import Tree

Width = Literal["best_half", "extremes"]


def pruned_by_depth(tree: Tree, depths: Collection[int]) -> frozenset[str]:
    """Ids of all segments except those at the given depths."""
    return frozenset(segment.id for segment in tree.segments if segment.depth not in depths)


def pruned_by_width(tree: Tree, rewards: Rewards, width: Width) -> frozenset[str]:
    """Ids of the segments that remain after some leaves are removed; inner segments all remain.

    best_half: at each fork keep the better half of its leaves, rounded up.
    extremes: keep only the best and the worst leaf of the tree.
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
