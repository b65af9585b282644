"""Outcomes of downloads and activations per version, with the time of the next attempt."""

import logging
import time
from collections.abc import Callable

from service.weights.replication.replica_status import ReplicaStatus

RETRY_SECONDS = 10.0

log = logging.getLogger(__name__)


class LoadHistory:
    """Record of failures, also written to `replica_status`; `on_change` publishes the status."""

    def __init__(
        self,
        replica_status: ReplicaStatus,
        *,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replica_status = replica_status
        self._on_change = on_change
        self._clock = clock
        self._retry_at: dict[str, float] = {}

    def is_due(self, label: str) -> bool:
        """Return True unless the version failed within the last `RETRY_SECONDS`."""
        return self._clock() >= self._retry_at.get(label, -float("inf"))

    def failed(self, label: str, reason: str) -> None:
        log.warning("cannot serve %s: %s", label, reason)
        self._replica_status.failed, self._replica_status.error = label, reason
        self._retry_at[label] = self._clock() + RETRY_SECONDS
        self._on_change()

    def on_success(self, label: str) -> None:
        self._retry_at.pop(label, None)
        if self._replica_status.failed == label:
            self._replica_status.failed = self._replica_status.error = None
