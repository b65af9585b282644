"""Weights updates of the running engine: checks, versions, reload after sleep."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from engine.errors import CheckpointRefused, EngineDead, FilesRestored, LoadFailed
from engine.runtime.engine_protocols import EngineCalls
from engine.runtime.heartbeat import Heartbeat
from engine.weights.checkpoint import Checkpoint, fingerprint
from engine.weights.ipc_tensors import IpcTensor, check_tensors
from engine.weights.magnitudes import Magnitudes
from engine.weights.validation import check_checkpoint

log = logging.getLogger(__name__)


class ServedWeights:
    """Weights that the engine serves, and their replacement by new ones.

    `checkpoint` indexes the files that the engine started from, the reference for candidates. It
    is empty if the weights are random.
    `version` is their label. Weights from a trainer's GPU memory have no files: if a later load
    fails after weights have changed, the files that were loaded last are loaded again.
    """

    def __init__(
        self,
        processes: EngineCalls,
        heartbeat: Heartbeat,
        path: Path,
        checkpoint: Checkpoint,
        *,
        version: str,
        is_on_several_machines: bool = False,
    ) -> None:
        self._processes = processes
        self._heartbeat = heartbeat
        self._path = path
        self._version = version
        self._is_on_several_machines = is_on_several_machines
        self._serves_files = True
        self._fingerprint = fingerprint(path)
        self._initial = path, self._fingerprint
        self._were_reloaded = False
        self._are_dropped = False
        self._are_tensors_open = False
        self.checkpoint = checkpoint

    def check(self, candidate: Path, *, dtype: str, magnitudes: Magnitudes) -> None:
        check_checkpoint(self.checkpoint, candidate, dtype=dtype, magnitudes=magnitudes)

    def check_tensors(self, tensors: Sequence[IpcTensor]) -> None:
        check_tensors(self.checkpoint, tensors)

    async def update(self, path: Path, version: str, *, keep_kv: bool) -> int:
        """Load the weights; returns the number of tokens whose KV is kept with `keep_kv`."""
        if self._is_on_several_machines:
            await self._check_all_see(path, version)
            await self._check_all_see(self._path, self._version)
        with self._heartbeat.activating():
            loaded = await asyncio.to_thread(fingerprint, path)
            paths = str(path), str(self._path)
            results = await self._processes.call_workers("coppice_load_weights", *paths)
            await self._check_loaded(results)
            num_kept = await self._on_loaded(results, version, keep_kv=keep_kv)
            self._path, self._fingerprint, self._version = path, loaded, version
            self._serves_files = True
        return num_kept

    async def _check_all_see(self, path: Path, version: str) -> None:
        """Raise LoadFailed if a rank does not see the files, or sees others at their path.

        The files of the start are compared at the start, and may be elsewhere on each machine.
        """
        files = await asyncio.to_thread(fingerprint, path)
        if (path, files) == self._initial:
            return
        seen = await self._processes.call_workers("coppice_sees_files", str(path), files)
        if not all(seen):
            ranks = [rank for rank, sees in enumerate(seen) if not sees]
            raise LoadFailed(
                f"ranks {ranks} do not see the files of {version}: the weights of an engine on "
                "several machines must be on a file system that all of them share, at the same path"
            )

    async def open_transfer(self, tensors: Sequence[IpcTensor]) -> None:
        """Open tensors in GPU memory on all ranks, and check their values. Samples may run.

        Raises CheckpointRefused with the reason if a rank could not; then none are open.
        """
        if await self._have_served_files_changed():
            raise LoadFailed(
                f"the files of {self._version}, to be loaded if the transfer fails, have changed; "
                "activate a version with files"
            )
        values = await asyncio.to_thread(lambda: [tensor.to_dict() for tensor in tensors])
        self._are_tensors_open = True
        reasons = await self._processes.call_workers("coppice_open_transfer", values)
        if failed := sorted(filter(None, reasons), key=names_ranks_only):
            await self.close_transfer()
            raise CheckpointRefused(failed[0].removeprefix("CheckpointRefused: "))

    async def close_transfer(self) -> None:
        """Close the tensors that are open and were not loaded."""
        if self._are_tensors_open:
            self._are_tensors_open = False
            await self._processes.call_workers("coppice_close_transfer")

    async def transfer(self, version: str, *, keep_kv: bool = False) -> int:
        """Load the open tensors; returns the number of tokens whose KV is kept."""
        self._are_tensors_open = False
        with self._heartbeat.activating():
            results = await self._processes.call_workers("coppice_load_transfer", str(self._path))
            try:
                await self._check_loaded(results)
            except FilesRestored:
                raise
            except LoadFailed as error:
                reason = next(result["error"] for result in results if not result["ok"])
                raise LoadFailed(f"{error}: {reason}") from error
            num_kept = await self._on_loaded(results, version, keep_kv=keep_kv)
            self._serves_files = False
        return num_kept

    async def _on_loaded(self, results: Sequence[Any], version: str, *, keep_kv: bool) -> int:
        """Serve the loaded weights under a version; returns the number of kept tokens."""
        num_kept = await self._serve(version, keep_kv=keep_kv)
        self._were_reloaded, self._are_dropped = True, False
        loaded_seconds = max(result["seconds"] for result in results)
        log.info("loaded the weights of %s in %.3f s", version, loaded_seconds)
        return num_kept

    async def _serve(self, version: str, *, keep_kv: bool = False) -> int:
        """Reset the prefix cache and set the version; returns the number of kept tokens."""
        resets = await self._processes.call_cores("coppice_reset_prefix_cache", keep_kv)
        await self._processes.set_version(version)
        return sum(int(reset["num_kept_tokens"]) for reset in resets)

    async def _check_loaded(self, results: Sequence[Any]) -> None:
        """Raise LoadFailed, with one set of weights on all engines, unless all have loaded."""
        failed = self._failed(results)
        if not failed:
            return
        is_changed = len(failed) < len(results) or any(one["has_reloaded"] for one in failed)
        if is_changed and not self._serves_files:
            await self._restore_files(results)
            raise FilesRestored(self._version)
        if len(failed) < len(results):
            await self._restore_all()
        await self._on_restored()
        raise LoadFailed("loading failed; the previous weights are still served")

    async def _restore_files(self, results: Sequence[Any]) -> None:
        """Serve the files that were loaded last, on all engines, in place of other weights."""
        log.warning("the previous weights have no files; %s is served again", self._version)
        if await self._have_served_files_changed():
            self._raise_partly_loaded()
        if any(one["ok"] or not one["has_reloaded"] for one in results):
            await self._restore_all()
        await self._serve(self._version)
        self._serves_files = True

    async def _have_served_files_changed(self) -> bool:
        """True if the served files have changed since they were loaded."""
        return await asyncio.to_thread(fingerprint, self._path) != self._fingerprint

    def _failed(self, results: Sequence[Any]) -> list[Any]:
        """Failed results of a load; raises EngineDead if one has left other weights."""
        failed = [result for result in results if not result["ok"]]
        if not all(result["restored"] for result in failed):
            self._raise_partly_loaded()
        return failed

    def _raise_partly_loaded(self) -> NoReturn:
        self._heartbeat.mark_dead("the weights are partly loaded")
        raise EngineDead("loading failed and the previous weights could not be restored")

    async def _restore_all(self) -> None:
        """Load the served files on all engines, because some of them have loaded other files.

        An engine whose load fails may have the others still, so none may run then.
        """
        log.warning("an engine could not load the weights; all engines load the previous ones")
        results = await self._load_served()
        if not all(result["ok"] for result in results):
            self._raise_partly_loaded()

    async def _on_restored(self) -> None:
        """Keep the KV, which the restored weights computed: no step ran with other weights.

        Files that have changed since they were loaded may have restored other weights.
        """
        if await self._have_served_files_changed():
            await self._processes.call_cores("coppice_reset_prefix_cache")

    async def check_reload(self) -> None:
        """Check that the served files can be loaded again, by loading them once.

        Raises LoadFailed if the files have changed, or if vLLM cannot reload this model; then the
        weights are as before. Call it while paused. Served weights without files stay: their own
        load has shown that vLLM can reload the model, and `reload_dropped` loads the last files.
        """
        if not self.checkpoint.tensors:
            raise LoadFailed("random weights (engine.load_format dummy) cannot be loaded again")
        if await self._have_served_files_changed():
            raise LoadFailed(f"the files of {self._version} have changed since they were loaded")
        if not self._were_reloaded:
            await self._load_served_files()
            self._were_reloaded = True

    def drop(self) -> None:
        """Note that the weights are dropped; `check_reload` has shown that they can be loaded."""
        self._are_dropped = True

    async def reload_dropped(self) -> str | None:
        """Load the last files if the weights were dropped; EngineDead if that fails.

        Returns their version if the dropped weights were others, without files.
        """
        if not self._are_dropped:
            return None
        try:
            if await self._have_served_files_changed():
                raise LoadFailed("the files of the served weights have changed")
            await self._load_served_files()
        except LoadFailed as error:
            self._heartbeat.mark_dead(f"the dropped weights cannot be loaded: {error}")
            raise EngineDead("the dropped weights cannot be loaded again") from error
        self._are_dropped = False
        if self._serves_files:
            return None
        self._serves_files = True
        await self._processes.set_version(self._version)
        return self._version

    async def _load_served_files(self) -> None:
        results = await self._load_served()
        if failed := self._failed(results):
            raise LoadFailed(f"vLLM cannot load the served weights again: {failed[0]['error']}")

    async def _load_served(self) -> list[Any]:
        """Load the served files on all engines; returns one result per worker."""
        path = str(self._path)
        return await self._processes.call_workers("coppice_load_weights", path, path)


def names_ranks_only(reason: str) -> bool:
    """True for the reason of a rank that has not failed itself."""
    return reason.startswith("failed on ranks")
