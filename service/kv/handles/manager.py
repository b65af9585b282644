"""Facade of prompt-KV export for the rest of the service: exports, handles and accounting.

Prompt KV is disabled, with a `KvReason`, until the engine has started and reports that it can
export, and if there is no shared memory. If a consistency check fails it is disabled until the next
start; rollouts continue without it. Not thread-safe: all methods run on one event loop.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from coppice.prompt_kv.boot_id import read_boot_id
from coppice.wire.prompt_kv import (
    KvAgent,
    KvGpu,
    KvHandle,
    KvLayout,
    KvLocator,
    KvReason,
)
from coppice.wire.status import KvStatus
from engine.protocol.prompt_kv import PromptKv
from service.config.prompt_kv import KvSettings
from service.errors import DRAINING_RETRY_SECONDS, Draining
from service.kv.arena import default_capacity_bytes
from service.kv.handles.exports import Export, ExportManager
from service.kv.handles.file_layout import LayoutFactory, layer_shapes
from service.kv.handles.gpu_memory import GpuKv
from service.kv.handles.handle import Handle
from service.kv.handles.index import HandleIndex
from service.kv.handles.nixl_agent import NixlAgentProcess
from service.kv.store import EntryState, KvStore
from service.weights_versions import Versions

MAINTENANCE_SECONDS = 0.5

log = logging.getLogger(__name__)


class PromptKvManager:
    """Facade of prompt KV, which owns the store, the handles and the export tasks.

    Call `open` once the engine has started, `close` after the last group and the last reader.
    """

    def __init__(
        self,
        settings: KvSettings,
        engine: PromptKv,
        versions: Versions,
        *,
        replica_id: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self.reason: KvReason | None = "disabled"
        self.store = KvStore(engine, clock=clock)
        self.handles = HandleIndex(self.store, settings, replica_id=replica_id, clock=clock)
        self.exports = ExportManager(engine, self.store, self.handles, versions)
        self._gpu_kv = GpuKv([], "", boot_id=None)
        self._closing = False
        self._nixl: NixlAgentProcess | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def open(self) -> None:
        """Create the arena and start the tasks. On failure, sets `reason` instead of raising."""
        info, settings = self._engine.info, self._settings
        if info.kv_format is None:
            self.reason = info.kv_reason or "unsupported_cache"
            return
        agent = f"coppice-{secrets.token_hex(8)}"
        self._gpu_kv = GpuKv(info.kv_gpu_memory, agent, boot_id=read_boot_id())
        num_bytes = settings.capacity_bytes
        if not self.store.open(
            settings.directory,
            default_capacity_bytes(settings.directory) if num_bytes is None else num_bytes,
            preallocate=settings.nixl,  # it registers the arena's memory, so it needs all of it
            gpu_bytes=self._gpu_kv.capacity_bytes,
        ):
            self.reason = "no_shm"
            return
        num_mib = self.store.extents.capacity_bytes // 2**20
        log.info("prompt KV may take %d MiB of %s", num_mib, settings.directory)
        self.exports.open(LayoutFactory(info.model, info.kv_format), self._gpu_kv)
        self.reason = None
        self._tasks = [
            asyncio.create_task(self._run_safely(work))
            for work in (self.exports.run, self._maintain)
        ]
        if settings.nixl:
            self._nixl = NixlAgentProcess(self.store.arena)
            self._tasks.append(asyncio.create_task(self._nixl.run()))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.exports.close()
        await self.store.close()

    def get(self, handle_id: str, owner: str) -> Handle:
        self._check_open()
        return self.handles.get(handle_id, owner)

    def release(self, handle_id: str, owner: str) -> None:
        self._check_open()
        self.handles.release(handle_id, owner)

    def begin(self, owner: str, prompt: Sequence[int], lease_seconds: float) -> Export:
        """Start an export, see `ExportManager.begin`; refused if prompt KV is disabled."""
        if self.reason is None:
            return self.exports.begin(owner, prompt, lease_seconds)
        export = Export(owner=owner, lease_seconds=lease_seconds)
        export.refuse(self.reason)
        return export

    def stop_new_readers(self) -> None:
        """Refuse new reads of prompt KV; reads in progress continue."""
        self._closing = True

    async def wait_until_idle(self) -> None:
        """Wait until no handle has an active lease, and no download is open."""
        while len(self.handles) or self.handles.num_downloads:
            self.handles.sweep()
            await asyncio.sleep(0.05)

    @property
    def agent(self) -> KvAgent | None:
        """Address of the NIXL agent; None while it does not run."""
        return None if self._nixl is None else self._nixl.agent

    def gpu(self, handle: Handle, boot_id: str | None) -> KvGpu | None:
        """GPU memory that has a handle's KV, for a caller on the host `boot_id`, or None."""
        return None if handle.entry.gpu_extent is None else self._gpu_kv.describe(boot_id)

    def answer(self, handle: Handle, *, lease_seconds: float | None = None) -> KvHandle:
        """Handle as sent to its caller; `lease_seconds` defaults to the granted duration."""
        entry = handle.entry
        return KvHandle(
            handle=handle.id,
            version=entry.layout.version,
            num_tokens=entry.layout.num_tokens,
            num_bytes=entry.layout.file_bytes,
            lease_seconds=handle.lease_seconds if lease_seconds is None else lease_seconds,
            locators=self._locators(handle),
        )

    def _locators(self, handle: Handle) -> list[KvLocator]:
        path, offset = str(self.store.arena.path), handle.entry.file_offset
        locators = [KvLocator(transport="shm", path=path, offset=offset)]
        if self.agent is not None:
            locators.append(KvLocator(transport="nixl", agent=self.agent.agent, offset=offset))
        locators += self._gpu_kv.locators(handle.entry)
        return [*locators, KvLocator(transport="http", url=f"/v1/kv/{handle.id}/data")]

    def layout(self, handle: Handle) -> KvLayout:
        layout, kv_format = handle.entry.layout, handle.entry.layout.format
        answer = self.answer(handle, lease_seconds=handle.remaining_seconds)
        return KvLayout(
            **answer.model_dump(),
            model=layout.model,
            dtype=kv_format.dtype,
            num_layers=kv_format.num_layers,
            num_kv_heads=kv_format.num_kv_heads,
            head_dim=kv_format.head_dim,
            layers=layer_shapes(layout),
            rope=dict(kv_format.rope),
            tokens_sha256=layout.tokens_sha256,
            exact=True,
            data_offset=layout.header_bytes,
            etag=handle.entry.etag,
        )

    def file(self, handle: Handle) -> memoryview:
        """Bytes of the KV file of a handle; read them only inside `handles.pinned`."""
        start = handle.entry.file_offset
        return self.store.arena.view[start : start + handle.entry.layout.file_bytes].toreadonly()

    def status(self) -> KvStatus:
        return KvStatus(
            reason=self.reason,
            capacity_bytes=self.store.extents.capacity_bytes,
            free_bytes=self.store.extents.free_bytes,
            reserved_bytes=self.store.num_bytes(EntryState.RESERVED),
            leased_bytes=self.store.num_bytes(EntryState.COMMITTED),
            quarantined_bytes=self.store.num_bytes(EntryState.QUARANTINED),
            num_handles=len(self.handles),
            gpu_capacity_bytes=self.store.gpu_extents.capacity_bytes,
            gpu_free_bytes=self.store.gpu_extents.free_bytes,
        )

    def check(self) -> None:
        """Assert that the entries and the handles are consistent."""
        self.store.check()
        self.handles.check()

    def _check_open(self) -> None:
        if self._closing:
            raise Draining(retry_after_seconds=DRAINING_RETRY_SECONDS)

    async def _maintain(self) -> None:
        while True:
            self.handles.sweep()
            self.check()
            await asyncio.sleep(MAINTENANCE_SECONDS)

    async def _run_safely(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except Exception:
            log.exception("prompt KV is disabled until a restart")
            self.reason = "internal"
