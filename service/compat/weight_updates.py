"""Weight updates from a directory in vLLM's and SGLang's protocols, mapped to stage and activate.

The trainer names a directory, and often no version. The protocols consist of a start, updates and a
finish, or of an update alone. All of these calls are retried after a lost response. A repeated
update names the same files and changes nothing.
"""

import asyncio
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request

from coppice.weights.checkpoint_files import fingerprint
from coppice.wire.weights import ActivationAnswer
from service.errors import (
    WeightsRefused,
)
from service.server import Server
from service.weights_versions import Version


class WeightUpdates:
    """Stages and activates weights from a trainer's directory, one update at a time.

    Runs on one event loop. A retry waits for the update in progress.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._lock = asyncio.Lock()
        self._started = False
        self._staged: Version | None = None
        self._published: dict[str, tuple[Path, str]] = {}

    async def start(self) -> None:
        """Start a weight update; discard weights that an unfinished update has staged."""
        async with self._lock:
            self._started = True
            await self._discard_staged()

    async def update(self, path: str, label: str | None = None) -> Version:
        """Stage weights from a directory, and activate them unless a started update will do so."""
        async with self._lock:
            version = await self._stage(path, label)
            if self._started:
                self._staged = version
            else:
                await self._activate(version)
            return self._server.versions.get(version.label)

    async def publish(self, path: str, label: str | None = None) -> Version:
        """Stage and activate the weights in a directory, even during a started update."""
        async with self._lock:
            await self._activate(await self._stage(path, label))
            return self._server.versions.active

    async def finish(self, label: str | None = None) -> Version:
        """Activate the staged weights and return the active version.

        Without a start, or when repeated, this changes nothing. After a failure it can be retried.
        """
        async with self._lock:
            if self._staged is not None:
                self._staged = await self._relabel(self._staged, label)
                await self._activate(self._staged)
            self._staged, self._started = None, False
            return self._server.versions.active

    async def _stage(self, path: str, label: str | None) -> Version:
        directory = self._server.checkpoints.resolve_allowed(path)
        current = (directory, await asyncio.to_thread(_fingerprint, directory))
        self._published = {
            name: published for name, published in self._published.items() if self._exists(name)
        }
        for name, published in self._published.items():
            if published == current and label in (None, name):
                return self._server.versions.get(name)
        name = label or self._next_label()
        version = await self._server.stager.stage_path(name, path, sequence=None)
        self._published[name] = current
        return version

    async def _relabel(self, staged: Version, label: str | None) -> Version:
        """Stage the weights again under the version label given at the end of the update.

        vLLM names a version when it finishes an update, which is after its files were validated.
        """
        if label in (None, staged.label):
            return staged
        version = await self._server.stager.stage_path(label, str(staged.path), sequence=None)
        self._published[label] = self._published[staged.label]
        await self._delete_if_staged(staged.label)
        return version

    async def _activate(self, version: Version) -> ActivationAnswer:
        coordinator = self._server.coordinator
        answer = await coordinator.activate(version.label, "keep", allow_rollback=False)
        await self._delete_overwritten(self._server.versions.active)
        return answer

    async def _delete_overwritten(self, active: Version) -> None:
        """Delete weights versions whose files the active version has overwritten.

        A trainer may write every version to the same directory, so that no rollback is possible.
        """
        for version in self._server.versions.all():
            if version.label != active.label and version.path == active.path:
                await self._server.stager.delete(version.label)

    async def _discard_staged(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None:
            await self._delete_if_staged(staged.label)

    async def _delete_if_staged(self, label: str) -> None:
        """Delete a weights version if it is staged but not active.

        If the trainer did not write the directory again, the staged version is the active one.
        """
        version = self._server.versions.find(label)
        if version is not None and version.state == "staged":
            await self._server.stager.delete(label)

    def _exists(self, label: str) -> bool:
        return self._server.versions.find(label) is not None

    def _next_label(self) -> str:
        return f"update-{self._server.versions.next_sequence()}"


def _fingerprint(path: Path) -> str:
    """Digest that shows that a file was rewritten, even if its content is the same."""
    try:
        return fingerprint(path)
    except OSError as error:
        raise WeightsRefused(
            "the files changed while they were read: write all of them, then repeat the update"
        ) from error


async def _updates(request: Request) -> WeightUpdates:
    updates: WeightUpdates = request.app.state.weight_updates
    return updates


Updates = Annotated[WeightUpdates, Depends(_updates)]
