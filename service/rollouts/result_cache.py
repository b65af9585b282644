"""Cache of finished rollouts for callers that reconnect, bounded by TTL and bytes.

Only rollouts whose callers may reconnect are kept: those requested asynchronously or with an
idempotency key. The oldest are evicted first. Not thread-safe; runs on one event loop.
"""

import time
from collections import OrderedDict
from collections.abc import Callable

from service.rollouts.rollout import Rollout


class ResultCache:
    """Ended rollouts by id; every access evicts expired entries and those above the byte limit."""

    def __init__(
        self,
        *,
        max_seconds: float,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_seconds = max_seconds
        self._max_bytes = max_bytes
        self._clock = clock
        self._rollouts: OrderedDict[str, tuple[float, Rollout]] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def awaiting_fetch(self) -> dict[str, float]:
        """Ids of the results that a caller is to fetch, each with the seconds until it expires."""
        self.drop_expired()
        expired = self._clock() - self._max_seconds
        return {
            rollout_id: ended_at - expired
            for rollout_id, (ended_at, rollout) in self._rollouts.items()
            if rollout.awaits_fetch
        }

    def list(self) -> list[Rollout]:
        self.drop_expired()
        return [rollout for _, rollout in self._rollouts.values()]

    def add(self, rollout: Rollout) -> None:
        """Keep an ended rollout, unless it is above the byte limit by itself.

        Such a rollout would evict all others, and then be evicted, too.
        """
        if rollout.log.num_bytes > self._max_bytes:
            return
        self._rollouts[rollout.id] = (self._clock(), rollout)
        self._num_bytes += rollout.log.num_bytes
        self.drop_expired()

    def get(self, rollout_id: str) -> Rollout | None:
        self.drop_expired()
        _, rollout = self._rollouts.get(rollout_id, (0.0, None))
        return rollout

    def drop_expired(self) -> None:
        expired = self._clock() - self._max_seconds
        while self._rollouts:
            oldest, (ended_at, _) = next(iter(self._rollouts.items()))
            if ended_at > expired and self._num_bytes <= self._max_bytes:
                return
            self._drop(oldest)

    def check(self) -> None:
        """Assert that the byte count of the cache matches its entries and is within the limit."""
        held = sum(rollout.log.num_bytes for _, rollout in self._rollouts.values())
        assert held == self._num_bytes <= self._max_bytes, (
            "the sizes of cached results do not add up"
        )

    def remove(self, rollout_id: str) -> None:
        """Remove a result, unless it was evicted already."""
        if rollout_id in self._rollouts:
            self._drop(rollout_id)

    def _drop(self, rollout_id: str) -> None:
        _, rollout = self._rollouts.pop(rollout_id)
        self._num_bytes -= rollout.log.num_bytes
