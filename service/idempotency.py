"""Idempotency keys: the same request sent again finds the rollout that the first one started.

draft-ietf-httpapi-idempotency-key-header. A key belongs to its caller. It is claimed before the
prompts are tokenised, bound once the rollout runs, and released with it: when it is not kept any
more, or at once if nothing came of it, so that a retry after a failure starts anew.
"""

from service.claim import Claim
from service.errors import IdempotencyInProgress, IdempotencyMismatch
from service.rollout import Rollout


class IdempotencyKeys:
    """`claim` is followed by exactly one `bind` or `release`."""

    def __init__(self) -> None:
        self._claims: dict[tuple[str, str], tuple[Claim, Rollout | None]] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def bound(self) -> list[Rollout]:
        return [rollout for _, rollout in self._claims.values() if rollout is not None]

    def claim(self, claim: Claim) -> Rollout | None:
        """The rollout that this request has started already; None if it is the first."""
        known = self._claims.get((claim.owner, claim.key))
        if known is None:
            self._claims[claim.owner, claim.key] = (claim, None)
            return None
        first, rollout = known
        if first.fingerprint != claim.fingerprint:
            raise IdempotencyMismatch()
        if rollout is None:
            raise IdempotencyInProgress(retry_after_seconds=1)
        return rollout

    def bind(self, claim: Claim, rollout: Rollout) -> None:
        self._claims[claim.owner, claim.key] = (claim, rollout)

    def release(self, claim: Claim, rollout: Rollout | None) -> None:
        """By whom it is bound to, if to any: another rollout may have the key by now."""
        _, bound = self._claims.get((claim.owner, claim.key), (None, None))
        if bound is rollout:
            self._claims.pop((claim.owner, claim.key), None)
