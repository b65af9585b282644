"""A tree that somebody outside grows: a search, or a process reward model.

It is open as long as it is used: every branch and every drop renews its lease, which does not run
while a path grows. When the lease is over, or its rollout is ended, it is whole as it stands.
"""

import asyncio
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field

from coppice.wire.branching import BranchRequest
from coppice.wire.rollouts import SegmentFinish
from engine.errors import EngineError
from engine.protocol import Engine
from service.http.errors import IdempotencyInProgress, IdempotencyMismatch, TreeClosed
from service.http.failures import to_service_error
from service.rollouts.claim import IdempotencyClaim
from service.rollouts.group import EndReason
from service.trees.answer import COMPLETE_FINISHES
from service.trees.branch_result import BranchResult
from service.trees.group import Fork, TreeGroup
from service.trees.path import Path
from service.trees.request import check_branch, path_bounds
from service.trees.tokens import GeneratedTokens
from service.trees.tree import Segment


@dataclass(slots=True)
class _Claim:
    fingerprint: bytes
    branch_result: BranchResult | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class ExternalTree(TreeGroup):
    """TreeClosed is raised to whoever comes before `run` has begun or after it has ended."""

    lease_seconds: float
    _expires: float = 0.0
    _is_open: bool = False
    _is_closing: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _claims: dict[str, _Claim] = field(default_factory=dict)

    @property
    def is_idle(self) -> bool:
        """Nothing happens until somebody comes back to it."""
        return not self._unfinished

    async def branch(self, request: BranchRequest, claim: IdempotencyClaim | None) -> BranchResult:
        """The same request with the same key again gets what grew the first time."""
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
        # In the tree's own task: what fails here fails for the tree, and is seen by all.
        starting = self._tasks.create_task(self._submit(paths, self._register(paths)))
        try:
            tasks = await asyncio.shield(starting)
        except EngineError as error:
            raise to_service_error(ExceptionGroup("a branch", [error])) from error
        for task in tasks:
            task.add_done_callback(lambda _: self._renew_lease())
        branch_result = BranchResult(
            tasks=tasks, path_ids=[path.id for path in paths], has_idempotency_key=claim is not None
        )
        if claim is not None:
            self._claims[claim.key].branch_result = branch_result
        return branch_result

    def _create_paths(self, request: BranchRequest) -> list[Path]:
        """Everything that can be refused is refused here, before anything is held."""
        parent = self.tree.get_segment(request.segment)
        check_branch(self.plan, parent, num_leaves=self._num_leaves_with(parent, request.n))
        start = len(self.prompt_token_ids) + len(self.tree.token_ids(parent))
        bounds = path_bounds(self.plan, self.budget, request, start=start)
        depth = 1 if parent is None else parent.depth + 1
        paths = [self._create_path(parent, depth, start, bounds) for _ in range(request.n)]
        self._renew_lease()
        return paths

    async def drop(self, segment_id: str) -> list[str]:
        """Takes the segment and all below it out of the tree; what grows there ends."""
        self._check_open()
        segment = self.tree.get_segment(segment_id)
        assert segment is not None
        self._renew_lease()
        dropped_ids = self.tree.descendants(segment)
        dropped_paths = [p for p in self._paths.values() if p.parent and p.parent.id in dropped_ids]
        for path in dropped_paths:
            del self._paths[path.id]
        self.tree.drop(dropped_ids)
        if self.exports is not None:
            self.exports.drop(dropped_ids)
        await self._engine.abort([path.id for path in dropped_paths])
        return sorted(dropped_ids)

    async def cancel_branch(self, branch_result: BranchResult) -> None:
        """Nobody waits for it any more, and nobody could come back for it."""
        if not branch_result.has_idempotency_key:
            await self._engine.abort(branch_result.path_ids)

    async def end(self, engine: Engine, end_reason: EndReason) -> None:
        """To end an open tree is how its owner says that it is whole; nobody else can say that."""
        self._was_truncated |= end_reason != "cancelled"
        await TreeGroup.end(self, engine, end_reason)
        self._changed.set()

    def close(self) -> None:
        """It ends as soon as nothing grows."""
        self._is_closing = True
        self._changed.set()

    async def _run_until_done(self) -> None:
        self._is_open = True
        self._renew_lease()
        try:
            while self._is_alive():
                self._changed.clear()
                left = None if self._unfinished else self._expires - _now()
                with suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await self._changed.wait()
        finally:
            self._is_open = False

    def _is_alive(self) -> bool:
        """What grows is awaited in any case, by the task group that it grows in."""
        if self.end_reason or not self._unfinished and self._is_closing:
            return False
        return bool(self._unfinished) or self._expires > _now()

    def _renew_lease(self) -> None:
        self._expires = _now() + self.lease_seconds
        self._changed.set()

    def _check_open(self) -> None:
        if not self._is_open or self._is_closing or self.end_reason:
            raise TreeClosed()

    def _num_leaves_with(self, parent: Segment | None, n: int) -> int:
        """Leaves, and paths that grow, once n more have begun at the parent."""
        parents = {path.parent.id for path in self._paths.values() if path.parent}
        parents |= set() if parent is None else {parent.id}
        leaves = sum(leaf.id not in parents for leaf in self.tree.leaves())
        return leaves + len(self._paths) + n

    def _cut_at_position(self, path: Path, tokens: GeneratedTokens) -> tuple[Segment, list[Fork]]:
        """What grows from there is for somebody else to say."""
        return self._add_segment(path.parent, path.depth, f"{path.name}+0", tokens, "cut"), []

    @property
    def complete_finishes(self) -> Collection[SegmentFinish]:
        """Its owner cut where the tree was to end."""
        return {*COMPLETE_FINISHES, "cut"}


def _now() -> float:
    return asyncio.get_running_loop().time()
