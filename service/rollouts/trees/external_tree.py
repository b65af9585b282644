"""Rollout trees branched by the caller step by step, e.g. with a process reward model.

Every branch and every drop renews a tree's lease, which does not expire while a path is running. A
tree ends as it is when the lease expires or its rollout is ended.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coppice.wire.branching import BranchRequest
from coppice.wire.columns.token_columns import TokenLists
from coppice.wire.rollouts import GroupAnswer, SegmentAnswer, SegmentFinish
from engine.errors import EngineError
from engine.protocol.generation import Generation
from service.cluster.idempotency_claim import IdempotencyClaim
from service.errors import (
    IdempotencyInProgress,
    IdempotencyMismatch,
    InvalidRequest,
    SegmentNotFound,
    TreeClosed,
)
from service.http.exception_handlers import to_service_error
from service.rollouts.groups.group import EndReason, Group, OnPart
from service.rollouts.groups.options import GroupOptions
from service.rollouts.trees.branching_plan import Plan, next_cut
from service.rollouts.trees.running_path import Budget, Path, PathBounds
from service.rollouts.trees.segment import Segment
from service.rollouts.trees.tree_answer import COMPLETE_FINISHES, kept_answer
from service.rollouts.trees.tree_growth import TreePaths

if TYPE_CHECKING:
    from service.rollouts.manager import RolloutManager  # its group factory imports this module


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BranchResult:
    """Result of a branch request to a tree: the tasks that sample the new segments.

    The tasks belong to the tree: they continue if a caller stops waiting for them.
    """

    tasks: Sequence["asyncio.Task[Segment | None]"]
    path_ids: Sequence[str]
    has_idempotency_key: bool

    @property
    def done(self) -> bool:
        return all(task.done() for task in self.tasks)

    async def segments(self) -> list[SegmentAnswer]:
        """Wait for the new segments of a branch request; omits segments dropped in the meantime."""
        await asyncio.wait(self.tasks)
        failures = [e for task in self.tasks if not task.cancelled() and (e := task.exception())]
        if failures:
            raise to_service_error(BaseExceptionGroup("a tree", failures))
        if any(task.cancelled() for task in self.tasks):
            raise TreeClosed()
        added = [segment for task in self.tasks if (segment := task.result())]
        return [await kept_answer(segment) for segment in added]


def check_branch(plan: Plan, parent: Segment, *, num_leaves: int) -> None:
    if parent.finish != "cut":
        raise InvalidRequest(f"a segment that ended as {parent.finish} has no children")
    if parent.depth >= plan.branching.max_depth:
        raise InvalidRequest(f"max_depth is {plan.branching.max_depth}")
    if num_leaves > plan.branching.max_leaves:
        raise InvalidRequest(f"max_leaves is {plan.branching.max_leaves}")


def branch_bounds(plan: Plan, budget: Budget, request: BranchRequest, *, start: int) -> PathBounds:
    """Limits, mainly in tokens, of each new path that a branch request starts."""
    part = budget.remaining // request.n
    if part < 1:
        raise InvalidRequest("the tree's max_new_tokens_total is used up")
    rest = plan.max_length - start
    if request.max_tokens is not None:
        cut = next_cut(start + request.max_tokens, plan.block_size)
        if cut < plan.max_length and cut - start <= part:
            return PathBounds(limit=cut - start, share=1, cut=True)
    return PathBounds(limit=min(rest, part), share=1, is_budget_limited=part < rest)


@dataclass(slots=True)
class _Claim:
    fingerprint: bytes
    branch_result: BranchResult | None = None


class ExternalTree:
    """Sampler of a tree that the caller grows by branch requests and prunes by drop requests.

    Both raise TreeClosed before `run` has begun and after it has ended. The caller decides where
    the tree ends, so a leaf that was cut is complete.
    """

    is_grown_by_caller = True

    def __init__(self, plan: Plan, options: GroupOptions, *, lease_seconds: float) -> None:
        self.paths = TreePaths(plan, options, self._grow, {*COMPLETE_FINISHES, "cut"})
        self.lease_seconds = lease_seconds
        self._plan = plan
        self._expires = 0.0
        self._is_open = False
        self._is_closing = False
        self._changed = asyncio.Event()
        self._claims: dict[str, _Claim] = {}

    async def run(self, group: Group, engine: Generation, done: OnPart) -> GroupAnswer:
        """Keep the tree open for requests of the caller, and return its answer."""
        async with self.paths.sampling(group, engine, done):
            await self._run_until_done(group)
        return await self.paths.answer()

    async def branch(self, request: BranchRequest, claim: IdempotencyClaim | None) -> BranchResult:
        """Start new paths from a segment of the tree, or from its prompt.

        A retry with the same idempotency key gets the result of the first request.
        """
        self._check_open()
        existing = None if claim is None else self._claims.get(claim.key)
        if existing is None:
            return await self._branch(request, claim)
        assert claim is not None
        if existing.fingerprint != claim.fingerprint:
            raise IdempotencyMismatch()
        if existing.branch_result is None:
            raise IdempotencyInProgress(retry_after_seconds=1)
        self._renew_lease()
        return existing.branch_result

    async def _branch(self, request: BranchRequest, claim: IdempotencyClaim | None) -> BranchResult:
        paths = self._create_paths(request)
        if claim is not None:
            self._claims[claim.key] = _Claim(claim.fingerprint)
        # In the tree's task group: an error here fails the whole tree and reaches all its callers.
        starting = self.paths.tasks.create_task(self.paths.submit(paths))
        try:
            tasks = await asyncio.shield(starting)
        except EngineError as error:
            raise to_service_error(ExceptionGroup("a branch", [error])) from error
        for task in tasks:
            task.add_done_callback(lambda _: self._renew_lease())
        branch_result = BranchResult(
            tasks=tasks,
            path_ids=[path.id for path in paths],
            has_idempotency_key=claim is not None,
        )
        if claim is not None:
            self._claims[claim.key].branch_result = branch_result
        return branch_result

    def _create_paths(self, request: BranchRequest) -> list[Path]:
        """Validate a branch request and create its paths; a rejected request reserves nothing."""
        parent = self.paths.root if request.segment is None else self._segment(request.segment)
        check_branch(self._plan, parent, num_leaves=self._num_leaves_with(parent, request.n))
        bounds = branch_bounds(self._plan, self.paths.budget, request, start=parent.end)
        paths = [self.paths.create(parent, bounds) for _ in range(request.n)]
        self._renew_lease()
        return paths

    def _segment(self, segment_id: str) -> Segment:
        segment = self.paths.tree.by_id.get(segment_id)
        if segment is None:
            raise SegmentNotFound()
        return segment

    async def drop(self, segment_id: str) -> list[str]:
        """Remove a segment and its descendants from the tree and abort the paths below them."""
        self._check_open()
        segment = self._segment(segment_id)
        running, exports = self.paths.running, self.paths.group.exports
        self._renew_lease()
        dropped_ids = self.paths.tree.drop(segment)
        dropped_paths = [path for path in running.values() if path.parent.id in dropped_ids]
        for path in dropped_paths:
            del running[path.id]
        if exports is not None:
            exports.drop(dropped_ids)
        await self.paths.engine.abort([path.id for path in dropped_paths])
        return sorted(dropped_ids)

    async def cancel_branch(self, branch_result: BranchResult) -> None:
        """Abort a disconnected caller's new paths, unless an idempotency key allows a retry."""
        if not branch_result.has_idempotency_key:
            await self.paths.engine.abort(branch_result.path_ids)

    def on_end(self, end_reason: EndReason) -> None:
        """Mark the tree as truncated unless the reason is "cancelled".

        Cancellation is the way in which its owner completes a tree.
        """
        self.paths.was_truncated |= end_reason != "cancelled"
        self._changed.set()

    def close(self) -> None:
        """Reject further branches of this tree; it ends once none of its paths is running."""
        self._is_closing = True
        self._changed.set()

    async def _run_until_done(self, group: Group) -> None:
        """Wait until the tree has no running paths and no lease, or ends early.

        Paths that still run are awaited by the task group.
        """
        self._is_open = True
        self._renew_lease()
        try:
            while not group.ends and (group.num_running or self._can_grow()):
                self._changed.clear()
                left = None if group.num_running else self._expires - _now()
                with suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await self._changed.wait()
        finally:
            self._is_open = False

    def _can_grow(self) -> bool:
        return not self._is_closing and self._expires > _now()

    def _renew_lease(self) -> None:
        self._expires = _now() + self.lease_seconds
        self._changed.set()

    def _check_open(self) -> None:
        if not self._is_open or self._is_closing or self.paths.group.ends:
            raise TreeClosed()

    def _num_leaves_with(self, parent: Segment, n: int) -> int:
        """Number of leaves and running paths of the tree once `n` more start at `parent`."""
        running, segments = self.paths.running, self.paths.tree.by_id.values()
        continued = {path.parent for path in running.values()} | {parent}
        leaves = sum(each.is_leaf and each not in continued for each in segments)
        return leaves + len(running) + n

    def _grow(
        self, path: Path, tokens: TokenLists, finish: SegmentFinish, stop_reason: int | str | None
    ) -> tuple[Segment, list[Path]]:
        """Add a path's tokens as one segment, from which the caller may branch if it was cut."""
        add, name = self.paths.tree.add, f"{path.name}+0"
        return add(path.parent, tokens, finish, stop_reason, name=name), []


class ExternalTrees:
    """Finds and closes externally grown trees; stateless, as every rollout owns its trees."""

    def __init__(self, rollouts: "RolloutManager") -> None:
        self._rollouts = rollouts

    async def find(self, rollout_id: str, index: int, *, owner: str) -> ExternalTree:
        """Find the tree of a rollout's group; waits for an activation of weights in progress."""
        await self._rollouts.wait_gate_open()
        groups = self._rollouts.get(rollout_id, owner=owner).groups
        tree = groups[index].sampler if index < len(groups) else None
        if not isinstance(tree, ExternalTree):
            raise TreeClosed()
        return tree

    def on_disconnect(self, tree: ExternalTree, branch_result: BranchResult) -> None:
        """Cancel a branch request whose caller has disconnected, if its paths are still running."""
        if not branch_result.done:
            self._rollouts.in_background(tree.cancel_branch(branch_result))

    def close(self) -> None:
        """Reject further branches of all trees; each ends once none of its paths is running."""
        for rollout in self._rollouts.in_flight():
            for group in rollout.groups:
                if isinstance(group.sampler, ExternalTree):
                    group.sampler.close()


def _now() -> float:
    return asyncio.get_running_loop().time()
