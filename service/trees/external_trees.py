"""Lookup of externally grown trees among the running rollouts."""

from collections.abc import Iterator

from service.http.errors import TreeClosed
from service.rollouts.manager import RolloutManager
from service.trees.external_tree import BranchResult, ExternalTree


class ExternalTrees:
    """Stateless view of all externally grown trees; each tree is owned by its rollout."""

    def __init__(self, rollouts: RolloutManager) -> None:
        self._rollouts = rollouts

    async def find(self, rollout_id: str, index: int, *, owner: str) -> ExternalTree:
        """Tree of a rollout's group; waits at the activation gate like all requests for samples."""
        await self._rollouts.wait_gate_open()
        groups = self._rollouts.get(rollout_id, owner=owner).groups
        group = groups[index] if index < len(groups) else None
        if not isinstance(group, ExternalTree):
            raise TreeClosed()
        return group

    def on_disconnect(self, tree: ExternalTree, branch_result: BranchResult) -> None:
        """Cancel a branch whose caller has disconnected."""
        if not branch_result.done:
            self._rollouts.in_background(tree.cancel_branch(branch_result))

    def close(self) -> None:
        """Close all trees: no further branches, and an end once no path is running."""
        for tree in self._running():
            tree.close()

    def _running(self) -> Iterator[ExternalTree]:
        for rollout in self._rollouts.in_flight():
            for group in rollout.groups:
                if isinstance(group, ExternalTree):
                    yield group
