"""Download of a weights version: from a shared directory, or from a replica that holds its files.

Files are handled as uploads: streamed to disk, hashed, compared with the manifest's digest and
checked against the model. The version is then staged, or its files are deleted. The source
therefore need not be trusted.
"""

import asyncio
import logging
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Literal

import httpx

from coppice.weights.checkpoint_files import SINGLE_FILE
from service.checkpoint_store import CheckpointStore, validate_file_name
from service.cluster.registry import Manifest, ManifestFile, Replica
from service.config.allowed_peers import Peers
from service.config.settings import WeightsSettings
from service.errors import DigestMismatch, ServiceError, WeightsRefused
from service.http.params import label
from service.versions import Version
from service.weights.replication.announcer import CHANGED_FILES, digest_header, same_files
from service.weights.stager import WeightStager

FetchMethod = Literal["path", "delta", "full", "failed"]
CONNECT_TIMEOUT_SECONDS = 5.0
READ_TIMEOUT_SECONDS = 30.0
BLOCK_BYTES = 2**20  # minimum progress per READ_TIMEOUT_SECONDS
_SHA256 = re.compile(r"[0-9a-f]{64}")

log = logging.getLogger(__name__)


class DownloadFailed(Exception):
    """Download of a version failed, perhaps temporarily. The message contains no addresses."""


class WeightsDownloader:
    """Downloads weights versions from shared directories or other replicas, and stages them.

    `on_fetched` is called with the method by which each version was fetched, or "failed".
    """

    def __init__(
        self,
        stager: WeightStager,
        checkpoints: CheckpointStore,
        settings: WeightsSettings,
        *,
        on_fetched: Callable[[FetchMethod], None],
    ) -> None:
        self._stager = stager
        self._checkpoints = checkpoints
        self._peers = Peers(settings.peers, settings.peer_key_file)
        self._max_file_bytes = settings.max_upload_bytes
        self._on_fetched = on_fetched

    async def download(self, manifest: Manifest, replicas: Sequence[Replica]) -> Version:
        """Download a version as described by its manifest, and stage it; raises DownloadFailed.

        After a failure, the complete files of a sharded version remain, and the next attempt adds
        the others; nothing else remains.
        """
        try:
            _check(manifest, self._max_file_bytes)
            return await self._download(manifest, replicas)
        except (ServiceError, DownloadFailed) as error:
            self._on_fetched("failed")
            raise DownloadFailed(str(error)) from error

    async def _download(self, manifest: Manifest, replicas: Sequence[Replica]) -> Version:
        if manifest.path is not None:
            return await self._stage_from_path(manifest, manifest.path)
        holders = [r for r in replicas if manifest.version in r.holds]
        known = [r for r in holders if self._peers.allows(r.url)]
        if not known:
            allowed = " at an address that weights.peers allows" if holders else ""
            raise DownloadFailed(f"no other replica{allowed} has the files")
        random.shuffle(known)  # spread the downloads over the holders
        failure = DownloadFailed("")
        for replica in known:
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

    async def _stage_from_path(self, manifest: Manifest, path: str) -> Version:
        resolved = self._checkpoints.resolve_allowed(path)
        if not await asyncio.to_thread(same_files, manifest, resolved):
            raise DigestMismatch(CHANGED_FILES)
        staged = await self._stager.stage_path(
            manifest.version, path, sequence=manifest.sequence, announced=True
        )
        self._on_fetched("path")
        return staged

    async def _download_from(self, replica: Replica, manifest: Manifest) -> Version:
        async with httpx.AsyncClient(
            base_url=replica.url.rstrip("/"),
            headers=self._peers.headers(),
            timeout=httpx.Timeout(READ_TIMEOUT_SECONDS, connect=CONNECT_TIMEOUT_SECONDS),
            follow_redirects=False,
            trust_env=False,
        ) as peer:
            if manifest.delta is not None and self._stager.is_base(manifest.base):
                try:
                    return await self._download_delta(peer, manifest, manifest.delta)
                except (ServiceError, DownloadFailed) as error:
                    log.warning("download of the delta of %s failed: %s", manifest.version, error)
            return await self._download_files(peer, manifest)

    async def _download_delta(
        self, peer: httpx.AsyncClient, manifest: Manifest, delta: ManifestFile
    ) -> Version:
        assert manifest.base is not None, "checked by the caller"
        version, _ = await self._stager.upload_delta(
            manifest.version,
            manifest.base,
            _chunks(peer, manifest.version, delta),
            sequence=manifest.sequence,
            digest=digest_header(delta.sha256),
            announced=True,
        )
        self._on_fetched("delta")
        return version

    async def _download_files(self, peer: httpx.AsyncClient, manifest: Manifest) -> Version:
        sharded = [file.name for file in manifest.files] != [SINGLE_FILE]
        version = None
        for file in manifest.files:
            version, _ = await self._stager.upload(
                manifest.version,
                file.name,
                _chunks(peer, manifest.version, file),
                sequence=manifest.sequence,
                digest=digest_header(file.sha256),
                sharded=sharded,
                announced=True,
            )
        if version is None or version.state == "incomplete":
            raise DownloadFailed("the manifest does not list all files")
        self._on_fetched("full")
        return version


def _error_text(error: Exception) -> str:
    """Text of a download error without addresses, as callers and other replicas can read it."""
    ours = isinstance(error, ServiceError | DownloadFailed)
    return str(error) if ours else type(error).__name__


def _check(manifest: Manifest, max_file_bytes: int) -> None:
    """Validate the names, digests and sizes in a manifest, as the cluster registry is untrusted."""
    label(manifest.version)
    for file in (*manifest.files, *([manifest.delta] if manifest.delta else [])):
        validate_file_name(file.name)
        if not _SHA256.fullmatch(file.sha256):
            raise DownloadFailed("the manifest contains an invalid SHA-256")
        if file.num_bytes > max_file_bytes:
            raise DownloadFailed("a file is larger than weights.max_upload_bytes")


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
