"""Publication and withdrawal of this replica's weights versions in the cluster registry."""

import asyncio
from contextlib import suppress

from service.cluster.membership import ClusterMembership
from service.cluster.registry import ClusterView, Manifest, ManifestConflict, RegistryUnavailable
from service.cluster.replica_status import ReplicaStatus
from service.errors import VersionConflict, WeightsRefused
from service.weights.replication.manifests import (
    CHANGED_FILES,
    is_published,
    manifest_of,
    same_files,
)
from service.weights_versions import Version, Versions


class Announcer:
    """Publishes this replica's weights versions in the cluster registry, and withdraws them.

    `sync` repeats what has failed, and publishes again after a reset of the registry. `on_view`
    has to be called with every cluster view, because a reset may show in one of them only.
    """

    def __init__(
        self, cluster: ClusterMembership, versions: Versions, replica_status: ReplicaStatus
    ) -> None:
        self._cluster = cluster
        self._versions = versions
        self._replica_status = replica_status
        self._changed_at: dict[str, int] = {}  # view numbers of the changes in the registry
        self._pending_withdrawals: set[str] = set()
        self._withdrawing = asyncio.Lock()
        self._registry_reset_at = 0
        self._synced_at = 0

    @property
    def publishes(self) -> bool:
        """True if versions are published in a cluster registry, with the digests of their files."""
        return not self._cluster.is_standalone

    async def announce(self, version: Version) -> bool:
        """Publish a version in the cluster registry; returns False if that is unavailable.

        Raises VersionConflict if other content is published under its label or sequence number. A
        standalone server has no registry and returns True.
        """
        if self._cluster.is_standalone:
            return True
        manifest = await manifest_of(version)
        try:
            await self._publish(manifest)
        except RegistryUnavailable:
            return False
        self._changed_at[version.label] = self._cluster.last_view_number
        self._cluster.start_fast_heartbeats()
        return True

    def is_outdated(self, view: ClusterView, label: str) -> bool:
        """True if the view may lack this replica's last announcement or withdrawal of a version."""
        return label in self._pending_withdrawals or view.view_number <= self._changed_at.get(
            label, -1
        )

    async def on_deleted(self, label: str) -> None:
        """Withdraw a deleted version from the cluster registry, later if that is unavailable."""
        if self._cluster.is_standalone:
            return
        self._pending_withdrawals.add(label)
        with suppress(RegistryUnavailable):
            await self._withdraw()

    async def check_unchanged(self, label: str) -> None:
        """Raise WeightsRefused if a version in a shared directory differs from its manifest.

        Otherwise replicas that load it one after another could serve different weights under one
        label.
        """
        version = self._versions.find(label)
        if version is None or version.owned:
            return
        manifest = self._cluster.view.manifests.get(label)
        if manifest and not await same_files(manifest, version.path):
            raise WeightsRefused(CHANGED_FILES)

    @property
    def needs_reannounce(self) -> bool:
        """True if the cluster registry was reset after the last complete `sync`."""
        return self._synced_at < self._registry_reset_at

    async def sync(self, view: ClusterView) -> None:
        """Retry the pending withdrawals and announcements of versions."""
        await self._withdraw()
        all_announced = True
        for version in self._unannounced(view):
            all_announced &= await self._announce_again(version)
        if all_announced:
            self._synced_at = view.view_number

    def on_view(self, view: ClusterView) -> None:
        """Record a reset of the cluster registry, and drop view numbers older than this view."""
        if not view.known:
            self._registry_reset_at = view.view_number
        self._changed_at = {
            label: number
            for label, number in self._changed_at.items()
            if number >= view.view_number
        }

    def _unannounced(self, view: ClusterView) -> list[Version]:
        """Versions whose announcement failed, or was lost in a registry reset."""
        versions = filter(is_published, self._versions.all())
        return [
            version
            for version in versions
            if not version.announced
            or (self.needs_reannounce and version.label not in view.manifests)
        ]

    async def _announce_again(self, version: Version) -> bool:
        """Try to announce a version; returns False if another attempt is needed."""
        if not self._replica_status.is_due(version.label):
            return False
        try:
            announced = await self.announce(version)
        except VersionConflict as conflict:
            self._replica_status.on_failure(version.label, str(conflict))
            self._cluster.request_heartbeat()
            return True
        if self._versions.find(version.label) is not None:
            self._versions.announced(version.label, announced)
        return announced

    async def _withdraw(self) -> None:
        """Send the pending withdrawals of deleted versions to the cluster registry.

        Call it before a publication, because a label can be published again immediately.
        Withdrawals are sent one at a time.
        """
        async with self._withdrawing:
            while self._pending_withdrawals:
                label = next(iter(self._pending_withdrawals))
                await self._cluster.registry.withdraw(label)
                self._changed_at[label] = self._cluster.last_view_number
                self._pending_withdrawals.discard(label)

    async def _publish(self, manifest: Manifest) -> None:
        """Publish a version's manifest in the cluster registry.

        A heartbeat is sent first: it lists this replica as a holder, so replicas that see the
        manifest can find the files. A conflict with a manifest of the same files and sequence
        number is not an error.
        """
        await self._withdraw()
        await self._cluster.refresh()
        try:
            await self._cluster.registry.publish(manifest)
        except ManifestConflict as conflict:
            known = (await self._cluster.refresh()).manifests.get(manifest.version)
            registered = None if known is None else (known.files, known.sequence)
            if registered != (manifest.files, manifest.sequence):
                raise VersionConflict(str(conflict)) from conflict
