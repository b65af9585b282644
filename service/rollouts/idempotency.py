"""Idempotency keys: the same request sent again finds the rollout that the first one started.

draft-ietf-httpapi-idempotency-key-header. A key belongs to its caller. It is claimed before the
prompts are tokenised and bound once the rollout runs; a refusal releases it. These are the keys of
this replica; which other one may have one is the directory's to say
(service/cluster/membership.py). A key outlives its rollout by a fixed time, even if the answer had
to go earlier: a late retry is then told that the rollout is gone, and never starts a second one.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from service.http.errors import IdempotencyInProgress, IdempotencyMismatch
from service.rollouts.claim import IdempotencyClaim


@dataclass(slots=True)
class _Entry:
    claim: IdempotencyClaim
    rollout_id: str | None = None


class IdempotencyKeys:
    """`claim` is followed by one `release`, or by one `bind` and one `ended`.

    `on_released` is told of every claim that is over.
    """

    def __init__(
        self,
        *,
        max_seconds: float,
        on_released: Callable[[IdempotencyClaim], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_seconds = max_seconds
        self._on_released = on_released
        self._clock = clock
        self._claimed: dict[tuple[str, str], _Entry] = {}
        self._ended: deque[tuple[float, IdempotencyClaim]] = deque()

    def __len__(self) -> int:
        return len(self._claimed)

    def claim(self, claim: IdempotencyClaim) -> str | None:
        """The id of the rollout that this request has started already; None if it is the first."""
        self._drop_expired()
        existing = self._claimed.setdefault(claim.local_key, _Entry(claim))
        if existing.claim is claim:
            return None
        if existing.claim.fingerprint != claim.fingerprint:
            raise IdempotencyMismatch()
        if existing.rollout_id is None:
            raise IdempotencyInProgress(retry_after_seconds=1)
        return existing.rollout_id

    def bind(self, claim: IdempotencyClaim, rollout_id: str) -> None:
        self._claimed[claim.local_key].rollout_id = rollout_id

    def release(self, claim: IdempotencyClaim) -> None:
        if self._claimed.pop(claim.local_key, None) is not None:
            self._on_released(claim)

    def ended(self, claim: IdempotencyClaim) -> None:
        self._ended.append((self._clock() + self._max_seconds, claim))

    def _drop_expired(self) -> None:
        while self._ended and self._ended[0][0] <= self._clock():
            _, claim = self._ended.popleft()
            self.release(claim)
