"""Result of one branch request."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from coppice.wire.rollouts import SegmentAnswer
from service.http.errors import TreeClosed
from service.http.failures import to_service_error
from service.trees.tree import Segment


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BranchResult:
    """Pending segments of a branch request.

    The tasks belong to the tree: to stop waiting for them does not end them.
    """

    tasks: Sequence["asyncio.Task[Segment | None]"]
    path_ids: Sequence[str]
    has_idempotency_key: bool

    @property
    def done(self) -> bool:
        return all(task.done() for task in self.tasks)

    async def segments(self) -> list[SegmentAnswer]:
        """Wait for the segments; those dropped in the meantime are left out."""
        await asyncio.wait(self.tasks)
        failures = [e for task in self.tasks if not task.cancelled() and (e := task.exception())]
        if failures:
            raise to_service_error(BaseExceptionGroup("a tree", failures))
        if any(task.cancelled() for task in self.tasks):
            raise TreeClosed()
        return [segment.answer() for task in self.tasks if (segment := task.result())]
