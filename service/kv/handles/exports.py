"""Export of a prompt's KV: reserve a slot, wait until the engine has written it, grant handles.

A slot of the arena is reserved before the group's samples are submitted to the engine. The first
group with a prompt writes the slot; groups with the same prompt that arrive meanwhile share it. A
thread allocates its pages while the prompt is queued and prefilled. The engine sends no
notification, so the per-rank status words in the slot are polled. Once every rank has committed,
the data is checksummed in a thread, the slot is sealed, and each group gets its own handle.

An export ends exactly once. No group waits longer than the engine takes to flush its exports.
Not thread-safe: all methods run on one event loop.
"""

import asyncio
import logging
import struct
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from coppice.wire.kv import KvReason
from engine.errors import EngineError
from engine.protocol.prompt_kv import PromptKv
from engine.types.kv import ExportSlot, ExportStatus
from service.kv.arena import Arena
from service.kv.handles.file_layout import Layout, LayoutFactory, checksums, etag
from service.kv.handles.gpu_memory import GpuKv
from service.kv.handles.handle import Handle
from service.kv.handles.table import Handles
from service.kv.store import Slot, SlotState, SlotTable
from service.versions import Versions

POLL_SECONDS = 0.005
# Upper bound on the share of event-loop time that polling takes, for thousands of exports.
MAX_POLL_SHARE = 0.05

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class Export:
    """KV export of one prompt, or of one path of a tree, on behalf of one group.

    `export_slot` is attached to the engine request that writes `slot`; it is None if another group
    writes it. Once `ended` is set, `handle` or `reason` is set.
    """

    owner: str
    lease_seconds: float
    slot: Slot | None = None
    export_slot: ExportSlot | None = None
    handle: Handle | None = None
    reason: KvReason | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_writer(self) -> bool:
        return self.export_slot is not None

    def grant(self, handle: Handle) -> None:
        self.handle = handle
        self.ended.set()

    def refuse(self, reason: KvReason | None) -> None:
        self.reason = reason
        self.ended.set()


