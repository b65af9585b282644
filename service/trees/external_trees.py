"""Every tree that somebody outside grows, found among the rollouts that run."""

from collections.abc import Iterator

from service.http.errors import TreeClosed
from service.rollouts.manager import Rollouts
from service.trees.branch_result import Growing
from service.trees.external_tree import OpenTree


class OpenTrees:
    """Holds nothing: a tree is its rollout's."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts

    async def find(self, rollout_id: str, index: int, *, owner: str) -> OpenTree:
        """Behind the gate, as everything that starts samples."""
        await self._rollouts.gate_open()
        groups = self._rollouts.get(rollout_id, owner=owner).groups
        group = groups[index] if index < len(groups) else None
        if not isinstance(group, OpenTree):
            raise TreeClosed()
        return group

    def left(self, tree: OpenTree, growing: Growing) -> None:
        """Whoever waited for it has gone."""
        if not growing.done:
            self._rollouts.in_background(tree.leave(growing))

    def close(self) -> None:
        """Nobody may grow them any more: they end as soon as nothing grows."""
        for tree in self._running():
            tree.close()

    def _running(self) -> Iterator[OpenTree]:
        for rollout in self._rollouts.in_flight():
            for group in rollout.groups:
                if isinstance(group, OpenTree):
                    yield group
