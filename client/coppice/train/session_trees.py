"""Merging of a group of agent sessions into training trees, with an advantage per segment."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coppice.rollout_results import Group, Segment, Tree
from coppice.session_results import SessionResult, hidden_ends
from coppice.train.logit_adjustments import NO_ADJUSTMENTS, LogitAdjustments
from coppice.train.training_group import TrainingTree
from coppice.wire.columns.weights_version_spans import VersionSpan

Baseline: TypeAlias = Literal["session", "leaf"]
"""Rewards whose mean and standard deviation normalize the rewards of a group of sessions.

session     one reward per session; the mean over its leaves if they have rewards of their own
leaf        one reward per leaf, so a session with many leaves counts more
"""
MIN_SHARED_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafId:
    """Id of a leaf in the result of its session."""

    session: str
    leaf: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionTree:
    """Trees of several sessions whose prompts begin with the same tokens, as one training tree.

    `versions` are the weights versions of the tokens of each segment. `leaves` are the ids of the
    tree's leaves. `leaf_advantages` has one value per leaf, for a loss over paths
    (`TrainingTree.by_leaf`). `advantages` has one value per segment, the mean over its leaves, for
    a loss that trains each sampled token once.

    A hidden end of a turn, such as a stop string that a later prompt leaves out, is no leaf. It has
    the advantage of its sample, and a loss over paths does not train it.
    """

    tree: TrainingTree
    versions: tuple[tuple[VersionSpan, ...], ...]
    leaves: tuple[LeafId, ...]
    leaf_advantages: Tensor
    advantages: Tensor


def session_trees(
    sessions: Sequence[SessionResult],
    *,
    baseline: Baseline = "session",
    by_deviation: bool = True,
    adjustments: LogitAdjustments = NO_ADJUSTMENTS,
) -> list[SessionTree]:
    """Training trees of a group of sessions, in which common context is forwarded once.

    Context that begins at the prompt is joined, up to the first token in which sessions differ.
    Samples remain apart, even if their tokens are equal. Prompts with fewer than 64 tokens in
    common, of which none is the beginning of the other, are different trees.

    A leaf without a reward of its own has that of its session. Rewards of hidden ends of turns are
    not used. ValueError is raised if a leaf has no reward, and if only some of the samples have
    supports.

    Args:
        sessions: results of sessions that the same task was given to.
        baseline: rewards that the rewards are compared with.
        by_deviation: division by the standard deviation, as in `advantages`.
        adjustments: parameters of the sessions' sampling that change logits.
    """
    if baseline not in get_args(Baseline):
        raise ValueError(f"unknown baseline: {baseline}")
    if len({session.id for session in sessions}) < len(sessions):
        raise ValueError("a session occurs twice")
    _check_supports(sessions)
    gains = _leaf_advantages(sessions, baseline, by_deviation=by_deviation)
    roots: list[_Node] = []
    for session in sessions:
        for group in session.groups:
            if group.tree is not None and group.tree.leaves:
                _join(roots, _node_of(session, group, group.tree))
    return [_session_tree(root, gains, adjustments) for root in roots]


def _check_supports(sessions: Sequence[SessionResult]) -> None:
    groups = (group for session in sessions for group in session.groups)
    segments = (segment for group in groups if group.tree for segment in group.tree.segments)
    if len({segment.support is None for segment in segments if segment.sampled}) > 1:
        raise ValueError("only some of the samples have supports")


def _leaf_advantages(
    sessions: Sequence[SessionResult], baseline: Baseline, *, by_deviation: bool
) -> dict[LeafId, float]:
    by_session = [dict(_leaf_rewards(session)) for session in sessions]
    rewards = {leaf: reward for found in by_session for leaf, reward in found.items()}
    known = list(rewards.values())
    if baseline == "session":
        pairs = zip(sessions, by_session, strict=True)
        known = [mean for session, found in pairs for mean in _session_reward(session, found)]
    normalize = _normalization(known, by_deviation=by_deviation)
    return {leaf: normalize(reward) for leaf, reward in rewards.items()}


def _normalization(known: Sequence[float], *, by_deviation: bool) -> Callable[[float], float]:
    """Difference of a reward to the mean of known ones, divided as in `advantages`."""
    mean = float(np.mean(known)) if known else 0.0
    has_scale = by_deviation and len(known) > 1
    scale = float(np.std(known, ddof=1)) + 1e-6 if has_scale else 1.0
    return lambda reward: (reward - mean) / scale


def _leaf_rewards(session: SessionResult) -> Iterator[tuple[LeafId, float]]:
    for group in session.groups:
        hidden = hidden_ends(session, group.tree) if group.tree else ()
        for leaf in group.tree.leaves if group.tree else ():
            if leaf in hidden:
                continue
            reward = (session.rewards or {}).get(leaf, session.reward)
            if reward is None:
                raise ValueError(f"leaf {leaf} of session {session.id} has no reward")
            yield LeafId(session=session.id, leaf=leaf), reward


def _session_reward(session: SessionResult, rewards: Mapping[LeafId, float]) -> list[float]:
    """The mean over the leaves of a session; its own reward if it has no leaves; or nothing."""
    if rewards:
        return [sum(rewards.values()) / len(rewards)]
    return [] if session.reward is None else [session.reward]


@dataclass(slots=True, kw_only=True, eq=False)
class _Node:
    """Context before the first sample of each path, or a segment of a session."""

    tokens: NDArray[np.int64]
    session: str
    segment: Segment | None = None
    is_hidden_end: bool = False
    children: list["_Node"]

    @property
    def is_context(self) -> bool:
        return self.segment is None or not self.segment.sampled


def _node_of(session: SessionResult, group: Group, tree: Tree) -> _Node:
    """The prompt of a session's group, with its tree."""
    assert group.prompt_token_ids is not None, "groups of sessions have their prompt"
    hidden = hidden_ends(session, tree)
    root = _Node(tokens=group.prompt_token_ids, session=session.id, children=[])
    by_id: dict[str | None, _Node] = {None: root}
    for segment in tree.segments:
        node = _Node(
            tokens=segment.token_ids,
            session=session.id,
            segment=segment,
            is_hidden_end=segment.id in hidden,
            children=[],
        )
        by_id[segment.id] = node
        by_id[segment.parent].children.append(node)
    return root


