"""Brings here what others have published and this replica lacks, one task a version.

Who has a version may be slow, or say nothing for as long as it is waited for. Nothing else waits
with it: other versions come meanwhile, and what is here already can be told of, and served.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

from service.cluster.membership import Fleet
from service.cluster.registry import Manifest, Sight
from service.weights.replication.downloader import Pull, PullFailed
from service.weights.replication.load_history import Attempts
from service.weights.versions import Versions

log = logging.getLogger(__name__)

Failure = str | None


class Bringing:
    """Owner of the pulls that run; leaving `running` ends them. `staged` is told that one is here,
    `withdrawn` says what a look shows no more.

    Every sight of the directory is looked at.
    """

    def __init__(
        self,
        fleet: Fleet,
        versions: Versions,
        pull: Pull,
        attempts: Attempts,
        *,
        withdrawn: Callable[[Sight, str], bool],
        staged: Callable[[], None],
    ) -> None:
        self._fleet = fleet
        self._versions = versions
        self._pull = pull
        self._attempts = attempts
        self._withdrawn = withdrawn
        self._staged = staged
        self._coming: dict[str, asyncio.Task[Failure]] = {}
        self._open = False
        fleet.watchers.append(self.look)

    @property
    def coming(self) -> Collection[str]:
        return self._coming.keys()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._open = True
        try:
            yield
        finally:
            self._open = False
            tasks = list(self._coming.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def hold(self, label: str) -> None:
        """Here when it returns, if others have it and this one lacks it. PullFailed."""
        manifest = self._fleet.sight.manifests.get(label)
        if manifest is None or not self._lacks(manifest):
            return
        if not self._open:
            raise PullFailed("this replica stops")
        task = self._start(manifest)
        await asyncio.wait({task})
        failure = "this replica stops" if task.cancelled() else task.result()
        if failure is not None:
            raise PullFailed(failure)

    def look(self, sight: Sight) -> None:
        """Begins what is wanted and is not coming already."""
        for manifest in self._wanted(sight) if self._open else ():
            self._start(manifest)

    def _wanted(self, sight: Sight) -> list[Manifest]:
        """What is ordered; only when that is here, what is newer. Not what was passed over, nor yet
        what came as the changes of one that is still coming."""
        due = [
            manifest
            for manifest in sight.manifests.values()
            if self._lacks(manifest)
            and self._attempts.is_due(manifest.version)
            and not self._withdrawn(sight, manifest.version)
        ]
        order = sight.order
        ordered = None if order is None else sight.manifests.get(order.version)
        if ordered is not None and ordered in due:
            return [ordered]
        passed = max(self._versions.active.sequence, 0 if ordered is None else ordered.sequence)
        newer = sorted(
            (manifest for manifest in due if manifest.sequence > passed),
            key=lambda manifest: manifest.sequence,
        )
        later = {manifest.version for manifest in newer} | self._coming.keys()
        return [manifest for manifest in newer if manifest.base not in later]

    def _lacks(self, manifest: Manifest) -> bool:
        version = self._versions.find(manifest.version)
        return version is None or version.state == "incomplete"

    def _start(self, manifest: Manifest) -> asyncio.Task[Failure]:
        label = manifest.version
        if label not in self._coming:
            task = asyncio.create_task(self._supervised(manifest), name=f"bring-{label}")
            self._coming[label] = task
            task.add_done_callback(lambda _: self._coming.pop(label))
        return self._coming[label]

    async def _supervised(self, manifest: Manifest) -> Failure:
        """Whatever is wrong with one, it is tried again, and the others come."""
        try:
            failure = await self._bring(manifest)
        except Exception:
            log.exception("bringing %s failed", manifest.version)
            failure = "a fault of ours"
        if failure is None:
            self._attempts.well(manifest.version)
            self._staged()
        else:
            self._attempts.failed(manifest.version, failure)
        return failure

    async def _bring(self, manifest: Manifest) -> Failure:
        replicas = self._fleet.sight.replicas.values()
        others = [replica for replica in replicas if replica.id != self._fleet.me]
        try:
            await self._pull.bring(manifest, others)
        except PullFailed as failure:
            return str(failure)
        return None
