"""State of this replica relative to the activation target, published in the cluster registry."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from service.cluster.registry import Replica
from service.weights.versions import Versions

RETRY_SECONDS = 10.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ReplicaStatus:
    """Activation state of this replica.

    `epoch` is that of the last applied activation target. `failed` is the label of the version that
    could not be fetched or activated, `error` the reason.
    """

    epoch: int = 0
    failed: str | None = None
    error: str | None = None

    def apply_to(self, replica: Replica, versions: Versions) -> Replica:
        whole = [version for version in versions.all() if version.state != "incomplete"]
        return replace(
            replica,
            epoch=self.epoch,
            holds=tuple(version.label for version in whole if version.owned),
            staged=tuple(version.label for version in whole),
            failed=self.failed,
            error=self.error,
        )


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
