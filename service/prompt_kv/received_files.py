"""Prompt-KV files of other replicas, which are copied to the arena.

The slot of a copy is not shared before the copy is complete, and it is not reused while a thread
writes to it.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor

from service.prompt_kv.arena import Arena
from service.prompt_kv.layout import Layout, LayoutFactory
from service.prompt_kv.slots import Slot, SlotState, SlotTable

ReadFile = Callable[[Layout, memoryview], bytes]
"""Fills the memory with a file's tensors, in a thread, and returns the file's header."""


class ArenaFull(Exception):
    """The arena, or its shared-memory mount, has no memory for a file."""


class ReceivedFiles:
    """Copies prompt-KV files of other replicas to slots of the arena."""

    def __init__(
        self, arena: Arena, slots: SlotTable, layouts: LayoutFactory, threads: Executor
    ) -> None:
        self._arena = arena
        self._slots = slots
        self._layouts = layouts
        self._threads = threads

    def layout(self, version: str, num_tokens: int, digest: str) -> Layout:
        """Layout that the KV of a prompt with this digest has here."""
        return self._layouts.of_digest(version, num_tokens, digest)

    async def slot(
        self, owner: str, layout: Layout, file_etag: str, read: ReadFile, seconds: float
    ) -> Slot:
        """A sealed slot with a file, which may have been there before; give it a handle at once.

        Raises ArenaFull, TimeoutError, or an exception of `read`.
        """
        found = self._slots.find(owner, layout)
        if found is not None and found.state is SlotState.LEASED and found.etag == file_etag:
            return found
        slot = self._slots.reserve(owner, layout, is_shared=False)
        if slot is None:
            raise ArenaFull("no free extent")
        await self._copy(slot, read, seconds)
        self._slots.seal(slot, file_etag)
        return slot

    async def _copy(self, slot: Slot, read: ReadFile, seconds: float) -> None:
        """Copy a file in a thread, which must end by itself. Discards the slot on failure."""
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._threads, self._write, slot, read)
        try:
            await asyncio.wait_for(asyncio.shield(work), seconds)
        except BaseException:
            self._slots.discard(slot, is_writable=True)
            work.add_done_callback(lambda work: self._allow_reuse(slot, work))
            raise

    def _allow_reuse(self, slot: Slot, work: asyncio.Future[None]) -> None:
        work.exception()  # marks it as retrieved
        self._slots.allow_reuse(slot)

    def _write(self, slot: Slot, read: ReadFile) -> None:
        if not self._arena.back(slot.extent.start, slot.extent.end):
            raise ArenaFull("the shared-memory mount is full")
        layout, view = slot.layout, self._arena.view
        data = view[slot.data_offset : slot.data_offset + layout.data_bytes]
        view[slot.file_offset : slot.data_offset] = read(layout, data)
