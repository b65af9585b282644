"""Facade of prompt KV for the rest of the service: exports, handles and their accounting.

Prompt KV is disabled, with a `KvReason`, until the engine has started and reports that it can
export, and if there is no shared memory. If a consistency check fails it is disabled until the next
start; rollouts continue without it. Not thread-safe: all methods run on one event loop.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from coppice.prompt_kv.host import read_boot_id
from coppice.wire.control import KvStatus
from coppice.wire.kv import (
    KvAgent,
    KvGpu,
    KvHandle,
    KvLayout,
    KvLocator,
    KvReason,
)
from engine.protocol.prompt_kv import PromptKv
from service.config.prompt_kv import KvSettings
from service.errors import DRAINING_RETRY_SECONDS, Draining, KvNotFound
from service.kv.arena import Arena, FreeBytes, default_capacity_bytes, free_bytes
from service.kv.handles.exports import Export, ExportManager
from service.kv.handles.file_layout import LayoutFactory, layer_shapes
from service.kv.handles.gpu_memory import GpuKv
from service.kv.handles.handle import Handle
from service.kv.handles.nixl_agent import NixlAgentProcess
from service.kv.handles.table import Handles
from service.kv.store import SlotState, SlotTable
from service.versions import Versions

MAINTENANCE_SECONDS = 0.5

log = logging.getLogger(__name__)


class PromptKvManager:
    """Facade of prompt KV, which owns the arena, the slots, the handles and the export tasks.

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
        get_free_bytes: FreeBytes = free_bytes,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._replica_id = replica_id
        self._versions = versions
        self._get_free_bytes = get_free_bytes
        self.reason: KvReason | None = "disabled"
        self._closing = False
        self.arena: Arena | None = None
        self._nixl: NixlAgentProcess | None = None
        self._exports: ExportManager | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="kv-checksums")
        self._page_allocator = ThreadPoolExecutor(1, thread_name_prefix="kv-pages")
        self._clock = clock
        self._gpu_kv = GpuKv([], "", boot_id=None)
        self._create_tables(0)

    def open(self) -> None:
        """Create the arena and start the tasks. On failure, sets `reason` instead of raising."""
        info = self._engine.info
        if info.kv_format is None:
            self.reason = info.kv_reason or "unsupported_cache"
            return
        self.arena = self._create_arena()
        if self.arena is None:
            self.reason = "no_shm"
            return
        agent = f"coppice-{secrets.token_hex(8)}"
        self._gpu_kv = GpuKv(info.kv_gpu_memory, agent, boot_id=read_boot_id())
        self._create_tables(self.arena.num_bytes)
        self._exports = ExportManager(
            self._engine,
            self.arena,
            self._slots,
            self.handles,
            layouts=LayoutFactory(info.model, info.kv_format),
            hasher=self._hasher,
            page_allocator=self._page_allocator,
            gpu_kv=self._gpu_kv,
            versions=self._versions,
        )
        self.reason = None
        self._tasks = [
            asyncio.create_task(self._run_safely(work))
            for work in (self._exports.run, self._maintain)
        ]
        if self._settings.nixl:
            self._nixl = NixlAgentProcess(self.arena)
            self._tasks.append(asyncio.create_task(self._nixl.run()))

    def _create_arena(self) -> Arena | None:
        """The arena in its configured or default size. NIXL registers memory, so it needs all."""
        directory, num_bytes = self._settings.directory, self._settings.capacity_bytes
        if num_bytes is None:
            num_bytes = default_capacity_bytes(directory, self._get_free_bytes)
        arena = Arena.create(
            directory,
            num_bytes,
            get_free_bytes=self._get_free_bytes,
            preallocate=self._settings.nixl,
        )
        if arena is not None:
            log.info("prompt KV may take %d MiB of %s", arena.num_bytes // 2**20, directory)
        return arena

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._exports is not None:
            await self._exports.close()
        self._hasher.shutdown()
        self._page_allocator.shutdown()
        if self.arena is not None:
            self.arena.close()

    def get(self, handle_id: str, owner: str) -> Handle:
        self._check_open()
        return self.handles.get(handle_id, owner)

    def release(self, handle_id: str, owner: str) -> None:
        self._check_open()
        self.handles.release(handle_id, owner)

    def begin(self, owner: str, prompt: Sequence[int], lease_seconds: float) -> Export:
        if self.reason is not None or self._exports is None:
            export = Export(owner=owner, lease_seconds=lease_seconds)
            export.refuse(self.reason)
            return export
        return self._exports.begin(owner, prompt, lease_seconds)

    async def finish(self, export: Export) -> None:
        if self._exports is not None:
            await self._exports.finish(export)

    def abandon(self, export: Export) -> None:
        if self._exports is not None:
            self._exports.abandon(export)

    async def before_weights_update(self) -> None:
        if self._exports is not None:
            await self._exports.before_weights_update()

    def after_weights_update(self, version: str) -> None:
        if self._exports is not None:
            self._exports.after_weights_update(version)

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
        return None if handle.slot.gpu_extent is None else self._gpu_kv.describe(boot_id)

    def answer(self, handle: Handle, *, lease_seconds: float | None = None) -> KvHandle:
        """Handle as sent to its caller; `lease_seconds` defaults to the granted duration."""
        assert self.arena is not None, "a handle exists only with an arena"
        slot = handle.slot
        return KvHandle(
            handle=handle.id,
            version=slot.layout.version,
            num_tokens=slot.layout.num_tokens,
            num_bytes=slot.layout.file_bytes,
            lease_seconds=handle.lease_seconds if lease_seconds is None else lease_seconds,
            locators=self._locators(handle, self.arena),
        )

    def _locators(self, handle: Handle, arena: Arena) -> list[KvLocator]:
        offset = handle.slot.file_offset
        locators = [KvLocator(transport="shm", path=str(arena.path), offset=offset)]
        if self.agent is not None:
            locators.append(KvLocator(transport="nixl", agent=self.agent.agent, offset=offset))
        locators += self._gpu_kv.locators(handle.slot)
        return [*locators, KvLocator(transport="http", url=f"/v1/kv/{handle.id}/data")]

    def layout(self, handle: Handle) -> KvLayout:
        layout, kv_format = handle.slot.layout, handle.slot.layout.format
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
            etag=handle.slot.etag,
        )

    def file(self, handle: Handle) -> memoryview:
        """Bytes of the KV file of a handle; read them only inside `handles.pinned`."""
        if self.arena is None:
            raise KvNotFound()
        start = handle.slot.file_offset
        return self.arena.view[start : start + handle.slot.layout.file_bytes].toreadonly()

    def status(self) -> KvStatus:
        return KvStatus(
            reason=self.reason,
            capacity_bytes=0 if self.arena is None else self.arena.num_bytes,
            free_bytes=self._slots.free_bytes,
            reserved_bytes=self._slots.num_bytes(SlotState.RESERVED),
            leased_bytes=self._slots.num_bytes(SlotState.LEASED),
            quarantined_bytes=self._slots.num_bytes(SlotState.QUARANTINED),
            num_handles=len(self.handles),
            gpu_capacity_bytes=self._slots.gpu_capacity_bytes,
            gpu_free_bytes=self._slots.gpu_free_bytes,
        )

    def check(self) -> None:
        """Assert that the slots and the handles are consistent."""
        self._slots.check()
        self.handles.check()

    def _check_open(self) -> None:
        if self._closing:
            raise Draining(retry_after_seconds=DRAINING_RETRY_SECONDS)

    def _create_tables(self, capacity_bytes: int) -> None:
        self._slots = SlotTable(
            capacity_bytes,
            clock=self._clock,
            gpu_bytes=self._gpu_kv.capacity_bytes,
        )
        self.handles = Handles(
            self._slots, self._settings, replica_id=self._replica_id, clock=self._clock
        )

    async def _maintain(self) -> None:
        while True:
            self.handles.sweep()
            self._slots.sweep()
            self.check()
            await asyncio.sleep(MAINTENANCE_SECONDS)

    async def _run_safely(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except Exception:
            log.exception("prompt KV is disabled until a restart")
            self.reason = "internal"
