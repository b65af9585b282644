"""Weights published by trainers that name a directory, and often no version.

Their protocols are a start, updates and a finish, or an update alone; all of them are repeated
after a lost answer. A repeated update names the same files, and changes nothing.
"""

import asyncio
from pathlib import Path

from coppice.wire.weights import ActivationAnswer
from service.http.errors import WeightsRefused
from service.server import Server
from service.weights.versions import Version

Fingerprint = tuple[tuple[str, int, int], ...]


class WeightUpdates:
    """Lives on one event loop; one update at a time, which also is what a retry waits for."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._lock = asyncio.Lock()
        self._started = False
        self._staged: Version | None = None
        self._seen: dict[str, tuple[Path, Fingerprint]] = {}

    async def start(self) -> None:
        """What an update that was never finished has staged is forgotten."""
        async with self._lock:
            self._started = True
            await self._forget_staged()

    async def update(self, path: str, label: str | None = None) -> Version:
        """Staged after a start, else active when this returns."""
        async with self._lock:
            version = await self._stage(path, label)
            if self._started:
                self._staged = version
            else:
                await self._activate(version)
            return self._server.versions.get(version.label)

    async def publish(self, path: str, label: str | None = None) -> Version:
        """Active when this returns, whatever has been started."""
        async with self._lock:
            await self._activate(await self._stage(path, label))
            return self._server.versions.active

    async def finish(self, label: str | None = None) -> Version:
        """The active version. Without a start, or again, this changes nothing. What fails can be
        asked for again."""
        async with self._lock:
            if self._staged is not None:
                self._staged = await self._renamed(self._staged, label)
                await self._activate(self._staged)
            self._staged, self._started = None, False
            return self._server.versions.active

    async def _stage(self, path: str, label: str | None) -> Version:
        directory = self._server.checkpoints.allowed(path)
        found = (directory, await asyncio.to_thread(_fingerprint, directory))
        self._seen = {name: seen for name, seen in self._seen.items() if self._known(name)}
        for name, seen in self._seen.items():
            if seen == found and label in (None, name):
                return self._server.versions.get(name)
        name = label or self._free_label()
        version = await self._server.publisher.stage_path(name, path, sequence=None)
        self._seen[name] = found
        return version

    async def _renamed(self, staged: Version, label: str | None) -> Version:
        """vLLM names a version where it ends an update, which is after its files were checked."""
        if label in (None, staged.label):
            return staged
        version = await self._server.publisher.stage_path(label, str(staged.path), sequence=None)
        self._seen[label] = self._seen[staged.label]
        await self._drop(staged.label)
        return version

    async def _activate(self, version: Version) -> ActivationAnswer:
        answer = await self._server.activate(version.label, "keep", allow_rollback=False)
        await self._forget_overwritten(self._server.versions.active)
        return answer

    async def _forget_overwritten(self, active: Version) -> None:
        """A trainer that writes every version to one place leaves nothing to go back to."""
        for version in self._server.versions.all():
            if version.label != active.label and version.path == active.path:
                await self._server.publisher.delete(version.label)

    async def _forget_staged(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None:
            await self._drop(staged.label)

    async def _drop(self, label: str) -> None:
        """Unless it serves: a directory that was not written again is the version that it was."""
        version = self._server.versions.find(label)
        if version is not None and version.state == "staged":
            await self._server.publisher.delete(label)

    def _known(self, label: str) -> bool:
        return self._server.versions.find(label) is not None

    def _free_label(self) -> str:
        return f"update-{self._server.versions.next_sequence()}"


def _fingerprint(path: Path) -> Fingerprint:
    """Changes when a file is written again, which its content need not do."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    try:
        return tuple((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files)
    except OSError as error:
        raise WeightsRefused("the files have changed while they were read") from error
