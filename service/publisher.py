"""Staging of weights: from bytes or a path to a version that could be activated.

A version is staged only after the engine has checked it against the model, so activation meets no
surprises. Refused weights leave nothing behind.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from engine.errors import CheckpointRefused
from engine.protocol import Engine
from service.checkpoints import INDEX, Checkpoints, Upload
from service.errors import VersionConflict, WeightsRefused
from service.versions import Version, Versions


class Publisher:
    """Changes `versions` and `checkpoints` together, one change at a time."""

    def __init__(
        self,
        engine: Engine,
        versions: Versions,
        checkpoints: Checkpoints,
        *,
        retain_superseded: int,
    ) -> None:
        self._engine = engine
        self._versions = versions
        self._checkpoints = checkpoints
        self._retain = retain_superseded
        self._changing = asyncio.Lock()

    async def upload(
        self,
        label: str,
        name: str,
        chunks: AsyncIterator[bytes],
        *,
        sequence: int | None,
        digest: str | None,
        sharded: bool,
    ) -> tuple[Version, bool]:
        """The version as it is now, and whether the file is new to it."""
        self._check_place(label, sequence)
        upload = await self._checkpoints.receive(chunks, digest)
        try:
            async with self._changing:
                return await self._add(label, name, upload, sequence=sequence, sharded=sharded)
        finally:
            self._checkpoints.discard(upload)

    async def stage_path(self, label: str, path: str, *, sequence: int | None) -> Version:
        directory = self._checkpoints.allowed(path)
        async with self._changing:
            self._check_place(label, sequence)
            if self._versions.find(label) is not None:
                raise VersionConflict("the version exists")
            await self._check(directory)
            return self._versions.put(
                Version(
                    label=label,
                    sequence=self._sequence(label, sequence),
                    state="staged",
                    path=directory,
                    num_bytes=_num_bytes(directory),
                    owned=False,
                )
            )

    async def recheck(self, version: Version) -> None:
        """What lies in somebody else's directory may have changed since it was staged."""
        if not version.owned:
            await self._check(version.path)

    async def delete(self, label: str) -> None:
        async with self._changing:
            self._drop(label)

    async def trim(self) -> None:
        """A trainer that publishes every step must not fill the disk."""
        async with self._changing:
            superseded = [v for v in self._versions.all() if v.owned and v.state == "superseded"]
            for version in superseded[: max(0, len(superseded) - self._retain)]:
                self._drop(version.label)

    async def _add(
        self, label: str, name: str, upload: Upload, *, sequence: int | None, sharded: bool
    ) -> tuple[Version, bool]:
        self._check_place(label, sequence)
        known = self._versions.find(label)
        if known is not None and known.digests.get(name) == upload.sha256:
            return known, False
        if known is not None and (known.state != "incomplete" or name in known.digests):
            raise VersionConflict("the version exists with other bytes")
        home = self._checkpoints.keep(upload, label, name)
        digests = {**(known.digests if known else {}), name: upload.sha256}
        version = Version(
            label=label,
            sequence=self._sequence(label, sequence),
            state="incomplete",
            path=home,
            num_bytes=upload.num_bytes + (known.num_bytes if known else 0),
            owned=True,
            digests=digests,
            missing_files=_missing(home, digests) if sharded else (),
        )
        return await self._put_checked(version), True

    async def _put_checked(self, version: Version) -> Version:
        if version.missing_files:
            return self._versions.put(version)
        try:
            await self._check(version.path)
        except WeightsRefused:
            self._checkpoints.delete(version.label)
            self._versions.forget(version.label)
            raise
        return self._versions.put(replace(version, state="staged"))

    async def _check(self, path: Path) -> None:
        try:
            await asyncio.to_thread(self._engine.check_weights, path)
        except CheckpointRefused as refused:
            raise WeightsRefused(str(refused)) from refused

    def _check_place(self, label: str, sequence: int | None) -> None:
        """Before the first byte is read: a label keeps its sequence, a sequence its label."""
        known = self._versions.find(label)
        if sequence is None:
            return
        self._versions.check_sequence(label, sequence)
        if known is not None and known.sequence != sequence:
            raise VersionConflict(f"the version has sequence {known.sequence}")

    def _sequence(self, label: str, sequence: int | None) -> int:
        known = self._versions.find(label)
        if known is not None:
            return known.sequence
        return self._versions.next_sequence() if sequence is None else sequence

    def _drop(self, label: str) -> None:
        version = self._versions.remove(label)
        if version.owned:
            self._checkpoints.delete(label)


def _missing(home: Path, present: dict[str, str]) -> tuple[str, ...]:
    """What a sharded checkpoint still lacks: first its index, then what that names."""
    if INDEX not in present:
        return (INDEX,)
    try:
        named = set(json.loads((home / INDEX).read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return ()  # the check that follows says what is wrong with the index
    return tuple(sorted(name for name in named if name not in present))


def _num_bytes(path: Path) -> int:
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)
