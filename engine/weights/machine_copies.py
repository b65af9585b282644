"""Files of weights versions and adapters on all machines of an engine, before they are loaded."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from engine.errors import LoadFailed
from engine.launch.machines import own_address
from engine.launch.processes import VllmProcesses
from engine.settings import EngineSettings
from engine.weights.file_server import FileServer
from engine.weights.worker_copies import CopySource, CopyState, SourceFile

POLL_SECONDS: Final = 0.2
COPIED: Final = ("*.safetensors", "*.json")


class MachineCopies:
    """Copies files to the machines that do not see those of machine 0. Samples keep running."""

    def __init__(
        self,
        processes: VllmProcesses,
        settings: EngineSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._processes = processes
        self._settings = settings
        self._clock = clock

    @property
    def is_needed(self) -> bool:
        """True if the engine has, or may have, ranks on other machines than machine 0."""
        return self._settings.uses_several_machines

    async def create(self, path: Path, *, is_initial: bool = False) -> None:
        """Copy the files of a directory, or one file. Raises LoadFailed.

        Nothing is left then, or if the call is cancelled, but the copy of loaded files. After
        the load call `keep` or `discard`. `is_initial`: the engine started from these files.
        """
        if not self.is_needed:
            return
        address = await self._address()
        files = await asyncio.to_thread(_files, path)
        server = FileServer(address, files)
        try:
            sources = await asyncio.to_thread(lambda: [_source_file(file) for file in files])
            await self._copy(
                CopySource(path=str(path), url=server.url, is_initial=is_initial, files=sources)
            )
        except (LoadFailed, asyncio.CancelledError):
            await self.discard(path)
            raise
        finally:
            await asyncio.to_thread(server.close)

    async def _address(self) -> str:
        """Address at which the other machines reach this one."""
        if not self._settings.uses_ray:
            return await asyncio.to_thread(own_address, self._settings)
        (address,) = await self._processes.call_cores("coppice_ray_address")
        return str(address)

    async def _copy(self, source: CopySource) -> None:
        limit = self._settings.activation_seconds
        deadline = self._clock() + limit
        states = await self._processes.call_workers("coppice_start_copy", source)
        while not _are_ready(states):
            if self._clock() > deadline:
                raise LoadFailed(
                    f"the files were not copied to the other machines within {limit:g} s "
                    "(engine.activation_seconds)"
                )
            await asyncio.sleep(POLL_SECONDS)
            states = await self._processes.call_workers("coppice_copy_state", source["path"])

    async def keep(self, path: Path) -> None:
        """Remove the previous copy of a path that has been loaded."""
        await self._call("coppice_keep_copy", path)

    async def discard(self, path: Path) -> None:
        """Remove the copy that `create` made, which has not been loaded."""
        await self._call("coppice_discard_copy", path)

    async def drop(self, path: Path) -> None:
        """Remove the copies of a path that is loaded no more."""
        await self._call("coppice_drop_copy", path)

    async def _call(self, method: str, path: Path) -> None:
        if self.is_needed:
            await self._processes.call_workers(method, str(path))


def _are_ready(states: Sequence[CopyState]) -> bool:
    for rank, state in enumerate(states):
        if state["error"] is not None:
            raise LoadFailed(f"rank {rank} could not copy the files: {state['error']}")
    return all(state["is_ready"] for state in states)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(file for pattern in COPIED for file in path.glob(pattern))


def _source_file(file: Path) -> SourceFile:
    try:
        status = file.stat()
    except OSError as error:
        raise LoadFailed(f"{file.name} cannot be read: {error.strerror}") from None
    return SourceFile(name=file.name, num_bytes=status.st_size, mtime_ns=status.st_mtime_ns)
