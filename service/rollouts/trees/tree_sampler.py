"""Sampler of a group whose samples form a tree, forked as its branching plan says.

In the modes that cut by position, paths stop at the cut. In mode entropy, paths run to their end
and are cut afterwards at their most uncertain tokens.
"""

from collections.abc import Sequence

from coppice.wire.columns.token_columns import TokenLists
from coppice.wire.rollouts import GroupAnswer, SegmentFinish
from engine.protocol.generation import Generation
from service.rollouts.groups.group import EndReason, Group, OnPart
from service.rollouts.groups.options import GroupOptions
from service.rollouts.trees.branching_plan import Plan, split
from service.rollouts.trees.running_path import Path, entropy_forks, path_bounds
from service.rollouts.trees.segment import Segment
from service.rollouts.trees.tree_growth import TreePaths

Fork = tuple[Segment, list[int]]
"""Parent segment of new paths, and the number of leaves of each."""


class TreeSampler:
    """Sampler of a tree that its plan describes; `n` of the group is the maximum of its leaves."""

    is_grown_by_caller = False

    def __init__(self, plan: Plan, options: GroupOptions) -> None:
        self._plan = plan
        self.paths = TreePaths(plan, options, self._grow)

    async def run(self, group: Group, engine: Generation, done: OnPart) -> GroupAnswer:
        """Grow the tree and return the answer."""
        plan, paths = self._plan, self.paths
        share = min(group.options.n, plan.capacity(0), paths.budget.remaining)
        shares = split(share, plan.factor(0)) if plan.splits_at_prompt else [share]
        async with paths.sampling(group, engine, done):
            await paths.start(self._fork([(paths.root, shares)]))
        return await paths.answer()

    def on_end(self, end_reason: EndReason) -> None:
        pass

    def _fork(self, forks: Sequence[Fork]) -> list[Path]:
        """Create paths that start together, as far as the tree's token budget allows."""
        num_leaves = sum(sum(shares) for _, shares in forks)
        wanted = [
            (parent, path_bounds(self._plan, self.paths.budget, parent, share, num_leaves))
            for parent, shares in forks
            for share in shares
        ]
        return [self.paths.create(parent, bounds) for parent, bounds in wanted if bounds.limit > 0]

    def _grow(
        self, path: Path, tokens: TokenLists, finish: SegmentFinish, stop_reason: int | str | None
    ) -> tuple[Segment, list[Path]]:
        """Add a path's tokens to the tree as segments, and fork paths from them."""
        if finish == "cut":
            return self._cut_at_position(path, tokens)
        add = self.paths.tree.add
        cuts, shares = entropy_forks(self._plan, path, tokens, finish)
        pieces = tokens.pieces([place - path.start for place in cuts])
        parent, forks = path.parent, list[Fork]()
        for i, piece in enumerate(pieces[:-1]):
            parent = add(parent, piece, "cut", name=f"{path.name}+{i}")
            forks.append((parent, shares[i]))
        last = add(parent, pieces[-1], finish, stop_reason, name=f"{path.name}+{len(cuts)}")
        unused = path.bounds.share - 1 - sum(map(sum, shares))
        if finish == "stop" and unused and self._plan.branching.on_early_stop == "redistribute":
            forks.append((path.parent, [unused]))
        return last, self._fork(forks)

    def _cut_at_position(self, path: Path, tokens: TokenLists) -> tuple[Segment, list[Path]]:
        shares = split(path.bounds.share, self._plan.factor(path.depth))
        affordable = self.paths.budget.part(min(shares), path.bounds.share) > 0
        finish: SegmentFinish = "cut" if affordable else "budget"
        segment = self.paths.tree.add(path.parent, tokens, finish, name=f"{path.name}+0")
        return segment, self._fork([(segment, shares)] if affordable else [])
