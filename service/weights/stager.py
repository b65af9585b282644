"""Staging of weights: uploaded files or a path become a version checked by the engine.

A version becomes staged only after the engine has checked it against the model, so activation does
not fail on invalid files. Refused weights are deleted.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from coppice.weights.checkpoint_files import INDEX, SINGLE_FILE
from engine.errors import CheckpointRefused
from engine.protocol.weights import Weights
from engine.weights.ipc_tensors import WeightTransfer
from engine.weights.magnitudes import UNKNOWN, Magnitudes, MagnitudeScan
from service.checkpoint_store import (
    DELTA,
    CheckpointStore,
    Upload,
    check_same_files,
    missing_files,
    num_bytes_of,
    sha256_of,
    with_sha256,
)
from service.config.settings import WeightsSettings
from service.errors import BaseUnavailable, VersionConflict, WeightsRefused
from service.observability.metrics import WeightMetrics
from service.weights.replication.announcer import Announcer
from service.weights_versions import Version, Versions

ABANDONED_SECONDS = 3600.0
"""Age of the last file of an incomplete version after which the next upload deletes it."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class IncomingFile:
    """File of a version that is uploaded; with `base` it is a delta relative to that version.

    `digest` is the Content-Digest header. `announced` is set if the version is fetched from another
    replica, which has published it.
    """

    label: str
    sequence: int | None
    digest: str | None
    name: str = SINGLE_FILE
    sharded: bool = False
    base: str | None = None
    announced: bool = False


