"""Tells the directory of the versions that this replica has, and that they are gone."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from service.cluster.membership import ClusterMembership
from service.cluster.registry import ClusterView, Manifest, ManifestConflict, RegistryUnavailable
from service.http.errors import VersionConflict
from service.weights.replication.manifests import is_published, manifest_of
from service.weights.versions import Version, Versions


class Announcer:
    """What could not be told is told again, and so is what the directory has forgotten."""

    def __init__(self, fleet: ClusterMembership, versions: Versions) -> None:
        self._fleet = fleet
        self._versions = versions
        self._announced_at: dict[str, int] = {}
        self._withdrawn_at: dict[str, int] = {}
        self._pending_withdrawals: set[str] = set()
        self._withdrawing = asyncio.Lock()
        self._registry_reset_at = 0
        self._synced_at = 0
        fleet.view_listeners.append(self._on_view)

    async def announce(self, version: Version) -> bool:
        """Whether the others know now. VersionConflict if they know another by its name."""
        manifest = await asyncio.to_thread(manifest_of, version)
        try:
            await self._publish(manifest)
        except RegistryUnavailable:
            return False
        self._announced_at[version.label] = self._fleet.last_view_number
        self._withdrawn_at.pop(version.label, None)
        return True

    def predates_announcement(self, view: ClusterView, label: str) -> bool:
        """Whether the look may have begun before the others were told of the version from here."""
        return view.view_number <= self._announced_at.get(label, -1)

    def is_withdrawn(self, view: ClusterView, label: str) -> bool:
        """Whether it was deleted here, though the look may still show it."""
        return label in self._pending_withdrawals or view.view_number <= self._withdrawn_at.get(
            label, -1
        )

    async def on_deleted(self, label: str) -> None:
        """The others hear of it now, or when there is a directory again."""
        self._announced_at.pop(label, None)
        self._pending_withdrawals.add(label)
        with suppress(RegistryUnavailable):
            await self.withdraw()

    async def withdraw(self) -> None:
        """One at a time, and before what is published: a name may be given anew at once."""
        async with self._withdrawing:
            while self._pending_withdrawals:
                label = next(iter(self._pending_withdrawals))
                await self._fleet.registry.withdraw(label)
                self._withdrawn_at[label] = self._fleet.last_view_number
                self._pending_withdrawals.discard(label)

    @property
    def needs_reannounce(self) -> bool:
        """What this replica has told the directory may have to be told again."""
        return self._synced_at < self._registry_reset_at

    async def sync(
        self, view: ClusterView, announce_one: Callable[[Version], Awaitable[bool]]
    ) -> None:
        """`announce_one` says whether there is no more to tell of it."""
        await self.withdraw()
        all_announced = True
        for version in self._unannounced(view):
            all_announced &= await announce_one(version)
        if all_announced:
            self._synced_at = view.view_number

    def _on_view(self, view: ClusterView) -> None:
        """Of the sights that come while others work, only the last one is looked at: that one of
        them was the first after a loss must not be missed. The next ones have begun later."""
        if not view.known:
            self._registry_reset_at = view.view_number
        self._announced_at = _since_view(view, self._announced_at)
        self._withdrawn_at = _since_view(view, self._withdrawn_at)

    def _unannounced(self, view: ClusterView) -> list[Version]:
        """The directory did not answer when it was to be told, or has forgotten."""
        versions = filter(is_published, self._versions.all())
        return [
            version
            for version in versions
            if not version.announced
            or (self.needs_reannounce and version.label not in view.manifests)
        ]

    async def _publish(self, manifest: Manifest) -> None:
        """The same files are the same version, however they came to whom. Whoever hears of it must
        find who gives its files, so this replica says first that it has them."""
        await self.withdraw()
        await self._fleet.refresh()
        try:
            await self._fleet.registry.publish(manifest)
        except ManifestConflict as conflict:
            known = (await self._fleet.refresh()).manifests.get(manifest.version)
            registered = None if known is None else (known.files, known.sequence)
            if registered != (manifest.files, manifest.sequence):
                raise VersionConflict(str(conflict)) from conflict


def _since_view(view: ClusterView, numbers: dict[str, int]) -> dict[str, int]:
    return {
        label: view_number
        for label, view_number in numbers.items()
        if view_number >= view.view_number
    }
