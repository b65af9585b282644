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
from service.http.failures import service_error
from service.rollouts.claim import Claim
from service.rollouts.group import Ending
from service.trees.answer import WHOLE
from service.trees.branch_result import Growing
from service.trees.group import Fork, TreeGroup
from service.trees.path import Path
from service.trees.request import check_branch, reach_of
from service.trees.tokens import Grown
from service.trees.tree import Segment


@dataclass(slots=True)
class _Claimed:
    fingerprint: bytes
    growing: Growing | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class OpenTree(TreeGroup):
    """TreeClosed is raised to whoever comes before `run` has begun or after it has ended."""

    lease_seconds: float
    _expires: float = 0.0
    _is_open: bool = False
    _is_closing: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _claimed: dict[str, _Claimed] = field(default_factory=dict)

    @property
    def resting(self) -> bool:
        """Nothing happens until somebody comes back to it."""
        return not self._unfinished

    async def branch(self, request: BranchRequest, claim: Claim | None) -> Growing:
        """The same request with the same key again gets what grew the first time."""
        self._check_open()
        known = None if claim is None else self._claimed.get(claim.key)
        if known is None:
            return await self._branch(request, claim)
        assert claim is not None
        if known.fingerprint != claim.fingerprint:
            raise IdempotencyMismatch()
        if known.growing is None:
            raise IdempotencyInProgress(retry_after_seconds=1)
        self._renew()
        return known.growing

    async def _branch(self, request: BranchRequest, claim: Claim | None) -> Growing:
        paths = self._begin(request)
        if claim is not None:
            self._claimed[claim.key] = _Claimed(claim.fingerprint)
        # In the tree's own task: what fails here fails for the tree, and is seen by all.
        starting = self._tasks.create_task(self._submit(paths, self._entered(paths)))
        try:
            tasks = await asyncio.shield(starting)
        except EngineError as error:
            raise service_error(ExceptionGroup("a branch", [error])) from error
        for task in tasks:
            task.add_done_callback(lambda _: self._renew())
        growing = Growing(
            tasks=tasks, path_ids=[path.id for path in paths], keyed=claim is not None
        )
        if claim is not None:
            self._claimed[claim.key].growing = growing
        return growing

    def _begin(self, request: BranchRequest) -> list[Path]:
        """Everything that can be refused is refused here, before anything is held."""
        parent = self.tree.named(request.segment)
        check_branch(self.plan, parent, num_leaves=self._num_leaves_with(parent, request.n))
        start = len(self.prompt_token_ids) + len(self.tree.token_ids(parent))
        reach = reach_of(self.plan, self.budget, request, start=start)
        depth = 1 if parent is None else parent.depth + 1
        paths = [self._path(parent, depth, start, reach) for _ in range(request.n)]
        self._renew()
        return paths

    async def drop(self, segment_id: str) -> list[str]:
        """Takes the segment and all below it out of the tree; what grows there ends."""
        self._check_open()
        segment = self.tree.named(segment_id)
        assert segment is not None
        self._renew()
        gone = self.tree.below(segment)
        withering = [p for p in self._paths.values() if p.parent and p.parent.id in gone]
        for path in withering:
            del self._paths[path.id]
        self.tree.drop(gone)
        if self.exports is not None:
            self.exports.drop(gone)
        await self._engine.abort([path.id for path in withering])
        return sorted(gone)

    async def leave(self, growing: Growing) -> None:
        """Nobody waits for it any more, and nobody could come back for it."""
        if not growing.keyed:
            await self._engine.abort(growing.path_ids)

    async def end(self, engine: Engine, ending: Ending) -> None:
        """To end an open tree is how its owner says that it is whole; nobody else can say that."""
        self._stunted |= ending != "cancelled"
        await TreeGroup.end(self, engine, ending)
        self._changed.set()

    def close(self) -> None:
        """It ends as soon as nothing grows."""
        self._is_closing = True
        self._changed.set()

    async def _live(self) -> None:
        self._is_open = True
        self._renew()
        try:
            while self._goes_on():
                self._changed.clear()
                left = None if self._unfinished else self._expires - _now()
                with suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await self._changed.wait()
        finally:
            self._is_open = False

    def _goes_on(self) -> bool:
        """What grows is awaited in any case, by the task group that it grows in."""
        if self.ending or not self._unfinished and self._is_closing:
            return False
        return bool(self._unfinished) or self._expires > _now()

    def _renew(self) -> None:
        self._expires = _now() + self.lease_seconds
        self._changed.set()

    def _check_open(self) -> None:
        if not self._is_open or self._is_closing or self.ending:
            raise TreeClosed()

    def _num_leaves_with(self, parent: Segment | None, n: int) -> int:
        """Leaves, and paths that grow, once n more have begun at the parent."""
        parents = {path.parent.id for path in self._paths.values() if path.parent}
        parents |= set() if parent is None else {parent.id}
        leaves = sum(leaf.id not in parents for leaf in self.tree.leaves())
        return leaves + len(self._paths) + n

    def _cut_by_place(self, path: Path, grown: Grown) -> tuple[Segment, list[Fork]]:
        """What grows from there is for somebody else to say."""
        return self._added(path.parent, path.depth, f"{path.name}+0", grown, "cut"), []

    @property
    def whole(self) -> Collection[SegmentFinish]:
        """Its owner cut where the tree was to end."""
        return {*WHOLE, "cut"}


def _now() -> float:
    return asyncio.get_running_loop().time()
