"""Export of a prompt's KV: from the submission of the prompt to a handle or a failure reason.

A slot is reserved before the group's samples are submitted to the engine. The first group with a
prompt writes the slot; groups with the same prompt that arrive meanwhile share it. The engine sends
no notification: the per-rank status words in the slot are polled. Once every rank has committed,
the data is checksummed in a thread, the slot is sealed, and each group gets its own handle.

An export ends exactly once. No group waits longer than the engine takes to flush its exports.
Not thread-safe: all methods run on one event loop.
"""

import asyncio
import logging
import struct
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from typing import Any

from coppice.wire.kv import KvReason
from engine.errors import EngineError
from engine.kv_types import ExportSlot, ExportStatus
from engine.protocol import Engine
from service.prompt_kv.arena import Arena
from service.prompt_kv.checksums import checksums, etag
from service.prompt_kv.export_request import ExportRequest, PendingWrite
from service.prompt_kv.handles import Handles
from service.prompt_kv.layout import Layout, LayoutFactory
from service.prompt_kv.slots import Slot, SlotState, SlotTable

POLL_SECONDS = 0.005
# Upper bound on the share of event-loop time that polling takes, for thousands of exports.
MAX_POLL_SHARE = 0.05

log = logging.getLogger(__name__)


class ExportManager:
    """Owner of the pending exports. `run` must be running as a task."""

    def __init__(
        self,
        engine: Engine,
        arena: Arena,
        slots: SlotTable,
        handles: Handles,
        *,
        layouts: LayoutFactory,
        hasher: Executor,
        active_version: Callable[[], str],
    ) -> None:
        self._engine = engine
        self._arena = arena
        self._slots = slots
        self._handles = handles
        self._layouts = layouts
        self._hasher = hasher
        self._active_version = active_version
        self._num_ranks = engine.info.tensor_parallel_size
        self._words = struct.Struct(f"<{self._num_ranks}Q")
        self._pending: dict[Slot, PendingWrite] = {}
        self._has_pending = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, owner: str, prompt: Sequence[int], lease_seconds: float) -> ExportRequest:
        """Start an export; call it before the prompt is submitted to the engine.

        `after_weights_update` covers an activation between this call and the submission.
        """
        export = ExportRequest(owner=owner, lease_seconds=lease_seconds)
        if len(prompt) < 2:
            self._refuse(export, "prompt_too_short")
            return export
        layout = self._layouts.of(prompt[:-1], self._active_version())
        slot = self._slots.find(owner, layout.version, layout.tokens_sha256)
        if slot is None:
            self._reserve(export, layout)
        elif slot.state is SlotState.RESERVED:
            export.pending = self._pending[slot]
            export.pending.exports.append(export)
        else:
            self._grant(export, slot)
        return export

    async def finish(self, export: ExportRequest) -> None:
        """End the export of a group that has ended; `export.ended` is set on return."""
        pending = export.pending
        if pending is not None and export.export_slot is not None:
            await asyncio.shield(self._spawn(self._finish_write(pending), pending))
        if pending is not None and not (pending.is_sealing or pending.is_done):
            # Another group writes the slot and may take long, so this group does not wait.
            pending.exports.remove(export)
            self._refuse(export, "not_written")
        await export.ended.wait()

    def abandon(self, export: ExportRequest) -> None:
        """End the export of an aborted group, including a write that other groups share."""
        pending = export.pending
        if pending is None or export.ended.is_set():
            return
        pending.exports.remove(export)
        self._refuse(export, "not_written")
        if export.export_slot is not None:
            self._spawn(self._finish_write(pending), pending)

    def poll(self) -> None:
        """Check the status words of every pending export once."""
        for pending in list(self._pending.values()):
            self._poll_one(pending)

    async def before_weights_update(self) -> None:
        """Flush and poll while the engine is paused: KV committed now is of the old weights."""
        if self._pending:
            await self._engine.flush_exports()
            self.poll()

    def after_weights_update(self, version: str) -> None:
        """Relabel the reserved slots with the new weights version.

        Their KV is prefilled under the new weights only, or the engine reports `MIXED_VERSION`.
        """
        for pending in self._pending.values():
            if not pending.is_sealing:
                self._slots.relabel(pending.slot, version)

    async def run(self) -> None:
        """Poll while exports are pending."""
        while True:
            await self._has_pending.wait()
            began = time.monotonic()
            self.poll()
            if not self._pending:
                self._has_pending.clear()
            took = time.monotonic() - began
            await asyncio.sleep(max(POLL_SECONDS, took / MAX_POLL_SHARE))

    async def close(self) -> None:
        """Cancel the tasks. No group is running any more, so the slots need no cleanup."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _reserve(self, export: ExportRequest, layout: Layout) -> None:
        slot = self._slots.reserve(export.owner, layout)
        if slot is None:
            self._refuse(export, "arena_full")
            return
        self._words.pack_into(self._arena.view, slot.status_offset, *[0] * self._num_ranks)
        export.pending = self._pending[slot] = PendingWrite(slot=slot, exports=[export])
        export.export_slot = ExportSlot(
            arena=self._arena.path,
            offset=slot.data_offset,
            status_offset=slot.status_offset,
            num_tokens=layout.num_tokens,
        )
        self._has_pending.set()

    def _poll_one(self, pending: PendingWrite) -> None:
        if pending.is_sealing or pending.is_done:
            return
        words = self._words.unpack_from(self._arena.view, pending.slot.status_offset)
        if ExportStatus.FAILED in words:
            self._fail(pending, "export_failed")
        elif ExportStatus.MIXED_VERSION in words:
            self._fail(pending, "mixed_version")
        elif all(status == ExportStatus.COMMITTED for status in words):
            pending.is_sealing = True
            self._spawn(self._seal(pending), pending)

    async def _finish_write(self, pending: PendingWrite) -> None:
        """Seal or fail a slot whose writing request has ended.

        After a flush of the engine's exports no more data can arrive.
        """
        self._poll_one(pending)
        if pending.is_sealing or pending.is_done:
            return
        await self._engine.flush_exports()
        self._poll_one(pending)
        if not (pending.is_sealing or pending.is_done):
            self._fail(pending, "not_written")

    async def _seal(self, pending: PendingWrite) -> None:
        slot, layout, view = pending.slot, pending.slot.layout, self._arena.view
        data = view[slot.data_offset : slot.data_offset + layout.data_bytes]
        loop = asyncio.get_running_loop()
        sums = await loop.run_in_executor(self._hasher, checksums, layout, data)
        header = layout.header(sums)
        view[slot.file_offset : slot.data_offset] = header
        self._slots.seal(slot, etag(header))
        self._remove_pending(pending)
        for export in pending.exports:
            self._grant(export, slot)
        if not slot.num_handles:
            self._slots.discard(slot)

    def _fail(self, pending: PendingWrite, reason: KvReason) -> None:
        """Fail the exports of a slot and quarantine it.

        Other ranks may still write to it until the engine's exports are flushed.
        """
        self._slots.discard(pending.slot, settled=False)
        self._remove_pending(pending)
        for export in pending.exports:
            self._refuse(export, reason)
        self._spawn(self._free(pending.slot), pending)

    async def _free(self, slot: Slot) -> None:
        await self._engine.flush_exports()
        self._slots.settled(slot)

    def _remove_pending(self, pending: PendingWrite) -> None:
        pending.is_done = True
        del self._pending[pending.slot]

    def _grant(self, export: ExportRequest, slot: Slot) -> None:
        export.handle = self._handles.grant(export.owner, slot, export.lease_seconds)
        export.ended.set()

    def _refuse(self, export: ExportRequest, reason: KvReason) -> None:
        export.reason = reason
        export.ended.set()

    def _spawn(
        self, work: Coroutine[Any, Any, None], pending: PendingWrite
    ) -> "asyncio.Task[None]":
        task = asyncio.create_task(self._run_safely(work, pending))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run_safely(self, work: Coroutine[Any, Any, None], pending: PendingWrite) -> None:
        """Run `work` so that its exceptions fail the export but never a rollout.

        The slot may still be written, so it stays quarantined.
        """
        try:
            await work
        except EngineError:
            log.warning("the engine is gone in the middle of an export")
            self._fail_internally(pending)
        except Exception:
            log.exception("export failed")
            self._fail_internally(pending)

    def _fail_internally(self, pending: PendingWrite) -> None:
        if pending.is_done:
            return
        self._slots.discard(pending.slot, settled=False)
        self._remove_pending(pending)
        for export in pending.exports:
            self._refuse(export, "internal")
