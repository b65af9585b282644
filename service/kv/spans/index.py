"""Index of the cached KV of prompt spans, with eviction when the store is full.

An entry is found only under its API key, cache salt, cache key, text and weights epoch (number of
activations). The engine writes it once, by a prefill of the span alone from position 0 on, and
loads it at other positions. Entries that are not pinned are evicted in LRU order. If none is left,
`evict_observation` evicts an observation. When entries of earlier weights are evicted,
`drop_outdated_observations` drops the observations of earlier weights. `Observations` sets both.

Not thread-safe; runs on one event loop.
"""

import logging
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from coppice.wire.kv_reuse import KvReuseReason
from coppice.wire.rollouts import PromptSpan
from engine.protocol.prompt_kv import PromptKv
from engine.types.kv import KvFormat
from service.kv.arena import default_capacity_bytes
from service.kv.spans.prompt_template import Scope, digest
from service.kv.store import Entry, KvStore, data_bytes

log = logging.getLogger(__name__)


class SpanKey(NamedTuple):
    """Key of a span: isolation scope, weights epoch, cache key and token digest."""

    scope: Scope
    epoch: int
    cache_key: str
    digest: bytes


@dataclass(slots=True, kw_only=True, eq=False)
class SpanEntry(Entry):
    """KV of one span, or of a whole observed prompt."""

    key: SpanKey


class SpanIndex:
    """Index of the KV of prompt spans, which the engine writes once and loads into later prompts.

    `open` it once the engine serves, `close` it after the last group has ended. `reason` says why
    spans are not cached; it is None if they are.
    """

    def __init__(
        self,
        engine: PromptKv,
        *,
        directory: Path,
        capacity_bytes: int | None,
        epoch: Callable[[], int],
    ) -> None:
        self._engine = engine
        self._directory = directory
        self._capacity_bytes = capacity_bytes
        self.epoch = epoch
        self.store = KvStore(engine)
        self.reason: KvReuseReason | None = "disabled"
        self.evict_observation: Callable[[], bool] = lambda: False
        self.drop_outdated_observations: Callable[[], object] = lambda: None
        self._entries: OrderedDict[SpanKey, SpanEntry] = OrderedDict()

    def open(self) -> None:
        """Create the arena. On failure, sets `reason`; all prompts are prefilled."""
        num_bytes = self._capacity_bytes
        if num_bytes == 0:
            return
        info = self._engine.info
        if info.kv_format is None:
            self.reason = info.kv_reason or "unsupported_cache"
            return
        if info.kv_format.not_movable is not None:
            log.warning("spans cannot be spliced: %s", info.kv_format.not_movable)
            self.reason = "not_movable"
            return
        if num_bytes is None:  # half of the default of prompt KV, whose arena is created first
            num_bytes = default_capacity_bytes(self._directory) // 2
        self.reason = None if self.store.open(self._directory, num_bytes) else "no_shm"

    @property
    def kv_format(self) -> KvFormat:
        assert self._engine.info.kv_format is not None, "the store is open"
        return self._engine.info.kv_format

    @property
    def num_bytes(self) -> int:
        """Allocated bytes of the arena, including evicted entries that are still pinned."""
        return self.store.extents.capacity_bytes - self.store.extents.free_bytes

    @property
    def num_spans(self) -> int:
        return len(self._entries)

    def get_or_reserve(self, scope: Scope, span: PromptSpan) -> tuple[SpanEntry, bool] | None:
        """Pin the entry of a span, or reserve one; None if there is no room.

        The second value is True if the entry is new and the caller must have it written.
        """
        assert span.cache_key is not None, "only spans with a cache key are cached"
        self._evict_outdated()
        key = SpanKey(scope, self.epoch(), span.cache_key, digest(span.token_ids))
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
            self.store.pin(entry)
            return entry, False
        entry = self.reserve(len(span.token_ids), key)
        if entry is None:
            return None
        self._evict_other_texts(key)
        self._entries[key] = entry
        return entry, True

    def reserve(self, num_tokens: int, key: SpanKey) -> SpanEntry | None:
        """Reserve a pinned entry, evicting others if needed, which is not found by its key yet."""
        return self.store.reserve(
            partial(SpanEntry, key=key),
            num_tokens,
            data_bytes(self.kv_format, num_tokens),
            name=uuid.uuid4().hex,
            evict_one=lambda: self._evict_lru() or self.evict_observation(),
        )

    async def finish_write(self, entry: SpanEntry) -> bool:
        """Record the end of the request that writes an entry; returns whether it is written."""
        is_committed = await self.store.finish_write(entry)
        if not is_committed:
            self.evict(entry)
        self.store.end_write(entry, is_committed=is_committed)
        return is_committed

    def abandon(self, entry: SpanEntry) -> None:
        """Evict and unpin an entry that will not be written; wake up the tasks that wait for it."""
        self.evict(entry)
        self.store.end_write(entry, is_committed=False)
        self.store.unpin_after_flush(entry)

    def evict(self, entry: SpanEntry) -> None:
        """Remove an entry from the index, if it is there; it is freed once it is not pinned."""
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
            self.store.evict(entry)

    def check(self) -> None:
        """Assert the invariants of the store and of the index by key."""
        self.store.check()
        assert all(
            key == entry.key and not entry.is_evicted for key, entry in self._entries.items()
        )

    def _evict_outdated(self) -> None:
        epoch = self.epoch()
        for key in [key for key in self._entries if key.epoch != epoch]:
            self.evict(self._entries[key])
        self.drop_outdated_observations()

    def _evict_other_texts(self, key: SpanKey) -> None:
        """Evict unpinned entries that hold another text under the same scope and cache key."""
        for other, entry in list(self._entries.items()):
            is_same = (other.scope, other.cache_key) == (key.scope, key.cache_key)
            if is_same and not entry.pins:
                self.evict(entry)

    def _evict_lru(self) -> bool:
        unused = next((entry for entry in self._entries.values() if not entry.pins), None)
        if unused is not None:
            self.evict(unused)
        return unused is not None
