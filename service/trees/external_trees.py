"""Every tree that somebody outside grows, found among the rollouts that run."""

from collections.abc import Iterator

from service.http.errors import TreeClosed
from service.rollouts.manager import RolloutManager
from service.trees.branch_result import BranchResult
from service.trees.external_tree import ExternalTree


class ExternalTrees:
    """Holds nothing: a tree is its rollout's."""

    def __init__(self, rollouts: RolloutManager) -> None:
        self._rollouts = rollouts

    async def find(self, rollout_id: str, index: int, *, owner: str) -> ExternalTree:
        """Behind the gate, as everything that starts samples."""
        await self._rollouts.wait_gate_open()
        groups = self._rollouts.get(rollout_id, owner=owner).groups
        group = groups[index] if index < len(groups) else None
        if not isinstance(group, ExternalTree):
            raise TreeClosed()
        return group

    def on_disconnect(self, tree: ExternalTree, branch_result: BranchResult) -> None:
        """Whoever waited for it has gone."""
        if not branch_result.done:
            self._rollouts.in_background(tree.cancel_branch(branch_result))

    def close(self) -> None:
        """Nobody may grow them any more: they end as soon as nothing grows."""
        for tree in self._running():
            tree.close()

    def _running(self) -> Iterator[ExternalTree]:
        for rollout in self._rollouts.in_flight():
            for group in rollout.groups:
                if isinstance(group, ExternalTree):
                    yield group
