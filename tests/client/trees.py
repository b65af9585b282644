"""Hand-written trees."""

from collections.abc import Mapping

import numpy as np

from coppice import Segment, Tree, VersionSpan
from coppice.rollout_results import tree_of

SHAPE: Mapping[str, tuple[str | None, int]] = {
    "a": (None, 4),
    "b": (None, 4),
    "a1": ("a", 6),
    "a2": ("a", 2),
    "b1": ("b", 3),
    "b2": ("b", 3),
    "b3": ("b", 5),
}
LEAVES = ("a1", "a2", "b1", "b2", "b3")


def segment(
    name: str, parent: str | None, depth: int, num_tokens: int, first: int = 0, version: str = "v0"
) -> Segment:
    place = np.arange(num_tokens)
    return Segment(
        id=name,
        parent=parent,
        depth=depth,
        token_ids=(first + place) % 50,
        logprobs=(-0.1 - 0.05 * ((first + place) % 7)).astype(np.float32),
        entropy=(0.2 + 0.1 * (place % 5)).astype(np.float32),
        finish_reason="stop",
        num_leaves=0,
        versions=(VersionSpan(version=version, start=0, end=num_tokens),),
    )


def tree(
    shape: Mapping[str, tuple[str | None, int]] = SHAPE, leaves: tuple[str, ...] = LEAVES
) -> Tree:
    depths: dict[str | None, int] = {None: 0}
    segments = []
    for i, (name, (parent, num_tokens)) in enumerate(shape.items()):
        depths[name] = depths[parent] + 1
        segments.append(segment(name, parent, depths[name], num_tokens, first=11 * i))
    return tree_of(segments, leaves)
