"""Idempotency keys: a retried request finds the rollout that the first attempt started.

Follows draft-ietf-httpapi-idempotency-key-header. A key is scoped to its owner. It is claimed
before the prompts are tokenized and bound once the rollout runs; if the request is rejected, it is
released. This module holds the keys of this replica; the cluster registry resolves keys that other
replicas hold (service/cluster/membership.py). A key outlives its rollout by a fixed time, even if
the result has been evicted earlier: a late retry then gets an error that the rollout is gone and
never starts a second one.
"""

import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from service.errors import IdempotencyInProgress, IdempotencyMismatch, InvalidRequest

_MOVE = "move\n"  # callers' keys have no line breaks, and the names of resources differ
_KEY = re.compile(r"^[\x21-\x7e]{1,255}$")


@dataclass(frozen=True, slots=True)
class IdempotencyClaim:
    """Idempotency key of a request, with its owner and the fingerprint of the request body.

    The fingerprint distinguishes a retry from a different request under the same key.
    """

    owner: str
    key: str
    fingerprint: bytes

    @classmethod
    def of(
        cls, owner: str, key: str, fingerprint: bytes, resource: str | None = None
    ) -> "IdempotencyClaim":
        """Claim of a request; keys of different resources do not conflict."""
        if not _KEY.match(key):
            raise InvalidRequest.of_parameter(
                "Idempotency-Key", "1 to 255 visible ASCII characters"
            )
        key = key if resource is None else f"{resource}\n{key}"
        return cls(owner, key, fingerprint)

    @classmethod
    def of_move(cls, owner: str, rollout_id: str) -> "IdempotencyClaim":
        """Claim that names the replica to which a rollout was moved."""
        return cls(owner, f"{_MOVE}{rollout_id}", b"")

    @property
    def is_move(self) -> bool:
        return self.key.startswith(_MOVE)

    @property
    def cluster_key(self) -> str:
        """Name of the idempotency key in the cluster registry, identical on all replicas."""
        return f"{self.owner}\n{self.key}"

    @property
    def local_key(self) -> tuple[str, str]:
        return self.owner, self.key


@dataclass(slots=True)
class _Entry:
    claim: IdempotencyClaim
    rollout_id: str | None = None
    has_ended: bool = False


class IdempotencyKeys:
    """Idempotency keys that this replica holds, with the id of the rollout that each started.

    `claim` is followed by one `release`, or by one `bind` and one `ended`. `on_released` is called
    with the cluster key of every claim that is dropped.
    """

    def __init__(
        self,
        *,
        max_seconds: float,
        on_released: Callable[[str], None],
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
        """Claim an idempotency key; returns None if it is new, else the id of its rollout.

        Raises IdempotencyMismatch if the first request had another body, and IdempotencyInProgress
        if its rollout has not started yet.
        """
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
        """Release a key, unless another claim has it since."""
        entry = self._claimed.get(claim.local_key)
        if entry is not None and entry.claim is claim:
            del self._claimed[claim.local_key]
            self._on_released(claim.cluster_key)

    def ended(self, claim: IdempotencyClaim) -> None:
        self._ended.append((self._clock() + self._max_seconds, claim))
        entry = self._claimed.get(claim.local_key)
        if entry is not None and entry.claim is claim:
            entry.has_ended = True

    def forget_ended(self, claim: IdempotencyClaim, rollout_id: str) -> None:
        """Forget the key of a rollout that was moved away and returns; it can be claimed again.

        It is not released in the cluster registry, where another replica holds it.
        """
        entry = self._claimed.get(claim.local_key)
        if entry is not None and entry.has_ended and entry.rollout_id == rollout_id:
            del self._claimed[claim.local_key]

    def _drop_expired(self) -> None:
        while self._ended and self._ended[0][0] <= self._clock():
            _, claim = self._ended.popleft()
            self.release(claim)
