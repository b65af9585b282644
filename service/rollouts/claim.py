"""Claims on idempotency keys."""

import hashlib
import re
from dataclasses import dataclass

from service.http.errors import InvalidRequest

_KEY = re.compile(r"^[\x21-\x7e]{1,255}$")


@dataclass(frozen=True, slots=True)
class IdempotencyClaim:
    """Idempotency key of one owner, with the SHA-256 of the request body.

    The fingerprint distinguishes a retry from a different request under the same key.
    """

    owner: str
    key: str
    fingerprint: bytes

    @classmethod
    def of(cls, owner: str, key: str, body: bytes) -> "IdempotencyClaim":
        if not _KEY.match(key):
            raise InvalidRequest.of_parameter(
                "Idempotency-Key", "1 to 255 visible ASCII characters"
            )
        return cls(owner, key, hashlib.sha256(body).digest())

    @property
    def cluster_key(self) -> str:
        """Key in the cluster registry, identical on all replicas."""
        return f"{self.owner}\n{self.key}"

    @property
    def local_key(self) -> tuple[str, str]:
        return self.owner, self.key
