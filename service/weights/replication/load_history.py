"""What became of each version that was to be brought or served here."""

import logging
import time
from collections.abc import Callable

from service.weights.replication.replica_status import Standing

RETRY_SECONDS = 10.0

log = logging.getLogger(__name__)


class Attempts:
    """Writes the failure of this replica's standing. `changed`: the others are to hear of it."""

    def __init__(
        self,
        standing: Standing,
        *,
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._standing = standing
        self._changed = changed
        self._clock = clock
        self._retry_at: dict[str, float] = {}

    def is_due(self, label: str) -> bool:
        """What has failed is not tried again at once."""
        return self._clock() >= self._retry_at.get(label, -float("inf"))

    def failed(self, label: str, why: str) -> None:
        log.warning("%s is not served here: %s", label, why)
        self._standing.failed, self._standing.error = label, why
        self._retry_at[label] = self._clock() + RETRY_SECONDS
        self._changed()

    def well(self, label: str) -> None:
        self._retry_at.pop(label, None)
        if self._standing.failed == label:
            self._standing.failed = self._standing.error = None
