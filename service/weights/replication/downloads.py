"""Downloads of weights versions from other replicas or shared directories.

Files are handled as uploads: streamed to disk, hashed, compared with the manifest's digest and
checked against the model. The version is then staged, or its files are deleted. The source
therefore need not be trusted.
"""

import asyncio
import logging
import random
import re
import time
from collections.abc import AsyncIterator

import httpx

from coppice.weights.checkpoint_files import SINGLE_FILE
from service.checkpoint_store import CheckpointStore, validate_file_name
from service.cluster.membership import ClusterMembership
from service.cluster.registry import Manifest, ManifestFile, Replica
from service.cluster.replica_status import ReplicaStatus
from service.config.allowed_peers import Peers
from service.config.settings import WeightsSettings
from service.errors import DigestMismatch, ServiceError, VersionConflict, WeightsRefused
from service.http.params import label
from service.observability.metrics import WeightMetrics
from service.weights.replication.manifests import CHANGED_FILES, digest_header, same_files
from service.weights.stager import IncomingFile, WeightStager
from service.weights_versions import Version, Versions

CONNECT_TIMEOUT_SECONDS = 5.0
READ_TIMEOUT_SECONDS = 30.0
BLOCK_BYTES = 2**20  # minimum progress per READ_TIMEOUT_SECONDS
_SHA256 = re.compile(r"[0-9a-f]{64}")
FailureReason = str | None

log = logging.getLogger(__name__)


class DownloadFailed(Exception):
    """Download of a version failed, perhaps temporarily. The message contains no addresses."""


class Downloads:
    """Downloads of published versions in background tasks, one per version; each is then staged.

    A peer can be slow or stall until its timeout. Separate tasks keep that from delaying other
    downloads, and the announcement and activation of versions that are already here. After a
    failure, the complete files of a sharded version remain, and the next attempt adds the others;
    nothing else remains.
    """

    def __init__(
        self,
        cluster: ClusterMembership,
        versions: Versions,
        stager: WeightStager,
        checkpoints: CheckpointStore,
        replica_status: ReplicaStatus,
        settings: WeightsSettings,
        metrics: WeightMetrics,
    ) -> None:
        self._cluster = cluster
        self._versions = versions
        self._stager = stager
        self._checkpoints = checkpoints
        self._replica_status = replica_status
        self._peers = Peers(settings.peers, settings.peer_key_file)
        self._max_file_bytes = settings.max_upload_bytes
        self._fetches = metrics.fetches
        self._tasks: dict[str, asyncio.Task[FailureReason]] = {}

    @property
    def in_progress(self) -> set[str]:
        return set(self._tasks)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def wait_for(self, manifest: Manifest, seconds: float) -> None:
        """Download a version, or wait for its download; VersionConflict on failure."""
        task = self.start(manifest)
        await asyncio.wait({task}, timeout=seconds)
        if not task.done() or task.cancelled():
            raise VersionConflict("this replica could not fetch the version in time")
        if (failure := task.result()) is not None:
            raise fetch_failed(failure)

    def start(self, manifest: Manifest) -> asyncio.Task[FailureReason]:
        """Start the download of a version unless it is in progress; returns its task."""
        name = manifest.version
        if name not in self._tasks:
            task = asyncio.create_task(self._fetch(manifest), name=f"fetch-{name}")
            self._tasks[name] = task
            task.add_done_callback(lambda _: self._tasks.pop(name))
        return self._tasks[name]

    async def _fetch(self, manifest: Manifest) -> FailureReason:
        """Download a version and record the outcome; any exception counts as a failure."""
        failure: FailureReason = None
        try:
            self._check(manifest)
            await self._download(manifest)
        except (ServiceError, DownloadFailed) as error:
            self._fetches.labels("failed").inc()
            failure = str(error)
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

    def _check(self, manifest: Manifest) -> None:
        """Validate the names, digests and sizes in a manifest: the registry is untrusted."""
        label(manifest.version)
        for file in (*manifest.files, *([manifest.delta] if manifest.delta else [])):
            validate_file_name(file.name)
            if not _SHA256.fullmatch(file.sha256):
                raise DownloadFailed("the manifest contains an invalid SHA-256")
            if file.num_bytes > self._max_file_bytes:
                raise DownloadFailed("a file is larger than weights.max_upload_bytes")

    async def _download(self, manifest: Manifest) -> None:
        if manifest.path is not None:
            return await self._stage_from_path(manifest, manifest.path)
        failure = DownloadFailed("")
        for replica in self._holders(manifest.version):
            try:
                return await self._download_from(replica, manifest)
            except WeightsRefused:
                raise  # the digests match, so every other holder has the same invalid weights
            except (httpx.HTTPError, OSError, ServiceError, DownloadFailed) as error:
                log.warning(
                    "download of %s from %s failed: %s", manifest.version, replica.id, error
                )
                failure = DownloadFailed(f"from {replica.id}: {_error_text(error)}")
        raise failure

    def _holders(self, version: str) -> list[Replica]:
        """Other replicas that have the files of a version, in random order to spread the load."""
        others = [r for r in self._cluster.view.replicas.values() if r.id != self._cluster.own_id]
        holders = [replica for replica in others if version in replica.holds]
        known = [replica for replica in holders if self._peers.allows(replica.url)]
        if not known:
            allowed = " at an address that weights.peers allows" if holders else ""
            raise DownloadFailed(f"no other replica{allowed} has the files")
        random.shuffle(known)
        return known

    async def _stage_from_path(self, manifest: Manifest, path: str) -> None:
        if not await same_files(manifest, self._checkpoints.resolve_allowed(path)):
            raise DigestMismatch(CHANGED_FILES)
        await self._stager.stage_path(
            manifest.version, path, sequence=manifest.sequence, announced=True
        )
        self._fetches.labels("path").inc()

    async def _download_from(self, replica: Replica, manifest: Manifest) -> None:
        async with httpx.AsyncClient(
            base_url=replica.url.rstrip("/"),
            headers=self._peers.headers(),
            timeout=httpx.Timeout(READ_TIMEOUT_SECONDS, connect=CONNECT_TIMEOUT_SECONDS),
            follow_redirects=False,
            trust_env=False,
        ) as peer:
            if manifest.delta is not None and self._versions.is_base(manifest.base):
                try:
                    await self._download_file(peer, manifest, manifest.delta, base=manifest.base)
                    return self._fetches.labels("delta").inc()
                except (ServiceError, DownloadFailed) as error:
                    log.warning("download of the delta of %s failed: %s", manifest.version, error)
            await self._download_files(peer, manifest)

    async def _download_files(self, peer: httpx.AsyncClient, manifest: Manifest) -> None:
        sharded = [file.name for file in manifest.files] != [SINGLE_FILE]
        is_complete = False
        for file in manifest.files:
            version = await self._download_file(
                peer, manifest, file, name=file.name, sharded=sharded
            )
            is_complete = version.state != "incomplete"
        if not is_complete:
            raise DownloadFailed("the manifest does not list all files")
        self._fetches.labels("full").inc()

    async def _download_file(
        self,
        peer: httpx.AsyncClient,
        manifest: Manifest,
        file: ManifestFile,
        *,
        name: str = SINGLE_FILE,
        sharded: bool = False,
        base: str | None = None,
    ) -> Version:
        incoming = IncomingFile(
            label=manifest.version,
            sequence=manifest.sequence,
            digest=digest_header(file.sha256),
            name=name,
            sharded=sharded,
            base=base,
            announced=True,
        )
        chunks = _chunks(peer, manifest.version, file)
        version, _ = await self._stager.upload(incoming, chunks)
        return version


