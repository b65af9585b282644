"""Training data of a group of sessions: their trees, joined where they have the same prompt."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coppice import SessionResult
from coppice.train import TrainingTree, advantages


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedTree:
    """Trees of several sessions as one, and the advantage of each of its segments.

    The prompt, and each segment, is forwarded once.
    """

    tree: TrainingTree
    advantages: Tensor


def joined_trees(sessions: Sequence[SessionResult]) -> list[JoinedTree]:
    """One tree per prompt of a group of sessions; a segment has the advantage of its session."""
    gains = advantages(torch.tensor([session.reward or 0.0 for session in sessions]))
    by_prompt: dict[tuple[int, ...], list[tuple[TrainingTree, Tensor]]] = {}
    for session, gain in zip(sessions, gains, strict=True):
        for group in session.groups:
            tree = TrainingTree.of(group.prompt_token_ids, group)
            by_prompt.setdefault(tuple(tree.prompt.tolist()), []).append((tree, gain))
    return [_joined(trees) for trees in by_prompt.values()]


def _joined(trees: Sequence[tuple[TrainingTree, Tensor]]) -> JoinedTree:
    parents: list[int | None] = []
    leaves: list[int] = []
    for tree, _ in trees:
        first = len(parents)
        parents += [None if parent is None else first + parent for parent in tree.parents]
        leaves += [first + leaf for leaf in tree.leaves]
    tree = TrainingTree(
        prompt=trees[0][0].prompt,
        responses=tuple(each for tree, _ in trees for each in tree.responses),
        logprobs=tuple(each for tree, _ in trees for each in tree.logprobs or ()),
        loss_masks=tuple(mask for tree, _ in trees for mask in _loss_masks(tree)),
        parents=tuple(parents),
        leaves=tuple(leaves),
    )
    gains = torch.cat([gain.expand(len(tree.responses)) for tree, gain in trees])
    return JoinedTree(tree=tree, advantages=gains)


def _loss_masks(tree: TrainingTree) -> Sequence[Tensor]:
    if tree.loss_masks is not None:
        return tree.loss_masks
    return [torch.ones(length, dtype=torch.bool) for length in tree.lengths]
