"""Credit assignment for rollout trees: segment rewards, advantages, loss weights, and pruning.

Uses numpy only. All tokens of a segment have the same advantage. The weight of a segment in the
loss is independent of the advantage: see `segment_weights`.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from coppice.rollout_results import Segment, Tree

Fusion = Literal["mean", "probability"]
Scheme = Literal["depthwise", "parent_delta", "ancestor_mean", "leaf_grpo"]
Weighting = Literal["once", "per_leaf", "sqrt"]
Rewards = Sequence[float] | NDArray[np.floating[Any]]
_SMALLEST_DEVIATION = 1e-6
Width = Literal["best_half", "extremes"]


def segment_rewards(
    tree: Tree, rewards: Rewards, *, fusion: Fusion = "mean"
) -> dict[str | None, float]:
    """Reward of each segment of a rollout tree, averaged from the rewards of the leaves below it.

    Keys are segment ids; None is the prompt.

    mean: mean reward of the leaves below the segment.
    probability: mean of the children weighted by their probability: softmax over siblings of the
    sum of token logprobs.
    """
    fused: dict[str | None, float] = {}
    for leaf, reward in _by_leaf(tree, rewards).items():
        fused[leaf] = reward
    if fusion not in get_args(Fusion):
        raise ValueError(f"unknown fusion: {fusion}")
    for node in [*(segment.id for segment in reversed(tree.segments)), None]:
        if node not in fused:
            fused[node] = _fused(tree.children(node), fused, fusion)
    return fused


def segment_advantages(
    tree: Tree,
    rewards: Rewards,
    scheme: Scheme = "depthwise",
    *,
    fusion: Fusion = "mean",
    clip: float | None = None,
) -> dict[str, float]:
    """Advantage of each segment of a rollout tree, by segment id.

    `rewards` are the rewards of tree.leaves, in the same order.

    depthwise: the segment's fused reward, normalized over the segments of equal depth (BranchGRPO).
    parent_delta: the segment's fused reward minus its parent's.
    ancestor_mean: for a leaf, its reward minus the mean of each group of leaves that contains it,
    averaged over its ancestors (TreePO). For another segment, the mean over its leaves.
    leaf_grpo: for a leaf, its reward normalized over all leaves as in plain GRPO. For another
    segment, the mean over its leaves. With per-leaf weights this equals plain GRPO on the rows.

    `fusion` applies to depthwise and parent_delta only. `clip` bounds the absolute value.
    """
    if scheme not in _SCHEMES:
        raise ValueError(f"unknown scheme: {scheme}")
    found = _SCHEMES[scheme](tree, rewards, fusion)
    if clip is None:
        return found
    return {name: min(max(value, -clip), clip) for name, value in found.items()}


def segment_weights(tree: Tree, weighting: Weighting = "per_leaf") -> dict[str, float]:
    """Loss weight of each tree segment: 1, its number of leaves, or the square root thereof.

    `per_leaf` is equivalent to training on one row per leaf, but each token is forwarded once.
    """
    powers = {"once": 0.0, "per_leaf": 1.0, "sqrt": 0.5}
    if weighting not in powers:
        raise ValueError(f"unknown weighting: {weighting}")
    return {s.id: float(s.num_leaves ** powers[weighting]) for s in tree.segments}


def effective_leaves(tree: Tree) -> float:
    """Effective sample size of the leaves of a rollout tree, whose paths share tokens.

    n^2 divided by the sum of all pairwise correlations. The correlation of two paths is the
    fraction of their tokens that they share, which is exact if every token contributes equally to
    the reward. The value ranges from 1 (everything shared) to the number of leaves (nothing
    shared).
    """
    paths = [tree.path(leaf) for leaf in tree.leaves]
    lengths = [max(_num_tokens(path), 1) for path in paths]
    total = 0.0
    for one, length in zip(paths, lengths, strict=True):
        for other, other_length in zip(paths, lengths, strict=True):
            same = one is other
            common = length if same else _num_tokens(_shared_prefix(one, other))
            total += common / float(np.sqrt(length * other_length))
    return len(paths) ** 2 / total if total else 0.0


def _depthwise(tree: Tree, rewards: Rewards, fusion: Fusion) -> dict[str, float]:
    fused = segment_rewards(tree, rewards, fusion=fusion)
    found: dict[str, float] = {}
    for depth in {segment.depth for segment in tree.segments}:
        ids = [segment.id for segment in tree.segments if segment.depth == depth]
        values = np.array([fused[name] for name in ids])
        deviation = values.std()
        if len(ids) < 2 or deviation < _SMALLEST_DEVIATION:
            found |= dict.fromkeys(ids, 0.0)
        else:
            centred = (values - values.mean()) / (deviation + 1e-8)
            found |= dict(zip(ids, centred.tolist(), strict=True))
    return found


def _parent_delta(tree: Tree, rewards: Rewards, fusion: Fusion) -> dict[str, float]:
    fused = segment_rewards(tree, rewards, fusion=fusion)
    return {s.id: fused[s.id] - fused[s.parent] for s in tree.segments}


def _ancestor_mean(tree: Tree, rewards: Rewards, fusion: Fusion) -> dict[str, float]:
    """Advantages by TreePO: leaf reward minus the ancestors' mean rewards, averaged.

    The prompt always counts as an ancestor, other segments only if they have several leaves.
    """
    by_leaf = _by_leaf(tree, rewards)
    means = segment_rewards(tree, rewards, fusion="mean")
    values = {}
    for leaf, reward in by_leaf.items():
        above = [s.id for s in tree.path(leaf)[:-1] if s.num_leaves > 1]
        baselines = [means[None], *(means[name] for name in above)]
        values[leaf] = float(np.mean([reward - baseline for baseline in baselines]))
    return _means_of_leaves(tree, values)


def _leaf_grpo(tree: Tree, rewards: Rewards, fusion: Fusion) -> dict[str, float]:
    """Advantages by plain GRPO over all leaves of a tree, computed as in coppice.train.advantages.

    With at least two leaves they are divided by the sample standard deviation.
    """
    by_leaf = _by_leaf(tree, rewards)
    values = np.array(list(by_leaf.values()))
    centred = values - values.mean()
    if len(values) > 1:
        centred = centred / (values.std(ddof=1) + 1e-6)
    return _means_of_leaves(tree, dict(zip(by_leaf, centred.tolist(), strict=True)))


_SCHEMES: Mapping[str, Callable[[Tree, Rewards, Fusion], dict[str, float]]] = {
    "depthwise": _depthwise,
    "parent_delta": _parent_delta,
    "ancestor_mean": _ancestor_mean,
    "leaf_grpo": _leaf_grpo,
}


def _by_leaf(tree: Tree, rewards: Rewards) -> dict[str, float]:
    if len(rewards) != len(tree.leaves):
        raise ValueError(f"{len(rewards)} rewards for {len(tree.leaves)} leaves")
    return {leaf: float(reward) for leaf, reward in zip(tree.leaves, rewards, strict=True)}


def _fused(children: Sequence[Segment], fused: Mapping[str | None, float], fusion: Fusion) -> float:
    values = np.array([fused[child.id] for child in children])
    weights = np.array([float(child.num_leaves) for child in children])
    if fusion == "probability":
        logprobs = np.array([child.logprobs.sum(dtype=np.float64) for child in children])
        weights = np.exp(logprobs - logprobs.max())
    return float((values * weights).sum() / weights.sum())


def _means_of_leaves(tree: Tree, values: Mapping[str, float]) -> dict[str, float]:
    sums = dict.fromkeys((segment.id for segment in tree.segments), 0.0)
    for leaf, value in values.items():
        for segment in tree.path(leaf):
            sums[segment.id] += value
    return {segment.id: sums[segment.id] / segment.num_leaves for segment in tree.segments}


def _num_tokens(path: Sequence[Segment]) -> int:
    return sum(len(segment.token_ids) for segment in path)


def _shared_prefix(one: Sequence[Segment], other: Sequence[Segment]) -> Sequence[Segment]:
    pairs = zip(one, other, strict=False)
    return [mine for mine, theirs in pairs if mine.id == theirs.id]


def pruned_by_depth(tree: Tree, depths: Collection[int]) -> frozenset[str]:
    """Ids of the tree segments to train on: all but those at the given depths (BranchGRPO).

    The tree itself is not changed. A loss without some of the segments has another expectation than
    the full loss. Compute segment rewards on the whole tree first, then prune.
    """
    return frozenset(segment.id for segment in tree.segments if segment.depth not in depths)


def pruned_by_width(tree: Tree, rewards: Rewards, width: Width) -> frozenset[str]:
    """Ids of the tree segments to train on: all inner segments and a selection of the leaves.

    See pruned_by_depth for the effect on the loss.

    best_half: at each branch point keep the better half of its leaves, rounded up.
    extremes: keep only the best and the worst leaf of the tree.
    """
    by_leaf = _by_leaf(tree, rewards)
    order = sorted(by_leaf, key=lambda leaf: -by_leaf[leaf])
    if width == "extremes":
        kept = {order[0], order[-1]} if order else set()
    elif width == "best_half":
        kept = _best_half_of_forks(tree, order)
    else:
        raise ValueError(f"unknown width: {width}")
    inner = {segment.id for segment in tree.segments} - set(tree.leaves)
    return frozenset(inner | kept)


def _best_half_of_forks(tree: Tree, order: list[str]) -> set[str]:
    forks: defaultdict[str | None, list[str]] = defaultdict(list)
    for leaf in order:
        forks[tree.segment(leaf).parent].append(leaf)
    return {leaf for leaves in forks.values() for leaf in leaves[: (len(leaves) + 1) // 2]}
