"""Export of a prompt's KV: reserves memory, waits for the engine's write, creates handles.

An entry is reserved before the group's samples are submitted to the engine. The first group with a
prompt writes the entry; groups with the same prompt that arrive meanwhile share it. A thread
allocates its pages while the prompt is queued and prefilled. The status of the entries being
written is polled. Once every rank has committed, the data is checksummed in a thread, the entry is
committed, and each group gets its own handle.

An export ends exactly once. No group waits longer than the engine takes to flush its exports.
Not thread-safe: all methods run on one event loop.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from coppice.wire.prompt_kv import KvReason
from engine.errors import EngineError
from engine.protocol.prompt_kv import PromptKv
from engine.types.kv import ExportSlot, ExportStatus
from service.kv.handles.file_layout import Layout, LayoutFactory, checksums, etag
from service.kv.handles.gpu_memory import GpuKv
from service.kv.handles.handle import Handle, PromptEntry
from service.kv.handles.index import HandleIndex
from service.kv.store import KvStore
from service.weights_versions import Versions

POLL_SECONDS = 0.005
# Upper bound on the share of event-loop time that polling takes, for thousands of exports.
MAX_POLL_SHARE = 0.05

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class Export:
    """KV export of one prompt, or of one path of a tree, on behalf of one group.

    If it `is_writer`, its group has `entry` written; otherwise another group does. Once `ended` is
    set, `handle` or `reason` is set.
    """

    owner: str
    lease_seconds: float
    entry: PromptEntry | None = None
    is_writer: bool = False
    handle: Handle | None = None
    reason: KvReason | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def slot(self) -> ExportSlot | None:
        """Slot for the engine request that writes the entry; None if another group writes it."""
        return self.entry.slot if self.entry is not None and self.is_writer else None

    def grant(self, handle: Handle) -> None:
        self.handle = handle
        self.ended.set()

    def refuse(self, reason: KvReason | None) -> None:
        self.reason = reason
        self.ended.set()


class ExportManager:
    """Carries out prompt-KV exports: polls the entries that the engine writes, grants handles.

    Call `open` before the first export, and run `run` as a task from then on.
    """

    def __init__(
        self, engine: PromptKv, store: KvStore, index: HandleIndex, versions: Versions
    ) -> None:
        self._engine = engine
        self._store = store
        self._index = index
        self._versions = versions
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="kv-checksums")
        self._page_allocator = ThreadPoolExecutor(1, thread_name_prefix="kv-pages")
        self._pending: dict[PromptEntry, list[Export]] = {}
        self._sealing: set[PromptEntry] = set()
        self._has_pending = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, layouts: LayoutFactory, gpu_kv: GpuKv) -> None:
        self._layouts, self._gpu_kv = layouts, gpu_kv

    def begin(self, owner: str, prompt: Sequence[int], lease_seconds: float) -> Export:
        """Start the export of a prompt's KV; call it before the prompt is submitted to the engine.

        `after_weights_update` handles an activation between this call and the submission.
        """
        export = Export(owner=owner, lease_seconds=lease_seconds)
        if len(prompt) < 2:
            export.refuse("prompt_too_short")
            return export
        layout = self._layouts.of(prompt[:-1], self._versions.active.label)
        export.entry = self._index.find(owner, layout)
        if export.entry is None:
            self._reserve(export, layout)
        elif export.entry.is_committed:
            self._grant(export, export.entry)
        else:
            self._pending[export.entry].append(export)
        return export

    async def finish(self, export: Export) -> None:
        """End the export of a group that has ended; `export.ended` is set on return."""
        entry = export.entry
        if entry is not None and export.is_writer:
            await asyncio.shield(self._spawn(self._finish_write(entry), entry))
        if entry is not None and self._is_unwritten(entry):
            # Another group writes the entry and may take long, so this group does not wait.
            self._pending[entry].remove(export)
            export.refuse("not_written")
        await export.ended.wait()

    def abandon(self, export: Export) -> None:
        """End the export of an aborted group, and its write, if it wrote a shared entry."""
        entry = export.entry
        if entry is None or export.ended.is_set():
            return
        self._pending[entry].remove(export)
        export.refuse("not_written")
        if export.is_writer:
            self._spawn(self._finish_write(entry), entry)

    def poll(self) -> None:
        """Check once, by their status words, whether the entries being written are complete."""
        for entry in list(self._pending):
            self._poll_one(entry)

    async def before_weights_update(self) -> None:
        """Flush and poll the exports before new weights are activated.

        The engine is paused, and KV that is committed by now is of the old weights.
        """
        if self._pending:
            await self._engine.flush_exports()
            self.poll()

    def after_weights_update(self, version: str) -> None:
        """Assign the entries that are not written yet to the new weights version.

        Their KV is prefilled under the new weights only, or the engine reports `MIXED_VERSION`.
        """
        for entry in self._pending:
            if entry not in self._sealing:
                self._index.relabel(entry, version)

    async def run(self) -> None:
        """Background task that polls the entries while the engine writes any."""
        while True:
            await self._has_pending.wait()
            began = time.monotonic()
            self.poll()
            if not self._pending:
                self._has_pending.clear()
            took = time.monotonic() - began
            await asyncio.sleep(max(POLL_SECONDS, took / MAX_POLL_SHARE))

    async def close(self) -> None:
        """Cancel the export tasks; no group is running any more, so entries need no cleanup."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._hasher.shutdown()
        self._page_allocator.shutdown()

    def _reserve(self, export: Export, layout: Layout) -> None:
        gpu_bytes = self._gpu_kv.rank_bytes(layout)
        entry = self._index.reserve(export.owner, layout, gpu_bytes=gpu_bytes)
        if entry is None:
            export.refuse("arena_full")
            return
        export.entry, export.is_writer = entry, True
        self._pending[entry] = [export]
        self._page_allocator.submit(self._store.arena.back, entry.slot.offset, entry.extent.end)
        self._has_pending.set()

    def _grant(self, export: Export, entry: PromptEntry) -> None:
        export.grant(self._index.grant(export.owner, entry, export.lease_seconds))

    def _is_unwritten(self, entry: PromptEntry) -> bool:
        return entry in self._pending and entry not in self._sealing

    def _poll_one(self, entry: PromptEntry) -> None:
        if not self._is_unwritten(entry):
            return
        match self._store.status(entry):
            case ExportStatus.COMMITTED:
                self._sealing.add(entry)
                self._spawn(self._seal(entry), entry)
            case ExportStatus.FAILED:
                self._fail(entry, "export_failed")
            case ExportStatus.MIXED_VERSION:
                self._fail(entry, "mixed_version")

    async def _finish_write(self, entry: PromptEntry) -> None:
        """Seal an entry, or fail its exports, after the request that writes it has ended."""
        self._poll_one(entry)
        if self._is_unwritten(entry):
            await self._store.finish_write(entry)
            self._poll_one(entry)
        if self._is_unwritten(entry):
            self._fail(entry, "not_written")

    async def _seal(self, entry: PromptEntry) -> None:
        layout, view = entry.layout, self._store.arena.view
        data = view[entry.slot.offset : entry.slot.offset + layout.data_bytes]
        loop = asyncio.get_running_loop()
        sums = await loop.run_in_executor(self._hasher, checksums, layout, data)
        header = layout.header(sums)
        view[entry.file_offset : entry.slot.offset] = header
        entry.etag = etag(header)
        self._store.end_write(entry, is_committed=True)
        for export in self._remove_pending(entry):
            self._grant(export, entry)
        if not entry.num_handles:
            self._index.evict(entry)
        self._store.unpin(entry)

    def _fail(self, entry: PromptEntry, reason: KvReason) -> None:
        """Refuse a handle to all exports of an entry, which ranks may still write until a flush."""
        self._index.evict(entry)
        self._store.end_write(entry, is_committed=False)
        self._store.unpin_after_flush(entry)
        for export in self._remove_pending(entry):
            export.refuse(reason)

    def _remove_pending(self, entry: PromptEntry) -> list[Export]:
        self._sealing.discard(entry)
        return self._pending.pop(entry)

    def _spawn(self, work: Coroutine[Any, Any, None], entry: PromptEntry) -> "asyncio.Task[None]":
        task = asyncio.create_task(self._run_safely(work, entry))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run_safely(self, work: Coroutine[Any, Any, None], entry: PromptEntry) -> None:
        """Await `work` on an entry; an exception fails its exports, but never a rollout."""
        try:
            await work
        except EngineError:
            log.warning("prompt KV export failed: the engine is not running")
        except Exception:
            log.exception("prompt KV export failed")
        else:
            return
        if entry in self._pending:
            self._fail(entry, "internal")
