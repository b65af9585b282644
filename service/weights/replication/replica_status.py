"""State of this replica relative to the activation target, published in the cluster registry."""

from dataclasses import dataclass, replace

from service.cluster.registry import Replica
from service.weights.versions import Versions


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
