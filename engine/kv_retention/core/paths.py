"""Retained paths: the cached KV of requests of paused sessions, and what their blocks are worth."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from engine.kv_retention.policy import ReturnPredictor, SessionPauses, block_value

ORDER_SECONDS: Final = 1.0
"""Age at which an eviction order is computed again, as values change while sessions are paused."""
MAX_ADDED_SHARE: Final = 1 / 8
"""Share of paths added since an order was computed, from which on it is computed again."""


@dataclass(slots=True, eq=False, kw_only=True)
class RetainedPath:
    """Cached prompt and sample of one ended request. `blocks` are ordered from its start.

    Paths of several sessions may have blocks in common, if the sessions share prefixes.
    """

    session_id: str
    priority: int
    num_tokens: int
    ended_at: float
    blocks: dict[int, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class PausedSession:
    """A session with retained paths, from the oldest to the latest, or with running requests."""

    pauses: SessionPauses = field(default_factory=SessionPauses)
    paths: dict[RetainedPath, None] = field(default_factory=dict)
    num_running: int = 0
    ended_at: float | None = None


class EvictionOrder:
    """Finds the path that is worth least, in an order that is computed again from time to time.

    As in vLLM's scheduling, a session with a lower `priority` number goes before all others, so its
    paths are evicted last. Of sessions with equal priority, those with more than `session_blocks`
    blocks lose their older paths first, so that one session cannot displace all others.
    """

    def __init__(self, predictor: ReturnPredictor, *, session_blocks: int) -> None:
        self._predictor = predictor
        self._session_blocks = session_blocks
        self._paths: list[RetainedPath] = []
        self._expires_at = 0.0
        self._num_added = 0

    def on_added(self) -> None:
        """Note that a path was added, which is not in the order yet."""
        self._num_added += 1

    def first(self, sessions: Mapping[str, PausedSession], now: float) -> RetainedPath | None:
        """The path to release blocks of; None if no path has any."""
        is_old = now >= self._expires_at or self._num_added > MAX_ADDED_SHARE * len(self._paths)
        if is_old or not self._has_paths():
            self._compute(sessions, now)
        return self._paths[-1] if self._has_paths() else None

    def _has_paths(self) -> bool:
        while self._paths and not self._paths[-1].blocks:
            self._paths.pop()
        return bool(self._paths)

    def _compute(self, sessions: Mapping[str, PausedSession], now: float) -> None:
        keys: dict[RetainedPath, tuple[int, bool, float]] = {}
        for session in sessions.values():
            keys.update(self._keys(session, now))
        self._paths = sorted(keys, key=keys.__getitem__)
        self._expires_at = now + ORDER_SECONDS
        self._num_added = 0

    def _keys(
        self, session: PausedSession, now: float
    ) -> Iterator[tuple[RetainedPath, tuple[int, bool, float]]]:
        """Paths of a session with their sort keys, which are larger for what is worth less."""
        num_blocks = 0
        for rank, path in enumerate(reversed(session.paths), start=1):
            num_blocks += len(path.blocks)
            remaining = self._predictor.remaining_seconds(session.pauses, now - path.ended_at)
            value = block_value(path.num_tokens, remaining, rank)
            yield path, (path.priority, num_blocks > self._session_blocks, -value)
