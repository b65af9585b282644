"""Value type of one request's claim of an idempotency key, and its key in the cluster registry."""

import re
from dataclasses import dataclass

from service.errors import InvalidRequest

_MOVE = "move\n"  # callers' keys have no line breaks, and the names of resources differ
_KEY = re.compile(r"[\x21-\x7e]{1,255}")


@dataclass(frozen=True, slots=True)
class IdempotencyClaim:
    """One request's claim of an idempotency key, with its owner and a fingerprint of the body.

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
        if not _KEY.fullmatch(key):
            raise InvalidRequest.of_parameter(
                "Idempotency-Key", "1 to 255 visible ASCII characters"
            )
        key = key if resource is None else f"{resource}\n{key}"
        return cls(owner, key, fingerprint)

    @classmethod
    def of_move(cls, owner: str, resource_id: str) -> "IdempotencyClaim":
        """Claim of the key that names the replica to which a resource was moved."""
        return cls(owner, f"{_MOVE}{resource_id}", b"")

    @property
    def is_move(self) -> bool:
        return self.key.startswith(_MOVE)

    @property
    def registry_key(self) -> str:
        """Name of the idempotency key in the cluster registry, identical on all replicas."""
        return f"{self.owner}\n{self.key}"


def move_key(resource_id: str, owner: str = "") -> str:
    """Registry key that names the replica to which a resource was moved.

    That of a session has no owner, whom an agent does not know.
    """
    return IdempotencyClaim.of_move(owner, resource_id).registry_key
