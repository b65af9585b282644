"""Publication of this replica's weights versions in the cluster registry, and their withdrawal."""

import asyncio
import base64
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from coppice.weights.checkpoint_files import INDEX
from service.checkpoint_store import sha256_of
from service.cluster.membership import ClusterMembership
from service.cluster.registry import (
    ClusterView,
    Manifest,
    ManifestConflict,
    ManifestFile,
    RegistryUnavailable,
)
from service.errors import VersionConflict, WeightsRefused
from service.versions import Version, Versions

CHANGED_FILES = "the files differ from the published ones"
DELTA = "delta.safetensors"
"""Name under which a replica serves the delta from which a version was uploaded."""


class Announcer:
    """Publishes this replica's weights versions in the cluster registry, and withdraws them.

    Retries failures, and publishes again after a reset of the registry.
    """

    def __init__(self, cluster: ClusterMembership, versions: Versions) -> None:
        self._cluster = cluster
        self._versions = versions
        self._announced_at: dict[str, int] = {}
        self._withdrawn_at: dict[str, int] = {}
        self._pending_withdrawals: set[str] = set()
        self._withdrawing = asyncio.Lock()
        self._registry_reset_at = 0
        self._synced_at = 0
        cluster.view_listeners.append(self._on_view)

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
        manifest = await asyncio.to_thread(manifest_of, version)
        try:
            await self._publish(manifest)
        except RegistryUnavailable:
            return False
        self._announced_at[version.label] = self._cluster.last_view_number
        self._withdrawn_at.pop(version.label, None)
        self._cluster.start_fast_heartbeats()
        return True

    def predates_announcement(self, view: ClusterView, label: str) -> bool:
        """Return True if the cluster view may be older than the announcement of the version."""
        return view.view_number <= self._announced_at.get(label, -1)

    def is_withdrawn(self, view: ClusterView, label: str) -> bool:
        """Return True if the cluster view may still list a version that this replica deleted."""
        return label in self._pending_withdrawals or view.view_number <= self._withdrawn_at.get(
            label, -1
        )

    async def on_deleted(self, label: str) -> None:
        """Withdraw a deleted version from the cluster registry, later if that is unavailable."""
        if self._cluster.is_standalone:
            return
        self._announced_at.pop(label, None)
        self._pending_withdrawals.add(label)
        with suppress(RegistryUnavailable):
            await self.withdraw()

    async def withdraw(self) -> None:
        """Send the pending withdrawals of deleted versions to the cluster registry.

        Call it before a publication, because a label can be published again immediately.
        Withdrawals are sent one at a time.
        """
        async with self._withdrawing:
            while self._pending_withdrawals:
                label = next(iter(self._pending_withdrawals))
                await self._cluster.registry.withdraw(label)
                self._withdrawn_at[label] = self._cluster.last_view_number
                self._pending_withdrawals.discard(label)

    async def check_unchanged(self, label: str) -> None:
        """Raise WeightsRefused if a version in a shared directory differs from its manifest.

        Otherwise replicas that load it one after another could serve different weights under one
        label.
        """
        version = self._versions.find(label)
        if version is None or version.owned:
            return
        manifest = self._cluster.view.manifests.get(label)
        if manifest and not await asyncio.to_thread(same_files, manifest, version.path):
            raise WeightsRefused(CHANGED_FILES)

    @property
    def needs_reannounce(self) -> bool:
        """True if the cluster registry was reset after the last complete `sync`."""
        return self._synced_at < self._registry_reset_at

    async def sync(
        self, view: ClusterView, announce_one: Callable[[Version], Awaitable[bool]]
    ) -> None:
        """Retry the pending withdrawals and announcements of versions.

        `announce_one` returns True if the version needs no further announcement.
        """
        await self.withdraw()
        all_announced = True
        for version in self._unannounced(view):
            all_announced &= await announce_one(version)
        if all_announced:
            self._synced_at = view.view_number

    def _on_view(self, view: ClusterView) -> None:
        """Record a reset of the cluster registry, and drop view numbers older than this view.

        The follower processes only the latest of several views, so a reset must be recorded for
        each view here.
        """
        if not view.known:
            self._registry_reset_at = view.view_number
        self._announced_at = _since_view(view, self._announced_at)
        self._withdrawn_at = _since_view(view, self._withdrawn_at)

    def _unannounced(self, view: ClusterView) -> list[Version]:
        """Versions whose announcement failed, or was lost in a registry reset."""
        versions = filter(is_published, self._versions.all())
        return [
            version
            for version in versions
            if not version.announced
            or (self.needs_reannounce and version.label not in view.manifests)
        ]

    async def _publish(self, manifest: Manifest) -> None:
        """Publish a version's manifest in the cluster registry.

        A heartbeat is sent first: it lists this replica as a holder, so replicas that see the
        manifest can find the files. A conflict with a manifest of the same files and sequence
        number is not an error.
        """
        await self.withdraw()
        await self._cluster.refresh()
        try:
            await self._cluster.registry.publish(manifest)
        except ManifestConflict as conflict:
            known = (await self._cluster.refresh()).manifests.get(manifest.version)
            registered = None if known is None else (known.files, known.sequence)
            if registered != (manifest.files, manifest.sequence):
                raise VersionConflict(str(conflict)) from conflict


