"""Anchors: observed prompts from which the KV of other prompts of the same template is predicted.

The API calls them observations; "anchor" is KVCOMM's word. An anchor consists of the KV of a whole
prompt, as its prefill has written it, and the KV of each of its keyed spans prefilled alone. It
belongs to one context, that is one API key, cache salt, weights epoch and template, and is dropped
at the next activation. The number of anchors per context is bounded: the least used of the oldest
is evicted. If the span cache is full, an anchor that no request uses is evicted.

Not thread-safe; runs on one event loop.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.errors import EngineError
from service.kv.spans.cache import CacheEntry, EntryKey, SpanCache
from service.kv.spans.prompt_template import PromptTemplate, Scope
from service.observability.kv_metrics import AnchorOutcome

MAX_ANCHORS_PER_CONTEXT = 20
EVICTION_WINDOW = 5


class AnchorContext(NamedTuple):
    scope: Scope
    epoch: int
    template: bytes


@dataclass(slots=True, kw_only=True, eq=False)
class Anchor:
    """Observed prompt with cached KV, from which other prompts are predicted.

    Modified only by the AnchorStore. `real` is the KV of the whole prompt. `bases` are the KV of
    its keyed sections, each prefilled alone, by section index. All these cache entries are pinned.
    """

    context: AnchorContext
    template: PromptTemplate
    real: CacheEntry
    bases: Mapping[int, CacheEntry]
    num_uses: int = 0

    def cached(self) -> list[CacheEntry]:
        return [self.real, *self.bases.values()]


class AnchorStore:
    """Registry of anchors (observed prompts), which keeps their KV pinned in the span cache.

    `num_by_outcome` counts anchors by what became of them.
    """

    def __init__(self, cache: SpanCache) -> None:
        self._cache = cache
        self._contexts: OrderedDict[AnchorContext, list[Anchor]] = OrderedDict()
        self._settle_tasks: set[asyncio.Task[None]] = set()
        self.num_by_outcome: Counter[AnchorOutcome] = Counter()
        cache.evict_anchor = self._evict_idle
        cache.drop_outdated_anchors = self._drop_outdated

    @property
    def num_anchors(self) -> int:
        self._drop_outdated()
        return sum(map(len, self._contexts.values()))

    def find(self, scope: Scope, template: PromptTemplate) -> list[Anchor]:
        """Find the written anchors (observed prompts) of a scope and template, oldest first."""
        self._drop_outdated()
        context = self._context(scope, template)
        for anchor in list(self._contexts.get(context, ())):
            if any(cached.ended.is_set() and not cached.is_written for cached in anchor.cached()):
                self._drop(anchor, "failed")
        if context in self._contexts:
            self._contexts.move_to_end(context)
        existing = self._contexts.get(context, ())
        return [a for a in existing if all(map(self._cache.is_committed, a.cached()))]

    def begin(
        self, scope: Scope, template: PromptTemplate, bases: Mapping[int, CacheEntry]
    ) -> Anchor | None:
        """Reserve cache memory for a new anchor (observed prompt); None if there is no room.

        The caller prefills the prompt, which writes the anchor, and then calls `end`. The anchor is
        found as soon as it is written.
        """
        context = self._context(scope, template)
        key = EntryKey(
            scope, context.epoch, "", template.context
        )  # differs from the keys of spans, whose cache keys are not empty
        real = self._cache.reserve(template.num_tokens, key)
        if real is None:
            return None
        if len(self._contexts.get(context, ())) >= MAX_ANCHORS_PER_CONTEXT:
            self._drop(least_used_of_oldest(self._contexts[context]), "evicted")
        anchor = Anchor(context=context, template=template, real=real, bases=dict(bases))
        for cached in anchor.cached():  # the slot of `real` is also pinned for its writer
            cached.pins += 1
        self._contexts.setdefault(context, []).append(anchor)
        return anchor

    def is_missing(
        self, scope: Scope, template: PromptTemplate, bases: Mapping[int, CacheEntry]
    ) -> bool:
        """True if no anchor (observed prompt) with the same texts exists or is being written.

        False also if the weights have changed since the spans were looked up.
        """
        existing = self._contexts.get(self._context(scope, template), ())
        is_there = any(a.template.sections == template.sections for a in existing)
        return not is_there and all(k.key.epoch == self._cache.epoch for k in bases.values())

    def used(self, anchors: Sequence[Anchor]) -> None:
        for anchor in anchors:
            anchor.num_uses += 1

    def end(self, anchor: Anchor) -> None:
        """Complete an anchor (observed prompt) after its writing request has left the engine."""
        if self._cache.is_committed(anchor.real):
            self._on_write_end(anchor, is_written=True)
            return
        task = asyncio.create_task(self._settle(anchor))
        self._settle_tasks.add(task)
        task.add_done_callback(self._settle_tasks.discard)

    def forget(self, anchors: Sequence[Anchor]) -> None:
        """Drop anchors (observed prompts) whose KV the engine can no longer load."""
        for anchor in anchors:
            self._drop(anchor, "outdated")

    def check(self) -> None:
        """Assert that all anchors are pinned and that no context has too many of them."""
        for anchors in self._contexts.values():
            assert 0 < len(anchors) <= MAX_ANCHORS_PER_CONTEXT
            assert all(cached.pins > 0 for anchor in anchors for cached in anchor.cached())

    async def close(self) -> None:
        for task in self._settle_tasks:
            task.cancel()
        await asyncio.gather(*self._settle_tasks, return_exceptions=True)

    async def _settle(self, anchor: Anchor) -> None:
        try:
            is_written = await self._cache.finish_write(anchor.real)
        except EngineError:
            return  # the engine is gone, so the bytes are not needed again
        self._on_write_end(anchor, is_written=is_written)

    def _on_write_end(self, anchor: Anchor, *, is_written: bool) -> None:
        anchor.real.is_written = is_written
        anchor.real.ended.set()
        if is_written:
            self.num_by_outcome["created"] += 1
        else:
            self._drop(anchor, "failed")
        self._cache.unpin(anchor.real, settled=True)

    def _evict_idle(self) -> bool:
        """Make room in the span cache by evicting an observed prompt that no request uses.

        Drops all outdated anchors if there are any, else one of the least recently requested
        context that has an unused anchor.
        """
        if self._drop_outdated():
            return True
        for anchors in self._contexts.values():
            idle = [a for a in anchors if a.real.ended.is_set() and a.real.pins == 1]
            if idle:
                self._drop(least_used_of_oldest(idle), "evicted")
                return True
        return False

    def _drop_outdated(self) -> bool:
        epoch = self._cache.epoch
        outdated = [
            anchor
            for context, anchors in self._contexts.items()
            if context.epoch != epoch
            for anchor in anchors
        ]
        for anchor in outdated:
            self._drop(anchor, "outdated")
        return bool(outdated)

    def _drop(self, anchor: Anchor, outcome: AnchorOutcome) -> None:
        """Remove an anchor (observed prompt); its KV is freed once no request uses it."""
        existing = self._contexts.get(anchor.context, [])
        if anchor not in existing:
            return
        existing.remove(anchor)
        if not existing:
            del self._contexts[anchor.context]
        self.num_by_outcome[outcome] += 1
        for cached in anchor.cached():
            self._cache.unpin(cached, settled=True)

    def _context(self, scope: Scope, template: PromptTemplate) -> AnchorContext:
        return AnchorContext(scope, self._cache.epoch, template.context)


def least_used_of_oldest(anchors: Sequence[Anchor]) -> Anchor:
    """Least used of the EVICTION_WINDOW oldest observed prompts; the oldest in case of a tie."""
    return min(anchors[:EVICTION_WINDOW], key=lambda anchor: anchor.num_uses)
