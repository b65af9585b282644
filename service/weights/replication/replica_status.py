"""How this replica stands to what the fleet is to serve; the others read it in the directory."""

from dataclasses import dataclass, replace

from service.cluster.registry import Replica
from service.weights.versions import Versions


@dataclass(slots=True)
class ReplicaStatus:
    """`epoch` is that of the last order carried out; `failed` what could not be served, and why."""

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
