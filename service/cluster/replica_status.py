"""Builder of this replica's entry in the cluster registry: URL, state and weights versions."""

import logging
import time
from collections.abc import Callable

from service.cluster.registry import ActivationTarget, Replica
from service.readiness import Readiness
from service.weights_versions import Versions

RETRY_SECONDS = 10.0

log = logging.getLogger(__name__)


class ReplicaStatus:
    """Weight replication status that this replica publishes as its cluster registry entry.

    `applied` is the last applied activation target. `failed` is the label of the version that could
    not be fetched or activated, `error` the reason. Failed versions are retried after
    `RETRY_SECONDS`.
    """

    def __init__(
        self,
        replica_id: str,
        url: str | None,
        readiness: Readiness,
        versions: Versions,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replica_id = replica_id
        self._url = url or ""
        self._readiness = readiness
        self._versions = versions
        self._clock = clock
        self._retry_at: dict[str, float] = {}
        self.applied: ActivationTarget | None = None
        self.failed: str | None = None
        self.error: str | None = None

    @property
    def epoch(self) -> int:
        return 0 if self.applied is None else self.applied.epoch

    def entry(self) -> Replica:
        active = self._versions.active
        complete = [v for v in self._versions.all() if v.state != "incomplete"]
        return Replica(
            id=self._replica_id,
            url=self._url,
            state=self._readiness.state,
            version=active.label,
            sequence=active.sequence,
            epoch=self.epoch,
            holds=tuple(version.label for version in complete if version.owned),
            staged=tuple(version.label for version in complete),
            failed=self.failed,
            error=self.error,
        )

    def is_due(self, label: str) -> bool:
        """Return True unless the version was tried and failed within the last `RETRY_SECONDS`."""
        return self._clock() >= self._retry_at.get(label, -float("inf"))

    def on_failure(self, label: str, reason: str) -> None:
        log.warning("fetching or activating %s failed: %s", label, reason)
        self.failed, self.error = label, reason
        self._retry_at[label] = self._clock() + RETRY_SECONDS

    def on_success(self, label: str) -> None:
        self._retry_at.pop(label, None)
        if self.failed == label:
            self.failed = self.error = None

    def on_target_applied(self, target: ActivationTarget) -> None:
        self.applied = target
        self.failed = self.error = None
