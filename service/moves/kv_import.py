"""KV of moved samples, fetched from the replica that has sent them, and loaded by their requests.

The receiver copies the KV to the arena of the span cache, and checks it: the header of each file
must be the one that this replica would write for the sample's tokens and the active weights, with
the checksums of the tensors. The samples of a group are a chain of requests, which load the KV of
their prompt once. The copy is released as soon as all samples have a new token.

Samples whose KV could not be fetched in time are prefilled, as all samples without KV.
"""

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from coppice.wire.moves import MovedGroup, MovedGroupKv, MovedKv, MovedRollout
from engine.errors import EngineError
from engine.kv_types import KvLoad
from engine.protocol import Engine
from service.kv_reuse.prompt_sections import Scope
from service.kv_reuse.span_cache import CacheEntry, EntryKey, SpanCache
from service.moves.exports import KvUnavailable
from service.moves.kv_export import KvMoveOutcome, OnKvMoved
from service.moves.kv_files import (
    MAX_SECONDS,
    Deadline,
    EntryReader,
    FetchFailed,
    KvSources,
)
from service.moves.kv_spans import SpanCopy, is_valid, loads_of
from service.rollouts.rollout import Rollout

HOLD_SECONDS = 30.0
"""Maximum time for which KV is kept for samples that have not been scheduled."""
POLL_SECONDS = 0.02
NUM_THREADS = 2

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class ImportedKv:
    """KV of a moved rollout in the arena, until its samples have loaded it.

    `loads` has the KV to load by the index of a group and of a sample. Nothing writes to the
    `entries` once the `work` in threads has ended.
    """

    deadline: Deadline
    entries: list[CacheEntry] = field(default_factory=list)
    loads: dict[int, dict[int, KvLoad]] = field(default_factory=dict)
    work: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [entry.slot.name for entry in self.entries if entry.slot.name is not None]


class KvImporter:
    """Fetches the KV of moved rollouts, in threads, and releases it after it was loaded.

    `on_moved` is called with the number of samples that load their KV, or that are prefilled
    although their source has exported it. `close` it before the cache.
    """

    def __init__(
        self,
        engine: Engine,
        cache: SpanCache,
        sources: KvSources,
        *,
        on_moved: OnKvMoved,
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._sources = sources
        self._reader = EntryReader(engine, cache)
        self._on_moved = on_moved
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="moved-kv")
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_held(self) -> int:
        """Number of rollouts whose KV is in the arena."""
        return len(self._tasks)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._threads.shutdown)

    async def fetch(self, state: MovedRollout) -> ImportedKv:
        """Fetch the KV of a rollout as far as possible; pass the result to `release` or `hold`."""
        seconds = 0.0 if state.kv is None else min(state.kv.seconds, MAX_SECONDS)
        imported = ImportedKv(Deadline(seconds))
        if state.kv is not None:
            try:
                await self._fetch_groups(state, state.kv, imported)
                if imported.loads:
                    await self._engine.add_exported_kv(imported.names)
            except BaseException:
                self.release(imported)
                raise
        return imported

    def hold(self, imported: ImportedKv, rollout: Rollout) -> None:
        """Release the KV of a running rollout as soon as its samples have loaded it."""
        if imported.loads:
            self._on_moved("loaded", sum(map(len, imported.loads.values())))
        if imported.entries:
            self._spawn(self._release_later(imported, rollout))

    def release(self, imported: ImportedKv) -> None:
        """Release the KV of a rollout that does not run here."""
        imported.deadline.end()
        if imported.entries:
            self._spawn(self._release(imported))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _release_later(self, imported: ImportedKv, rollout: Rollout) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(HOLD_SECONDS):
                while not self._have_started(rollout):
                    await asyncio.sleep(POLL_SECONDS)
        await self._release(imported)

    def _have_started(self, rollout: Rollout) -> bool:
        """True if every sample that loads KV has sampled a token or ended."""
        groups = [group for group in rollout.groups if group.loads]
        ids = [group.sample_ids[i] for group in groups for i in group.running_indices()]
        return all(group.began_at for group in groups) and all(self._engine.progress(ids))

    async def _release(self, imported: ImportedKv) -> None:
        await asyncio.gather(*imported.work, return_exceptions=True)
        if imported.loads:
            try:
                await self._engine.remove_exported_kv(imported.names)
                await self._engine.flush_exports()
            except EngineError:
                return  # the engine is gone, so the bytes are not needed again
        for entry in imported.entries:
            self._cache.unpin(entry, settled=True)

    async def _fetch_groups(self, state: MovedRollout, kv: MovedKv, imported: ImportedKv) -> None:
        moved = {group.index: group for group in state.groups}
        for group in kv.groups:
            outcome = await self._try_group(state, moved.get(group.index), group, imported)
            if outcome != "loaded":
                self._on_moved(outcome, len(group.samples))
            elif without := len(group.samples) - len(imported.loads[group.index]):
                self._on_moved("too_small", without)

    async def _try_group(
        self,
        state: MovedRollout,
        moved: MovedGroup | None,
        kv: MovedGroupKv,
        imported: ImportedKv,
    ) -> KvMoveOutcome:
        try:
            if self._cache.reason is not None:
                raise KvUnavailable("disabled")
            if moved is None or not is_valid(moved, kv, self._engine.info.block_size):
                raise FetchFailed("it does not fit the samples")
            copies = self._reserve(state, moved, kv, imported)
            await self._read(state, copies, imported)
            imported.loads[kv.index] = loads_of(moved, kv, copies)
        except KvUnavailable as error:
            return error.reason
        except TimeoutError:
            return "timeout"
        except FetchFailed as error:
            log.warning("the KV of a moved rollout was not fetched: %s", error)
            return "failed"
        return "loaded"

    def _reserve(
        self, state: MovedRollout, moved: MovedGroup, kv: MovedGroupKv, imported: ImportedKv
    ) -> dict[str, SpanCopy]:
        """Reserve memory for the spans of a group, by handle. Raises KvUnavailable without room."""
        copies = dict[str, SpanCopy]()
        for sample, own in zip(moved.samples, kv.samples, strict=True):
            for span in (kv.prompt, own):
                if span is None or span.handle in copies:
                    continue
                key = EntryKey(Scope(state.owner, None), self._cache.epoch, "", b"")
                entry = self._cache.reserve(span.num_tokens, key)
                if entry is None:
                    raise KvUnavailable("no_room")
                imported.entries.append(entry)
                tokens = moved.prompt_token_ids, sample.token_ids
                copies[span.handle] = SpanCopy(span, *tokens, entry)
        return copies

    async def _read(
        self, state: MovedRollout, copies: Mapping[str, SpanCopy], imported: ImportedKv
    ) -> None:
        """Copy the spans of a group in a thread, which ends by itself at the deadline."""
        work = asyncio.get_running_loop().run_in_executor(
            self._threads, self._read_spans, state, list(copies.values()), imported.deadline
        )
        imported.work.append(work)
        await asyncio.wait_for(asyncio.shield(work), imported.deadline.seconds_left)

    def _read_spans(
        self, state: MovedRollout, copies: Sequence[SpanCopy], deadline: Deadline
    ) -> None:
        assert state.kv is not None, "there is something to fetch"
        path = f"/v1/moves/{state.id}/kv"
        source = self._sources.open(state.source, state.kv.boot_id, state.kv.arena, path)
        try:
            for copy in copies:
                self._reader.read(
                    source, copy.span, copy.entry, copy.token_ids, state.version, deadline
                )
        finally:
            source.close()