def _join(roots: list[_Node], new_root: _Node) -> None:
    """Adds a tree; context that it shares with an earlier tree becomes one node."""
    waiting = [(roots, new_root)]
    while waiting:
        siblings, new = waiting.pop()
        old = next(
            (each for each in siblings if _shares(each, new, is_root=siblings is roots)), None
        )
        if old is None:
            siblings.append(new)
            continue
        num_common = _num_common(old, new)
        _split(old, num_common)
        _split(new, num_common)
        waiting += [(old.children, child) for child in reversed(new.children)]


def _shares(old: _Node, new: _Node, *, is_root: bool) -> bool:
    if not (old.is_context and new.is_context):
        return False
    shorter = min(len(old.tokens), len(new.tokens))
    return _num_common(old, new) >= (min(shorter, MIN_SHARED_TOKENS) if is_root else 1)


def _num_common(one: _Node, other: _Node) -> int:
    """Length of the longest common prefix of two nodes' tokens."""
    length = min(len(one.tokens), len(other.tokens))
    differs = one.tokens[:length] != other.tokens[:length]
    return int(differs.argmax()) if differs.any() else length


def _split(node: _Node, num_tokens: int) -> None:
    """Moves the context after the first tokens, and all children, to a child of the node."""
    if num_tokens < len(node.tokens):
        rest = replace(node, tokens=node.tokens[num_tokens:], segment=None)
        node.tokens, node.children = node.tokens[:num_tokens], [rest]


def _session_tree(
    root: _Node, gains: Mapping[LeafId, float], adjustments: LogitAdjustments
) -> SessionTree:
    segments, leaves = _segments(root)
    tree = Tree(segments=tuple(segments), leaves=tuple(leaves), is_session=True)
    training = TrainingTree.of(root.tokens, _group(root, tree), adjustments=adjustments)
    leaf_gains = [gains[leaf] for leaf in leaves.values()]
    return SessionTree(
        tree=training,
        versions=tuple(segment.versions for segment in segments),
        leaves=tuple(leaves.values()),
        leaf_advantages=torch.tensor(leaf_gains),
        advantages=torch.tensor(_segment_means(training, leaf_gains)),
    )


def _segment_means(tree: TrainingTree, leaf_gains: Sequence[float]) -> list[float]:
    """The mean over the leaves below each segment; without leaves, that of the parent."""
    by_segment: defaultdict[int, list[float]] = defaultdict(list)
    for leaf, gain in zip(tree.leaves, leaf_gains, strict=True):
        for at in tree.path(leaf):
            by_segment[at].append(gain)
    means: list[float] = []
    for at, parent in enumerate(tree.parents):
        if at not in by_segment:
            assert parent is not None, "a hidden end has a parent, which has leaves"
            means.append(means[parent])
        else:
            means.append(sum(by_segment[at]) / len(by_segment[at]))
    return means


def _segments(root: _Node) -> tuple[list[Segment], dict[str, LeafId]]:
    """Segments below the prompt in depth-first order, with new ids, and the ids of the leaves."""
    segments: list[Segment] = []
    leaves: dict[str, LeafId] = {}
    waiting: list[tuple[_Node, str | None]] = [(child, None) for child in reversed(root.children)]
    while waiting:
        node, parent = waiting.pop()
        name = str(len(segments))
        segments.append(_segment(node, name, parent))
        if not node.children and node.segment is not None and not node.is_hidden_end:
            leaves[name] = LeafId(session=node.session, leaf=node.segment.id)
        waiting += [(child, name) for child in reversed(node.children)]
    return segments, leaves


def _segment(node: _Node, name: str, parent: str | None) -> Segment:
    if node.segment is not None and node.segment.sampled:
        return replace(node.segment, id=name, parent=parent)
    return Segment(
        id=name,
        parent=parent,
        depth=0,
        token_ids=node.tokens,
        logprobs=np.zeros(0, np.float32),
        entropy=None,
        finish_reason="cut",
        num_leaves=0,
        versions=(),
        sampled=False,
    )


def _group(root: _Node, tree: Tree) -> Group:
    return Group(
        id=root.session,
        index=0,
        outcome="done",
        exact=True,
        num_prompt_tokens=len(root.tokens),
        num_cached_tokens=0,
        samples=(),
        tree=tree,
    )