class WeightStager:
    """Adds and deletes weights versions and their files, one change at a time under a lock."""

    def __init__(
        self,
        engine: Weights,
        versions: Versions,
        checkpoints: CheckpointStore,
        announcer: Announcer,
        metrics: WeightMetrics,
        settings: WeightsSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._versions = versions
        self._checkpoints = checkpoints
        self._retain = settings.retain_superseded
        self._metrics = metrics
        self._announcer = announcer
        self._clock = clock
        self._change_lock = asyncio.Lock()
        self._num_uploads = Counter[str]()

    async def upload(
        self, file: IncomingFile, chunks: AsyncIterator[bytes]
    ) -> tuple[Version, bool]:
        """Add an uploaded file to a version; returns the version and whether the file is new.

        The version that is returned has the checksum of the received file, also of a shard.
        """
        self._versions.sequence_for(file.label, file.sequence)
        if file.base is not None:
            return await self._upload_delta(file, file.base, chunks)
        with self._uploading(file.label):
            self._delete_abandoned()
            scan = MagnitudeScan()
            observers = () if file.sharded else (scan.update,)
            hashes = file.sharded or self._announcer.publishes
            upload = await self._checkpoints.receive(chunks, file.digest, *observers, hashes=hashes)
            async with self._adding(file.label, upload):
                version, is_new = await self._add(file, upload, scan.magnitudes)
                return replace(version, xxh3_128=upload.xxh3_128), is_new

    @contextmanager
    def _uploading(self, label: str) -> Iterator[None]:
        """Context manager in which an incomplete version is not abandoned."""
        self._num_uploads[label] += 1
        try:
            yield
        finally:
            self._num_uploads[label] -= 1
            self._num_uploads += Counter()  # removes labels without uploads

    def _delete_abandoned(self) -> None:
        """Delete versions that are incomplete, and received their last file long ago."""
        oldest = self._clock() - ABANDONED_SECONDS
        for version in self._versions.all():
            is_old = version.state == "incomplete" and version.received_at < oldest
            if is_old and not self._num_uploads[version.label]:
                log.info("%s is deleted: its upload was not completed", version.label)
                self._drop(version.label)

    async def _upload_delta(
        self, file: IncomingFile, base: str, chunks: AsyncIterator[bytes]
    ) -> tuple[Version, bool]:
        """Stage a version of one complete file from an uploaded delta.

        The base cannot be deleted while the delta is applied, because changes are serialized.
        """
        async with self._change_lock:
            await self._compute_digest(base)
        self._versions.get_base(base)
        delta = await self._checkpoints.receive(chunks, file.digest)
        async with self._adding(file.label, delta):
            version = self._versions.get_base(base)
            lineage = await self._checkpoints.lineage(delta)
            if version.digests[SINGLE_FILE] != lineage.base:
                raise BaseUnavailable(f"the delta is not relative to the weights of {base!r} here")
            path = version.path / SINGLE_FILE
            whole = await self._checkpoints.apply_delta_to(path, delta, lineage.result)
            try:
                return await self._add(file, whole, delta=delta)
            finally:
                self._checkpoints.discard(whole)

    async def stage_path(
        self,
        label: str,
        path: str,
        *,
        sequence: int | None,
        fingerprint: str | None = None,
        announced: bool = False,
    ) -> Version:
        """Stage files at a path, which must be those that the publisher's `fingerprint` names.

        A repeated call with the same fingerprint returns the version that the first one has staged.
        """
        directory = self._checkpoints.resolve_allowed(path)
        if fingerprint is not None:
            await asyncio.to_thread(check_same_files, directory, fingerprint)
        async with self._change_lock:
            existing = self._versions.find(label)
            given = (directory, fingerprint)
            is_repeated = existing is not None and (existing.path, existing.fingerprint) == given
            if existing is not None and is_repeated and fingerprint is not None:
                self._versions.sequence_for(label, sequence)
                return existing
            self._check_new(label, sequence)
            await self._check(directory)
            return await self._finish_staging(
                Version(
                    label=label,
                    sequence=self._versions.sequence_for(label, sequence),
                    state="staged",
                    path=directory,
                    num_bytes=num_bytes_of(directory),
                    owned=False,
                    announced=announced,
                    fingerprint=fingerprint,
                )
            )

    async def stage_transfer(
        self, label: str, transfer: WeightTransfer, *, sequence: int | None
    ) -> Version:
        """Stage tensors in a trainer's GPU memory; call `Versions.end_transfer` afterwards."""
        async with self._change_lock:
            self._check_new(label, sequence)
            try:
                await asyncio.to_thread(self._engine.check_tensors, transfer.tensors)
            except CheckpointRefused as refused:
                raise WeightsRefused(str(refused)) from refused
            version = Version(
                label=label,
                sequence=self._versions.sequence_for(label, sequence),
                state="staged",
                path=Path(),
                num_bytes=transfer.num_bytes,
                owned=False,
                has_files=False,
                transfer=transfer,
            )
            return self._versions.put(version)

    @asynccontextmanager
    async def _adding(self, label: str, received: Upload) -> AsyncIterator[None]:
        """Context manager that holds the lock, and finally discards the file unless it was kept.

        Files of a version whose addition fails before it is in the table are deleted.
        """
        try:
            async with self._change_lock:
                try:
                    yield
                except BaseException:
                    if self._versions.find(label) is None:
                        await self._checkpoints.delete(label)
                    raise
        finally:
            self._checkpoints.discard(received)

    async def _compute_digest(self, label: str) -> None:
        """Compute the digest of a version that was received without one, if it has none yet.

        Call it with the lock held. An activation may change the version's state meanwhile.
        """
        version = self._versions.find(label)
        if version is not None and version.owned and not version.digests:
            digest = await asyncio.to_thread(sha256_of, version.path / SINGLE_FILE)
            self._versions.put(replace(self._versions.get(label), digests={SINGLE_FILE: digest}))

    async def revalidate(self, version: Version) -> None:
        """Check a version again if others may have changed its files."""
        if version.may_change:
            await self._check(version.path)

    async def delete(self, label: str, *, sync: bool = True) -> None:
        """Delete a weights version; with `sync` also withdraw it from the cluster registry."""
        async with self._change_lock:
            deletion = self._drop(label)
            if sync:
                await self._announcer.on_deleted(label)
        await deletion  # outside the lock: large files take long

    async def trim(self) -> None:
        """Start to delete the oldest superseded weights versions beyond `retain_superseded`.

        Otherwise a trainer that publishes every step would fill the disk. The caller, an
        activation, does not wait for the deletion of large files.
        """
        async with self._change_lock:
            while (label := self._versions.find_excess(self._retain)) is not None:
                self._drop(label)
                await self._announcer.on_deleted(label)

    async def _add(
        self,
        file: IncomingFile,
        upload: Upload,
        magnitudes: Magnitudes = UNKNOWN,
        delta: Upload | None = None,
    ) -> tuple[Version, bool]:
        self._versions.sequence_for(file.label, file.sequence)
        await self._compute_digest(file.label)
        existing = self._versions.find(file.label)
        if existing is not None:
            upload = await with_sha256(upload)
            if existing.digests.get(file.name) == upload.sha256:
                return existing, False
            if existing.state != "incomplete" or file.name in existing.digests:
                raise VersionConflict("the version already exists with different content")
        digests = dict(existing.digests) if existing else {}
        if upload.sha256 is not None:
            digests[file.name] = upload.sha256
        folder = self._checkpoints.folder(file.label)
        index = upload.path if file.name == INDEX else folder / INDEX
        missing = await missing_files(index, digests) if file.sharded else ()
        self._checkpoints.keep(upload, file.label, file.name)
        received_bytes = (delta or upload).num_bytes
        self._metrics.record_upload(received_bytes, upload.num_bytes)
        if delta is not None:
            self._checkpoints.keep(delta, file.label, DELTA)
        version = Version(
            label=file.label,
            sequence=self._versions.sequence_for(file.label, file.sequence),
            state="incomplete",
            path=folder,
            num_bytes=upload.num_bytes + (existing.num_bytes if existing else 0),
            owned=True,
            received_bytes=received_bytes + (existing.received_bytes if existing else 0),
            base=file.base,
            delta_sha256=None if delta is None else delta.sha256,
            announced=file.announced,
            xxh3_128=None if file.sharded else upload.xxh3_128,
            digests=digests,
            missing_files=missing,
            received_at=self._clock(),
        )
        return await self._validate_and_put(version, magnitudes), True

    async def _validate_and_put(self, version: Version, magnitudes: Magnitudes) -> Version:
        if version.missing_files:
            return self._versions.put(version)
        try:
            await self._check(version.path, magnitudes)
        except WeightsRefused:
            self._versions.forget(version.label)
            raise
        return await self._finish_staging(replace(version, state="staged"))

    async def _finish_staging(self, version: Version) -> Version:
        """Record a version as staged, then announce it to the other replicas.

        In this order, replicas that react to the announcement can already fetch the version.
        """
        self._versions.put(version)
        if version.announced:
            return version
        try:
            announced = await self._announcer.announce(version)
        except VersionConflict:
            await self._drop_unless_active(version.label)
            raise
        self._versions.announced(version.label, announced)
        return self._versions.get(version.label)  # it may have been activated meanwhile

    async def _check(self, path: Path, magnitudes: Magnitudes = UNKNOWN) -> None:
        try:
            await asyncio.to_thread(self._engine.check_weights, path, magnitudes)
        except CheckpointRefused as refused:
            raise WeightsRefused(str(refused)) from refused

    def _check_new(self, label: str, sequence: int | None) -> None:
        self._versions.sequence_for(label, sequence)
        if self._versions.find(label) is not None:
            raise VersionConflict("the version already exists")

    async def _drop_unless_active(self, label: str) -> None:
        """Drop a version that could not be published, unless it was activated meanwhile."""
        if label == self._versions.active.label or self._versions.is_activating(label):
            log.warning("%s is active on this replica only: it conflicts with another one", label)
        else:
            await self._drop(label)

    def _drop(self, label: str) -> asyncio.Future[None]:
        """Remove a version from the table, and start the deletion of its files."""
        self._versions.remove(label)
        return self._checkpoints.delete(label)
