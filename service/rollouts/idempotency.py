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
from service.rollouts.claim import Claim


@dataclass(slots=True)
class _Claimed:
    claim: Claim
    rollout_id: str | None = None


class IdempotencyKeys:
    """`claim` is followed by one `release`, or by one `bind` and one `ended`.

    `forgotten` is told of every claim that is over.
    """

    def __init__(
        self,
        *,
        max_seconds: float,
        forgotten: Callable[[Claim], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_seconds = max_seconds
        self._forgotten = forgotten
        self._clock = clock
        self._claimed: dict[tuple[str, str], _Claimed] = {}
        self._ended: deque[tuple[float, Claim]] = deque()

    def __len__(self) -> int:
        return len(self._claimed)

    def claim(self, claim: Claim) -> str | None:
        """The id of the rollout that this request has started already; None if it is the first."""
        self._trim()
        known = self._claimed.setdefault(claim.place, _Claimed(claim))
        if known.claim is claim:
            return None
        if known.claim.fingerprint != claim.fingerprint:
            raise IdempotencyMismatch()
        if known.rollout_id is None:
            raise IdempotencyInProgress(retry_after_seconds=1)
        return known.rollout_id

    def bind(self, claim: Claim, rollout_id: str) -> None:
        self._claimed[claim.place].rollout_id = rollout_id

    def release(self, claim: Claim) -> None:
        if self._claimed.pop(claim.place, None) is not None:
            self._forgotten(claim)

    def ended(self, claim: Claim) -> None:
        self._ended.append((self._clock() + self._max_seconds, claim))

    def _trim(self) -> None:
        while self._ended and self._ended[0][0] <= self._clock():
            _, claim = self._ended.popleft()
            self.release(claim)