class ExportManager:
    """Carries out prompt-KV exports: polls the slots that the engine writes, grants handles.

    `run` must be running as a task.
    """

    def __init__(
        self,
        engine: PromptKv,
        arena: Arena,
        slots: SlotTable,
        handles: Handles,
        *,
        layouts: LayoutFactory,
        hasher: Executor,
        page_allocator: Executor,
        gpu_kv: GpuKv,
        versions: Versions,
    ) -> None:
        self._engine = engine
        self._arena = arena
        self._slots = slots
        self._handles = handles
        self._layouts = layouts
        self._hasher = hasher
        self._page_allocator = page_allocator
        self._gpu_kv = gpu_kv
        self._versions = versions
        self._num_ranks = engine.info.tensor_parallel_size
        self._words = struct.Struct(f"<{self._num_ranks}Q")
        self._pending: dict[Slot, list[Export]] = {}
        self._sealing: set[Slot] = set()
        self._has_pending = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, owner: str, prompt: Sequence[int], lease_seconds: float) -> Export:
        """Start the export of a prompt's KV; call it before the prompt is submitted to the engine.

        `after_weights_update` handles an activation between this call and the submission.
        """
        export = Export(owner=owner, lease_seconds=lease_seconds)
        if len(prompt) < 2:
            export.refuse("prompt_too_short")
            return export
        layout = self._layouts.of(prompt[:-1], self._versions.active.label)
        slot = self._slots.find(owner, layout.version, layout.tokens_sha256)
        if slot is None:
            self._reserve(export, layout)
        elif slot.state is SlotState.RESERVED:
            export.slot = slot
            self._pending[slot].append(export)
        else:
            self._grant(export, slot)
        return export

    async def finish(self, export: Export) -> None:
        """End the export of a group that has ended; `export.ended` is set on return."""
        slot = export.slot
        if slot is not None and export.is_writer:
            await asyncio.shield(self._spawn(self._finish_write(slot), slot))
        if slot is not None and self._is_unwritten(slot):
            # Another group writes the slot and may take long, so this group does not wait.
            self._pending[slot].remove(export)
            export.refuse("not_written")
        await export.ended.wait()

    def abandon(self, export: Export) -> None:
        """End the export of an aborted group; if it wrote a shared slot, end that write as well."""
        slot = export.slot
        if slot is None or export.ended.is_set():
            return
        self._pending[slot].remove(export)
        export.refuse("not_written")
        if export.is_writer:
            self._spawn(self._finish_write(slot), slot)

    def poll(self) -> None:
        """Check once, by their status words, whether the slots being written are complete."""
        for slot in list(self._pending):
            self._poll_one(slot)

    async def before_weights_update(self) -> None:
        """Flush and poll the exports before new weights are activated.

        The engine is paused, and KV that is committed by now is of the old weights.
        """
        if self._pending:
            await self._engine.flush_exports()
            self.poll()

    def after_weights_update(self, version: str) -> None:
        """Assign the slots that are not written yet to the new weights version.

        Their KV is prefilled under the new weights only, or the engine reports `MIXED_VERSION`.
        """
        for slot in self._pending:
            if slot not in self._sealing:
                self._slots.relabel(slot, version)

    async def run(self) -> None:
        """Background task that polls the slots while the engine writes any."""
        while True:
            await self._has_pending.wait()
            began = time.monotonic()
            self.poll()
            if not self._pending:
                self._has_pending.clear()
            took = time.monotonic() - began
            await asyncio.sleep(max(POLL_SECONDS, took / MAX_POLL_SHARE))

    async def close(self) -> None:
        """Cancel the export tasks; no group is running any more, so slots need no cleanup."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _reserve(self, export: Export, layout: Layout) -> None:
        gpu_bytes = self._gpu_kv.rank_bytes(layout)
        slot = self._slots.reserve(export.owner, layout, gpu_bytes=gpu_bytes)
        if slot is None:
            export.refuse("arena_full")
            return
        if not self._arena.back(slot.extent.start, slot.data_offset):
            self._slots.discard(slot)
            export.refuse("arena_full")
            return
        self._words.pack_into(self._arena.view, slot.status_offset, *[0] * self._num_ranks)
        self._pending[slot] = [export]
        export.slot = slot
        export.export_slot = ExportSlot(
            arena=self._arena.path,
            offset=slot.data_offset,
            status_offset=slot.status_offset,
            num_tokens=layout.num_tokens,
            gpu_offset=None if slot.gpu_extent is None else slot.gpu_extent.start,
        )
        self._page_allocator.submit(self._arena.back, slot.data_offset, slot.extent.end)
        self._has_pending.set()

    def _grant(self, export: Export, slot: Slot) -> None:
        export.grant(self._handles.grant(export.owner, slot, export.lease_seconds))

    def _is_unwritten(self, slot: Slot) -> bool:
        return slot in self._pending and slot not in self._sealing

    def _poll_one(self, slot: Slot) -> None:
        if not self._is_unwritten(slot):
            return
        words = self._words.unpack_from(self._arena.view, slot.status_offset)
        if ExportStatus.FAILED in words:
            self._fail(slot, "export_failed")
        elif ExportStatus.MIXED_VERSION in words:
            self._fail(slot, "mixed_version")
        elif all(status == ExportStatus.COMMITTED for status in words):
            self._sealing.add(slot)
            self._spawn(self._seal(slot), slot)

    async def _finish_write(self, slot: Slot) -> None:
        """Seal a slot, or fail its exports, after the request that writes it has ended.

        After a flush of the engine's exports no more data can arrive.
        """
        self._poll_one(slot)
        if not self._is_unwritten(slot):
            return
        await self._engine.flush_exports()
        self._poll_one(slot)
        if self._is_unwritten(slot):
            self._fail(slot, "not_written")

    async def _seal(self, slot: Slot) -> None:
        layout, view = slot.layout, self._arena.view
        data = view[slot.data_offset : slot.data_offset + layout.data_bytes]
        loop = asyncio.get_running_loop()
        sums = await loop.run_in_executor(self._hasher, checksums, layout, data)
        header = layout.header(sums)
        view[slot.file_offset : slot.data_offset] = header
        self._slots.seal(slot, etag(header))
        for export in self._remove_pending(slot):
            self._grant(export, slot)
        if not slot.num_handles:
            self._slots.discard(slot)

    def _fail(self, slot: Slot, reason: KvReason) -> None:
        """Fail all exports of a slot, and free the slot once the engine's exports are flushed.

        Until then other ranks may still write to it.
        """
        self._refuse_all(slot, reason)
        self._spawn(self._free(slot), slot)

    async def _free(self, slot: Slot) -> None:
        await self._engine.flush_exports()
        self._slots.allow_reuse(slot)

    def _refuse_all(self, slot: Slot, reason: KvReason) -> None:
        """Refuse a handle to all exports of a slot, and quarantine the slot.

        The engine may still write to it.
        """
        self._slots.discard(slot, is_writable=True)
        for export in self._remove_pending(slot):
            export.refuse(reason)

    def _remove_pending(self, slot: Slot) -> list[Export]:
        self._sealing.discard(slot)
        return self._pending.pop(slot)

    def _spawn(self, work: Coroutine[Any, Any, None], slot: Slot) -> "asyncio.Task[None]":
        task = asyncio.create_task(self._run_safely(work, slot))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run_safely(self, work: Coroutine[Any, Any, None], slot: Slot) -> None:
        """Await `work` on a slot; an exception fails the slot's exports, but never a rollout."""
        try:
            await work
        except EngineError:
            log.warning("prompt KV export failed: the engine is not running")
            self._fail_internally(slot)
        except Exception:
            log.exception("prompt KV export failed")
            self._fail_internally(slot)

    def _fail_internally(self, slot: Slot) -> None:
        if slot in self._pending:
            self._refuse_all(slot, "internal")
