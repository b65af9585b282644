"""What each segment of a tree deserves, from its leaves' rewards. Pure numpy.

A segment's advantage is one number for all of its tokens. How often a segment counts in a loss is
another question, with three answers: see `segment_weights`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from coppice.tree import Segment, Tree

Fusion = Literal["mean", "probability"]
Scheme = Literal["depthwise", "parent_delta", "ancestor_mean", "leaf_grpo"]
Weighting = Literal["once", "per_leaf", "sqrt"]
Rewards = Sequence[float] | NDArray[np.floating[Any]]

_SMALLEST_DEVIATION = 1e-6


def segment_rewards(
    tree: Tree, rewards: Rewards, *, fusion: Fusion = "mean"
) -> dict[str | None, float]:
    """From the leaves upwards, BranchGRPO's reward fusion; None is the prompt.

    mean: of the leaves below. probability: of the children, by the probability of their tokens,
    softmax over siblings.
    """
    fused: dict[str | None, float] = {}
    for leaf, reward in _by_leaf(tree, rewards).items():
        fused[leaf] = reward
    if fusion not in get_args(Fusion):
        raise ValueError(f"no such fusion: {fusion}")
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
    """By segment id. rewards are of tree.leaves, in their order.

    depthwise: the segment's fused reward, normalised among those of its depth (BranchGRPO).
    parent_delta: its fused reward less its parent's.
    ancestor_mean: a leaf's reward less the mean of each group of leaves that it is in, averaged
    over its ancestors (TreePO); a segment has the mean of its leaves.
    leaf_grpo: a leaf's reward as plain GRPO normalises it over all leaves; a segment has the mean
    of its leaves. Weighted per leaf, this is plain GRPO on the rows.

    Only the first two know of `fusion`. `clip` bounds what comes out.
    """
    if scheme not in _SCHEMES:
        raise ValueError(f"no such scheme: {scheme}")
    found = _SCHEMES[scheme](tree, rewards, fusion)
    if clip is None:
        return found
    return {name: min(max(value, -clip), clip) for name, value in found.items()}


def segment_weights(tree: Tree, weighting: Weighting = "per_leaf") -> dict[str, float]:
    """How much a segment's loss counts: once, as often as it has leaves, or by their square root.

    Per leaf is what training on the rows amounts to, each token forwarded once.
    """
    powers = {"once": 0.0, "per_leaf": 1.0, "sqrt": 0.5}
    if weighting not in powers:
        raise ValueError(f"no such weighting: {weighting}")
    return {s.id: float(s.num_leaves ** powers[weighting]) for s in tree.segments}


def effective_leaves(tree: Tree) -> float:
    """How many independent rows the leaves are worth, by the tokens that their paths share.

    n^2 over the sum of all pairs' correlations, where the correlation of two paths is the share of
    their tokens that are common: what it would be of rewards that every token adds to alike. From
    1, if all is shared, to the number of leaves, if nothing is.
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
    """A fork that only one leaf came of says nothing; the prompt always counts."""
    by_leaf = _by_leaf(tree, rewards)
    means = segment_rewards(tree, rewards, fusion="mean")
    values = {}
    for leaf, reward in by_leaf.items():
        above = [s.id for s in tree.path(leaf)[:-1] if s.num_leaves > 1]
        baselines = [means[None], *(means[name] for name in above)]
        values[leaf] = float(np.mean([reward - baseline for baseline in baselines]))
    return _means_of_leaves(tree, values)


def _leaf_grpo(tree: Tree, rewards: Rewards, fusion: Fusion) -> dict[str, float]:
    """As coppice.train.advantages: by the deviation of a sample, where there are two leaves."""
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
