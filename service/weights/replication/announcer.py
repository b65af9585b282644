"""Tells the directory of the versions that this replica has, and that they are gone."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from service.cluster.membership import Fleet
from service.cluster.registry import DirectoryLost, Manifest, ManifestConflict, Sight
from service.http.errors import VersionConflict
from service.weights.replication.manifests import is_published, manifest_of
from service.weights.versions import Version, Versions


class Telling:
    """What could not be told is told again, and so is what the directory has forgotten."""

    def __init__(self, fleet: Fleet, versions: Versions) -> None:
        self._fleet = fleet
        self._versions = versions
        self._told: dict[str, int] = {}
        self._withdrawn: dict[str, int] = {}
        self._dropped: set[str] = set()
        self._withdrawing = asyncio.Lock()
        self._forgot_at = 0
        self._told_again_at = 0
        fleet.watchers.append(self._saw)

    async def announce(self, version: Version) -> bool:
        """Whether the others know now. VersionConflict if they know another by its name."""
        manifest = await asyncio.to_thread(manifest_of, version)
        try:
            await self._publish(manifest)
        except DirectoryLost:
            return False
        self._told[version.label] = self._fleet.last_number
        self._withdrawn.pop(version.label, None)
        return True

    def is_older(self, sight: Sight, label: str) -> bool:
        """Whether the look may have begun before the others were told of the version from here."""
        return sight.number <= self._told.get(label, -1)

    def is_withdrawn(self, sight: Sight, label: str) -> bool:
        """Whether it was deleted here, though the look may still show it."""
        return label in self._dropped or sight.number <= self._withdrawn.get(label, -1)

    async def dropped(self, label: str) -> None:
        """The others hear of it now, or when there is a directory again."""
        self._told.pop(label, None)
        self._dropped.add(label)
        with suppress(DirectoryLost):
            await self.withdraw()

    async def withdraw(self) -> None:
        """One at a time, and before what is published: a name may be given anew at once."""
        async with self._withdrawing:
            while self._dropped:
                label = next(iter(self._dropped))
                await self._fleet.directory.withdraw(label)
                self._withdrawn[label] = self._fleet.last_number
                self._dropped.discard(label)

    @property
    def forgotten(self) -> bool:
        """What this replica has told the directory may have to be told again."""
        return self._told_again_at < self._forgot_at

    async def tell(self, sight: Sight, tell_of: Callable[[Version], Awaitable[bool]]) -> None:
        """`tell_of` says whether there is no more to tell of it."""
        await self.withdraw()
        all_told = True
        for version in self._untold(sight):
            all_told &= await tell_of(version)
        if all_told:
            self._told_again_at = sight.number

    def _saw(self, sight: Sight) -> None:
        """Of the sights that come while others work, only the last one is looked at: that one of
        them was the first after a loss must not be missed. The next ones have begun later."""
        if not sight.known:
            self._forgot_at = sight.number
        self._told = _not_before(sight, self._told)
        self._withdrawn = _not_before(sight, self._withdrawn)

    def _untold(self, sight: Sight) -> list[Version]:
        """The directory did not answer when it was to be told, or has forgotten."""
        versions = filter(is_published, self._versions.all())
        return [
            version
            for version in versions
            if not version.announced or (self.forgotten and version.label not in sight.manifests)
        ]

    async def _publish(self, manifest: Manifest) -> None:
        """The same files are the same version, however they came to whom. Whoever hears of it must
        find who gives its files, so this replica says first that it has them."""
        await self.withdraw()
        await self._fleet.seen()
        try:
            await self._fleet.directory.publish(manifest)
        except ManifestConflict as conflict:
            known = (await self._fleet.seen()).manifests.get(manifest.version)
            theirs = None if known is None else (known.files, known.sequence)
            if theirs != (manifest.files, manifest.sequence):
                raise VersionConflict(str(conflict)) from conflict


def _not_before(sight: Sight, numbers: dict[str, int]) -> dict[str, int]:
    return {label: number for label, number in numbers.items() if number >= sight.number}
