"""Staging of weights: from uploaded bytes or a path to a version that can be activated.

A version becomes staged only after the engine has checked it against the model, so activation does
not fail on invalid files. Refused weights are deleted.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

from coppice.weights import checkpoint_files
from coppice.weights.checkpoint_files import INDEX, SINGLE_FILE
from engine.errors import CheckpointRefused
from engine.protocol.weights import Weights
from engine.weights.ipc_tensors import WeightTransfer
from engine.weights.magnitudes import UNKNOWN, Magnitudes, MagnitudeScan
from service.checkpoint_store import (
    DELTA,
    CheckpointStore,
    IncomingFile,
    Upload,
    hashed,
    missing_files,
    num_bytes_of,
    sha256_of,
)
from service.errors import BaseUnavailable, PathRefused, VersionConflict, WeightsRefused
from service.versions import Version, Versions
from service.weights.replication.announcer import Announcer

OnReceived = Callable[[int, int], None]
"""Callback for each received file: bytes received, and bytes of the resulting file."""

ABANDONED_SECONDS = 3600.0
"""Age of the last file of an incomplete version after which the next upload deletes it."""

log = logging.getLogger(__name__)


class WeightStager:
    """Adds and deletes weights versions and their files, one change at a time under a lock."""

    def __init__(
        self,
        engine: Weights,
        versions: Versions,
        checkpoints: CheckpointStore,
        announcer: Announcer,
        *,
        retain_superseded: int,
        on_received: OnReceived,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._versions = versions
        self._checkpoints = checkpoints
        self._retain = retain_superseded
        self._on_received = on_received
        self._announcer = announcer
        self._clock = clock
        self._change_lock = asyncio.Lock()
        self._num_uploads = Counter[str]()

    async def upload(
        self,
        label: str,
        name: str,
        chunks: AsyncIterator[bytes],
        *,
        sequence: int | None,
        digest: str | None,
        sharded: bool,
        announced: bool = False,
    ) -> tuple[Version, bool]:
        """Add an uploaded file to a version; returns the version and whether the file is new.

        The version that is returned has the checksum of the received file, also of a shard.
        `announced` is set if the version was fetched from another replica, which published it.
        """
        self._check_sequence(label, sequence)
        with self._uploading(label):
            self._delete_abandoned()
            upload, scan = await self._receive(chunks, digest, sharded=sharded)
            try:
                async with self._change_lock, self._delete_unless_listed(label):
                    version, is_new = await self._add(
                        label,
                        name,
                        upload,
                        sequence=sequence,
                        sharded=sharded,
                        announced=announced,
                        magnitudes=scan.magnitudes,
                    )
                    return replace(version, xxh3_128=upload.xxh3_128), is_new
            finally:
                self._checkpoints.discard(upload)

    async def _receive(
        self, chunks: AsyncIterator[bytes], digest: str | None, *, sharded: bool
    ) -> tuple[IncomingFile, MagnitudeScan]:
        """Receive a file, and find the magnitudes of its tensors unless it is a shard."""
        scan = MagnitudeScan()
        if sharded:
            return await self._checkpoints.receive(chunks, digest), scan
        if digest is None and not self._announcer.publishes:
            return await self._checkpoints.receive_unhashed(chunks, scan.update), scan
        return await self._checkpoints.receive(chunks, digest, scan.update), scan

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

    async def upload_delta(
        self,
        label: str,
        base: str,
        chunks: AsyncIterator[bytes],
        *,
        sequence: int | None,
        digest: str | None,
        announced: bool = False,
    ) -> tuple[Version, bool]:
        """Stage a version from an uploaded delta; returns the version and whether it is new.

        The result is a version of one complete file. The base cannot be deleted meanwhile, because
        changes are serialized.
        """
        self._check_sequence(label, sequence)
        async with self._change_lock:
            await self._compute_digest(base)
        self._get_base(base)
        delta = await self._checkpoints.receive(chunks, digest)
        try:
            async with self._change_lock, self._delete_unless_listed(label):
                return await self._add_from_delta(label, base, delta, sequence, announced)
        finally:
            self._checkpoints.discard(delta)

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
            await asyncio.to_thread(_check_same_files, directory, fingerprint)
        async with self._change_lock:
            existing = self._versions.find(label)
            given = (directory, fingerprint)
            is_repeated = existing is not None and (existing.path, existing.fingerprint) == given
            if existing is not None and is_repeated and fingerprint is not None:
                self._check_sequence(label, sequence)
                return existing
            self._check_new(label, sequence)
            await self._check(directory)
            return await self._finish_staging(
                Version(
                    label=label,
                    sequence=self._sequence(label, sequence),
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
                sequence=self._sequence(label, sequence),
                state="staged",
                path=Path(),
                num_bytes=transfer.num_bytes,
                owned=False,
                has_files=False,
                transfer=transfer,
            )
            return self._versions.put(version)

    @asynccontextmanager
    async def _delete_unless_listed(self, label: str) -> AsyncIterator[None]:
        """Delete the files of a version whose addition fails before it is in the table."""
        try:
            yield
        except BaseException:
            if self._versions.find(label) is None:
                await self._checkpoints.delete(label)
            raise

    async def _compute_digest(self, label: str) -> None:
        """Compute the digest of a version that was received without one, if it has none yet.

        Call it with the lock held. An activation may change the version's state meanwhile.
        """
        version = self._versions.find(label)
        if version is None or not version.owned or version.digests:
            return
        digest = await asyncio.to_thread(sha256_of, version.path / SINGLE_FILE)
        self._versions.put(replace(self._versions.get(label), digests={SINGLE_FILE: digest}))

    async def revalidate(self, version: Version) -> None:
        """Check a version again if its files were not uploaded, since they may have changed."""
        if version.has_files and not version.owned:
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
            while (label := self._find_excess()) is not None:
                self._drop(label)
                await self._announcer.on_deleted(label)

    def _find_excess(self) -> str | None:
        """Label of the oldest superseded version if there are more than `retain_superseded`.

        Uploaded versions and those without files are counted apart.
        """
        removable = [
            version
            for version in self._versions.all()
            if version.state == "superseded"
            and version.transfer is None
            and not self._versions.is_activating(version.label)
            and not self._versions.is_restorable(version.label)
        ]
        uploaded = [version.label for version in removable if version.owned]
        without_files = [version.label for version in removable if not version.has_files]
        for labels in (uploaded, without_files):
            if len(labels) > self._retain:
                return labels[0]
        return None

    async def _add_from_delta(
        self, label: str, base: str, delta: Upload, sequence: int | None, announced: bool
    ) -> tuple[Version, bool]:
        base_version, lineage = self._get_base(base), await self._checkpoints.lineage(delta)
        if base_version.digests[SINGLE_FILE] != lineage.base:
            raise BaseUnavailable(f"the delta is not relative to the weights of {base!r} here")
        whole = await self._checkpoints.apply_delta_to(
            base_version.path / SINGLE_FILE, delta, lineage.result
        )
        try:
            return await self._add(
                label,
                SINGLE_FILE,
                whole,
                sequence=sequence,
                sharded=False,
                announced=announced,
                base=base,
                delta=delta,
            )
        finally:
            self._checkpoints.discard(whole)

    def is_base(self, label: str | None) -> bool:
        version = None if label is None else self._versions.find(label)
        return version is not None and version.digests.keys() == {SINGLE_FILE}

    def _get_base(self, label: str) -> Version:
        """Find the version that a weight delta is based on; it must have been uploaded as one file.

        The digest is known only for such a file, and only such a file cannot be changed by others.
        """
        if not self.is_base(label):
            raise BaseUnavailable(f"no version {label!r} that was uploaded as one file is here")
        return self._versions.get(label)

    async def _add(
        self,
        label: str,
        name: str,
        upload: IncomingFile,
        *,
        sequence: int | None,
        sharded: bool,
        announced: bool,
        magnitudes: Magnitudes = UNKNOWN,
        base: str | None = None,
        delta: Upload | None = None,
    ) -> tuple[Version, bool]:
        self._check_sequence(label, sequence)
        await self._compute_digest(label)
        existing = self._versions.find(label)
        if existing is not None and not isinstance(upload, Upload):
            upload = await hashed(upload)
        sha256 = upload.sha256 if isinstance(upload, Upload) else None
        if existing is not None and existing.digests.get(name) == sha256:
            return existing, False
        if existing is not None and (existing.state != "incomplete" or name in existing.digests):
            raise VersionConflict("the version already exists with different content")
        digests = dict(existing.digests) if existing else {}
        if sha256 is not None:
            digests[name] = sha256
        index = upload.path if name == INDEX else self._checkpoints.folder(label) / INDEX
        missing = await missing_files(index, digests) if sharded else ()
        folder = self._checkpoints.keep(upload, label, name)
        received_bytes = (delta or upload).num_bytes
        self._on_received(received_bytes, upload.num_bytes)
        if delta is not None:
            self._checkpoints.keep(delta, label, DELTA)
        version = Version(
            label=label,
            sequence=self._sequence(label, sequence),
            state="incomplete",
            path=folder,
            num_bytes=upload.num_bytes + (existing.num_bytes if existing else 0),
            owned=True,
            received_bytes=received_bytes + (existing.received_bytes if existing else 0),
            base=base,
            delta_sha256=None if delta is None else delta.sha256,
            announced=announced,
            xxh3_128=None if sharded else upload.xxh3_128,
            digests=digests,
            missing_files=missing,
            received_at=self._clock(),
        )
        return await self._validate_and_put(version, magnitudes), True

    async def _validate_and_put(
        self, version: Version, magnitudes: Magnitudes = UNKNOWN
    ) -> Version:
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
        self._check_sequence(label, sequence)
        if self._versions.find(label) is not None:
            raise VersionConflict("the version already exists")

    def _check_sequence(self, label: str, sequence: int | None) -> None:
        """Refuse a sequence number that conflicts with the label or with another version.

        Any is refused if the server's weights are random.
        """
        self._versions.check_replaceable()
        existing = self._versions.find(label)
        if sequence is None:
            return
        self._versions.check_sequence(label, sequence)
        if existing is not None and existing.sequence != sequence:
            raise VersionConflict(f"the version has sequence {existing.sequence}")

    def _sequence(self, label: str, sequence: int | None) -> int:
        existing = self._versions.sequence_of(label)
        if sequence is not None:
            return sequence  # equal to that of an existing version, by _check_sequence
        return self._versions.next_sequence() if existing is None else existing

    async def _drop_unless_active(self, label: str) -> None:
        """Drop a version that could not be published, unless it was activated meanwhile."""
        if label == self._versions.active.label or self._versions.is_activating(label):
            log.warning("%s is active on this replica only: it conflicts with another one", label)
        else:
            await self._drop(label)

    def _drop(self, label: str) -> asyncio.Future[None]:
        """Remove a version from the table, and start the deletion of its files."""
        version = self._versions.remove(label)
        if version.owned:
            return self._checkpoints.delete(label)
        nothing = asyncio.get_running_loop().create_future()
        nothing.set_result(None)
        return nothing


def _check_same_files(path: Path, fingerprint: str) -> None:
    """Refuse files that are not the publisher's, whose host may have others at this path."""
    try:
        is_same = checkpoint_files.fingerprint(path) == fingerprint
    except OSError:  # removed meanwhile
        is_same = False
    if not is_same:
        raise PathRefused("the server has other files at this path")
