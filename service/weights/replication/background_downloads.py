"""Background downloads of published versions that this replica lacks, one task per version.

A peer can be slow or stall until its timeout. Separate tasks keep that from delaying other
downloads, and the announcement and activation of versions that are already here.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from service.cluster.membership import ClusterMembership
from service.cluster.registry import ClusterView, Manifest
from service.cluster.replica_status import ReplicaStatus
from service.errors import VersionConflict
from service.versions import Versions
from service.weights.replication.announcer import Announcer
from service.weights.replication.downloader import DownloadFailed, WeightsDownloader

log = logging.getLogger(__name__)
FailureReason = str | None
STOPPING = "this replica is shutting down"


class Fetcher:
    """Downloads missing versions in background tasks, which are cancelled when `running` exits.

    Every cluster view is processed.
    """

    def __init__(
        self,
        cluster: ClusterMembership,
        versions: Versions,
        downloader: WeightsDownloader,
        replica_status: ReplicaStatus,
        announcer: Announcer,
    ) -> None:
        self._cluster = cluster
        self._versions = versions
        self._downloader = downloader
        self._replica_status = replica_status
        self._announcer = announcer
        self._in_progress: dict[str, asyncio.Task[FailureReason]] = {}
        self._open = False
        cluster.view_listeners.append(self.on_view)

    @property
    def in_progress(self) -> Collection[str]:
        return self._in_progress.keys()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._open = True
        try:
            yield
        finally:
            self._open = False
            tasks = list(self._in_progress.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def ensure_present(self, label: str) -> None:
        """Download a published version that this replica lacks; VersionConflict on failure."""
        manifest = self._cluster.view.manifests.get(label)
        if manifest is None or not self._is_missing(manifest):
            return
        if not self._open:
            raise _fetch_failed(STOPPING)
        task = self._start(manifest)
        await asyncio.wait({task})
        failure = STOPPING if task.cancelled() else task.result()
        if failure is not None:
            raise _fetch_failed(failure)

    def on_view(self, view: ClusterView) -> None:
        """Start the downloads that a cluster view requires and that are not in progress."""
        for manifest in self._versions_to_fetch(view) if self._open else ():
            self._start(manifest)

    def _versions_to_fetch(self, view: ClusterView) -> list[Manifest]:
        """Manifests to download now: the activation target first, then all newer versions.

        Versions older than the active one are skipped. A version whose base is still to be
        downloaded is deferred, so that it can be fetched as a delta.
        """
        due = [
            manifest
            for manifest in view.manifests.values()
            if self._is_missing(manifest)
            and self._replica_status.is_due(manifest.version)
            and not self._announcer.is_withdrawn(view, manifest.version)
        ]
        target = view.target
        target_manifest = None if target is None else view.manifests.get(target.version)
        if target_manifest is not None and target_manifest in due:
            return [target_manifest]
        min_sequence = max(
            self._versions.active.sequence,
            0 if target_manifest is None else target_manifest.sequence,
        )
        newer = sorted(
            (manifest for manifest in due if manifest.sequence > min_sequence),
            key=lambda manifest: manifest.sequence,
        )
        later = {manifest.version for manifest in newer} | self._in_progress.keys()
        return [manifest for manifest in newer if manifest.base not in later]

    def _is_missing(self, manifest: Manifest) -> bool:
        version = self._versions.find(manifest.version)
        return version is None or version.state == "incomplete"

    def _start(self, manifest: Manifest) -> asyncio.Task[FailureReason]:
        label = manifest.version
        if label not in self._in_progress:
            task = asyncio.create_task(self._fetch_safely(manifest), name=f"fetch-{label}")
            self._in_progress[label] = task
            task.add_done_callback(lambda _: self._in_progress.pop(label))
        return self._in_progress[label]

    async def _fetch_safely(self, manifest: Manifest) -> FailureReason:
        """Download a version and record the outcome; any exception counts as a failure."""
        try:
            failure = await self._download(manifest)
        except Exception:
            log.exception("fetching %s failed", manifest.version)
            failure = "internal error"
        if failure is None:
            self._replica_status.on_success(manifest.version)
            self._cluster.start_fast_heartbeats()
        else:
            self._replica_status.on_failure(manifest.version, failure)
            self._cluster.request_heartbeat()
        return failure

    async def _download(self, manifest: Manifest) -> FailureReason:
        replicas = self._cluster.view.replicas.values()
        others = [replica for replica in replicas if replica.id != self._cluster.own_id]
        try:
            await self._downloader.download(manifest, others)
        except DownloadFailed as failure:
            return str(failure)
        return None


def _fetch_failed(reason: str) -> VersionConflict:
    return VersionConflict(f"this replica could not fetch the version: {reason}")