def fetch_failed(reason: str) -> VersionConflict:
    return VersionConflict(f"this replica could not fetch the version: {reason}")


def _error_text(error: Exception) -> str:
    """Text of a download error without addresses, as callers and other replicas can read it."""
    ours = isinstance(error, ServiceError | DownloadFailed)
    return str(error) if ours else type(error).__name__


async def _chunks(
    peer: httpx.AsyncClient,
    version: str,
    file: ManifestFile,
    *,
    block_seconds: float = READ_TIMEOUT_SECONDS,
) -> AsyncIterator[bytes]:
    """Stream a file from a peer; fails above the manifest's size and below a minimum rate.

    Without the minimum rate, a very slow peer would prevent a download from another one.
    """
    path = f"/v1/weights/{version}/files/{file.name}"
    async with peer.stream("GET", path, headers={"Accept-Encoding": "identity"}) as answer:
        if answer.status_code != 200:
            raise DownloadFailed(f"HTTP status {answer.status_code}")
        num_bytes, block_bytes, began = 0, 0, time.monotonic()
        async for chunk in answer.aiter_raw():
            num_bytes += len(chunk)
            block_bytes += len(chunk)
            if num_bytes > file.num_bytes:
                raise DownloadFailed("the file is larger than in the manifest")
            if block_bytes < BLOCK_BYTES and time.monotonic() - began > block_seconds:
                raise DownloadFailed(
                    f"less than {BLOCK_BYTES} bytes received in {block_seconds:g} s"
                )
            yield chunk
            if block_bytes >= BLOCK_BYTES:
                block_bytes, began = 0, time.monotonic()
