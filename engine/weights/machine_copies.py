"""Files of weights versions and adapters on all machines of an engine, before they are loaded."""

import asyncio
from pathlib import Path
from typing import Final

from engine.errors import LoadFailed
from engine.launch.machines import own_address
from engine.launch.processes import VllmProcesses
from engine.settings import EngineSettings
from engine.weights.file_server import FileServer
from engine.weights.worker_copies import SourceFile

POLL_SECONDS: Final = 0.2
COPIED: Final = ("*.safetensors", "*.json")


class MachineCopies:
    """Copies files to the machines that do not see those of machine 0. Samples keep running."""

    def __init__(self, processes: VllmProcesses, settings: EngineSettings) -> None:
        self._processes = processes
        self._settings = settings

    async def create(self, path: Path) -> None:
        """Copy the files of a directory, or one file. Raises LoadFailed.

        Nothing is left then, or if the call is cancelled.
        """
        if self._settings.nnodes == 1:
            return
        server = await asyncio.to_thread(_serve, self._settings, path)
        try:
            await self._copy(path, server)
        except (LoadFailed, asyncio.CancelledError):
            await self.drop(path)
            raise
        finally:
            await asyncio.to_thread(server.close)

    async def _copy(self, path: Path, server: FileServer) -> None:
        sources = await asyncio.to_thread(lambda: [_source_file(file) for file in server.files])
        source = {"path": str(path), "url": server.url, "files": sources}
        await self._processes.call_workers("coppice_start_copy", source)
        while True:
            states = await self._processes.call_workers("coppice_copy_state", str(path))
            for rank, state in enumerate(states):
                if state["error"] is not None:
                    raise LoadFailed(f"rank {rank} could not copy the files: {state['error']}")
            if all(state["is_ready"] for state in states):
                return
            await asyncio.sleep(POLL_SECONDS)

    async def drop(self, path: Path) -> None:
        """Remove the copies of a path that is loaded no more."""
        if self._settings.nnodes > 1:
            await self._processes.call_workers("coppice_drop_copy", str(path))


def _serve(settings: EngineSettings, path: Path) -> FileServer:
    return FileServer(own_address(settings), _files(path))


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