def manifest_of(version: Version) -> Manifest:
    """Create a version's manifest. Blocking: hashes the files if they were not uploaded."""
    folder = version.path
    digests = dict(version.digests) if version.owned else _digests(folder)
    sizes = {name: _file(folder, name).stat().st_size for name in digests}
    files = tuple(
        ManifestFile(name=name, sha256=digests[name], num_bytes=sizes[name])
        for name in sorted(digests, key=lambda name: (name != INDEX, name))
    )
    delta = None
    if version.delta_sha256 is not None:
        size = version.received_bytes
        delta = ManifestFile(name=DELTA, sha256=version.delta_sha256, num_bytes=size)
    return Manifest(
        version=version.label,
        sequence=version.sequence,
        files=files,
        base=version.base,
        delta=delta,
        path=None if version.owned else str(folder),
    )


def same_files(manifest: Manifest, path: Path) -> bool:
    """Return True if the files at a path match the manifest; False if unreadable. Blocking."""
    try:
        return _digests(path) == {file.name: file.sha256 for file in manifest.files}
    except OSError:
        return False


def is_published(version: Version) -> bool:
    """Return True for versions to publish: complete ones, except the engine's initial weights."""
    return version.state != "incomplete" and (version.owned or version.sequence > 0)


def was_withdrawn(version: Version, view: ClusterView) -> bool:
    """Return True if an announced version left the registry, or is there with other files."""
    if version.state == "active" or not version.announced:
        return False
    vanished = version.state != "superseded" and version.label not in view.manifests
    return vanished or (version.state != "incomplete" and conflicts_with_manifest(version, view))


def conflicts_with_manifest(version: Version, view: ClusterView) -> bool:
    """Return True if the cluster registry lists other files under the version's label.

    Always False for versions in shared directories, which `same_files` compares.
    """
    manifest = view.manifests.get(version.label)
    if manifest is None or not version.owned:
        return False
    return {file.name: file.sha256 for file in manifest.files} != dict(version.digests)


def digest_header(sha256: str) -> str:
    """Content-Digest header (RFC 9530) for a SHA-256 given in hexadecimal."""
    return f"sha-256=:{base64.b64encode(bytes.fromhex(sha256)).decode()}:"


def _since_view(view: ClusterView, numbers: dict[str, int]) -> dict[str, int]:
    return {
        label: view_number
        for label, view_number in numbers.items()
        if view_number >= view.view_number
    }


def _digests(path: Path) -> dict[str, str]:
    """SHA-256 by file name, of a single file or of the files in a checkpoint directory."""
    if path.is_file():
        return {path.name: sha256_of(path)}
    files = [*path.glob("*.safetensors"), *path.glob(INDEX)]
    return {file.name: sha256_of(file) for file in files}


def _file(folder: Path, name: str) -> Path:
    return folder if folder.is_file() else folder / name
