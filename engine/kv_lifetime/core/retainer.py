"""Retention of the KV of paused agent sessions in EngineCore, with limits and expiry.

When a request of a session ends, the cached blocks of its tokens are retained: vLLM evicts them
after all other cached blocks. An allocation that needs them takes those of the path that was
retained first. Called from EngineCore's loop only.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final

from engine.kv_lifetime.core.block_queue import RetainingBlockQueue
from engine.runtime.feature_guard import feature
from engine.types.feature_stats import KvReleaseReason

FEATURE: Final = feature("session_kv_retention")
MAX_PATHS: Final = 1024
SESSIONS_PER_LIMIT: Final = 4
"""Part of the limit up to which a session retains older paths, so that it displaces no others."""


@dataclass(slots=True, eq=False, kw_only=True)
class RetainedPath:
    """Cached prompt and sample of one ended request. `blocks` are ordered from its start.

    Paths of several sessions may have blocks in common, if the sessions share prefixes.
    """

    session_id: str
    ended_at: float
    blocks: dict[int, Any] = field(default_factory=dict)


class SessionKvRetainer:
    """Retained paths of sessions, at most `max_blocks` blocks, each at most `max_seconds` long.

    `releases_tails`: the start of a path is useful without its end. Else a path is released whole:
    a prefix of it cannot be found without the window or the state at its end.
    """

    def __init__(
        self,
        pool: Any,
        find_cached: Callable[[Any], Iterable[Any]],
        *,
        max_blocks: int,
        max_seconds: float,
        releases_tails: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._find_cached = find_cached
        self._max_blocks = max_blocks
        self._max_seconds = max_seconds
        self._releases_tails = releases_tails
        self._clock = clock
        self._sessions: dict[str, dict[RetainedPath, None]] = {}
        self._paths: dict[RetainedPath, None] = {}
        self._paths_of: dict[int, tuple[RetainedPath, ...]] = {}
        self._num_released: Counter[KvReleaseReason] = Counter()
        self._queue = RetainingBlockQueue(pool.free_block_queue, on_shortage=self._on_shortage)
        pool.free_block_queue = self._queue

    @property
    def num_retained_blocks(self) -> int:
        """Number of retained blocks that no request uses."""
        return self._queue.num_retained_blocks

    @property
    def num_released(self) -> dict[KvReleaseReason, int]:
        counts: dict[KvReleaseReason, int] = dict(self._num_released)
        return counts | {"returned": self._queue.num_reused}

    @property
    def num_retained_sessions(self) -> int:
        return len(self._sessions)

    def _release_everything(self, *_args: Any, **_named: Any) -> None:
        """Return all retained blocks to the queue, whatever state an error has left."""
        self._queue.release_everything()
        self._sessions.clear()
        self._paths.clear()
        self._paths_of.clear()

    def attach(self, scheduler: Any) -> None:
        """Wrap the scheduler's methods that end requests and reset the prefix cache."""
        free, reset = scheduler._free_request, scheduler.reset_prefix_cache

        def patched_free(request: Any, *args: Any, **named: Any) -> Any:
            self.on_finished(request)
            result = free(request, *args, **named)
            self.enforce_limits()
            return result

        def patched_reset(*args: Any, **named: Any) -> bool:
            self.release_all()
            return bool(reset(*args, **named))

        scheduler._free_request = patched_free
        scheduler.reset_prefix_cache = patched_reset

    @FEATURE.guarded_with_default(None)
    def on_finished(self, request: Any) -> None:
        """Retain the cached blocks of a request of a session, before its blocks are freed."""
        if request.session_id is None:
            return
        self.release_expired()
        path = RetainedPath(session_id=request.session_id, ended_at=self._clock())
        self._retain(path, self._retainable(request))

    def _retainable(self, request: Any) -> list[Any]:
        """Cached blocks of a request that may be retained together."""
        found = {
            block.block_id: block
            for block in self._find_cached(request)
            if not block.is_null and block.pool in (None, self._pool)
        }
        blocks = list(found.values())
        if len(blocks) <= self._max_blocks:
            return blocks
        return blocks[: self._max_blocks] if self._releases_tails else []

    def _retain(self, path: RetainedPath, blocks: list[Any]) -> None:
        if not blocks:
            return
        paths = self._sessions.setdefault(path.session_id, {})
        paths[path] = self._paths[path] = None
        alone = (path,)  # one object for all blocks, as garbage collection takes time per object
        for block in blocks:
            others = self._supersede(path, block)
            self._paths_of[block.block_id] = (*others, path) if others else alone
            path.blocks[block.block_id] = block
        self._queue.retain(blocks)
        self._limit_session(paths)

    def _limit_session(self, paths: dict[RetainedPath, None]) -> None:
        """Release older paths of a session that retains too many blocks."""
        num_blocks = sum(len(path.blocks) for path in paths)
        while len(paths) > 1 and num_blocks > self._max_blocks // SESSIONS_PER_LIMIT:
            oldest = next(iter(paths))
            num_blocks -= len(oldest.blocks)
            self._release(oldest, "limit")

    def _supersede(self, path: RetainedPath, block: Any) -> list[RetainedPath]:
        """Remove a block from older paths of the same session; returns paths of other sessions."""
        others: list[RetainedPath] = []
        for older in self._paths_of.get(block.block_id, ()):
            if older.session_id == path.session_id:
                self._remove_block(older, block)
            else:
                others.append(older)
        return others

    @FEATURE.guarded(_release_everything)
    def enforce_limits(self) -> None:
        while (excess := self.num_retained_blocks - self._max_blocks) > 0 and self._paths:
            self._release(self._oldest(), "limit", excess)
        while len(self._paths) > MAX_PATHS:
            self._release(self._oldest(), "limit")

    def release(self, session_id: str) -> None:
        """Release the blocks of a session that has ended."""
        for path in list(self._sessions.get(session_id, ())):
            self._release(path, "ended")

    @FEATURE.guarded(_release_everything)
    def release_all(self, except_blocks: Set[int] = frozenset()) -> None:
        """Release all blocks that a reset of the prefix cache drops."""
        for path in list(self._paths):
            blocks = [each for i, each in path.blocks.items() if i not in except_blocks]
            self._release_blocks(path, blocks, "reset")

    @FEATURE.guarded(_release_everything)
    def release_expired(self) -> None:
        oldest = self._clock() - self._max_seconds
        while self._paths and self._oldest().ended_at <= oldest:
            self._release(self._oldest(), "expired")

    # Called by the queue of free blocks

    @FEATURE.guarded(_release_everything)
    def _on_shortage(self, num_blocks: int) -> None:
        while num_blocks > 0 and self._paths:
            num_blocks -= self._release(self._oldest(), "allocation", num_blocks)

    def _oldest(self) -> RetainedPath:
        return next(iter(self._paths))

    def _release(
        self, path: RetainedPath, reason: KvReleaseReason, num_blocks: int | None = None
    ) -> int:
        """Release a path, or its last `num_blocks` free blocks; returns how many are free now."""
        blocks = _last_blocks(path, num_blocks if self._releases_tails else None)
        return self._release_blocks(path, blocks, reason)

    def _release_blocks(
        self, path: RetainedPath, blocks: Sequence[Any], reason: KvReleaseReason
    ) -> int:
        num_free = self._queue.release([b for b in blocks if self._is_last_of(path, b)])
        for block in blocks:
            self._remove_block(path, block)
        self._num_released[reason] += num_free
        return num_free

    def _is_last_of(self, path: RetainedPath, block: Any) -> bool:
        """Remove a path from those of a block; true if no other path has the block."""
        others = tuple(each for each in self._paths_of[block.block_id] if each is not path)
        if others:
            self._paths_of[block.block_id] = others
        else:
            del self._paths_of[block.block_id]
        return not others

    def _remove_block(self, path: RetainedPath, block: Any) -> None:
        """Remove a block from a path, and the path if it has no other."""
        del path.blocks[block.block_id]
        if not path.blocks:
            del self._paths[path]
            paths = self._sessions[path.session_id]
            del paths[path]
            if not paths:
                del self._sessions[path.session_id]


def _last_blocks(path: RetainedPath, num_free: int | None) -> list[Any]:
    """Blocks from the end of a path, up to so many free ones; None: all blocks.

    Those between them that a request uses are included. They are retained again when it ends.
    """
    blocks: list[Any] = []
    for block in reversed(path.blocks.values()):
        if num_free == 0:
            break
        blocks.append(block)
        if num_free is not None and not block.ref_cnt:
            num_free -= 1
    return blocks
