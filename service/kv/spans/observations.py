"""Store of observations: earlier prompts with cached KV, used to predict the KV of new ones.

KVCOMM calls them anchors. An observation consists of the KV of a whole prompt, as its prefill has
written it, and the KV of each of its keyed spans prefilled alone. It belongs to one context, that
is one API key, cache salt, weights epoch and template, and is dropped at the next activation. The
number of observations per context is bounded: the least used of the oldest is evicted. If the store
is full, an observation that no request uses is evicted.

Not thread-safe; runs on one event loop.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.errors import EngineError
from service.kv.spans.index import SpanEntry, SpanIndex, SpanKey
from service.kv.spans.prompt_template import PromptTemplate, Scope
from service.observability.kv_metrics import ObservationOutcome

MAX_OBSERVATIONS_PER_CONTEXT = 20
EVICTION_WINDOW = 5


class PromptContext(NamedTuple):
    scope: Scope
    epoch: int
    template: bytes


@dataclass(slots=True, kw_only=True, eq=False)
class Observation:
    """Observed prompt with cached KV, from which other prompts are predicted.

    Modified only by `Observations`. `real` is the KV of the whole prompt. `bases` are the KV of
    its keyed sections, each prefilled alone, by section index. All these entries are pinned.
    """

    context: PromptContext
    template: PromptTemplate
    real: SpanEntry
    bases: Mapping[int, SpanEntry]
    num_uses: int = 0

    def entries(self) -> list[SpanEntry]:
        return [self.real, *self.bases.values()]


class Observations:
    """Observed prompts by context, whose KV is pinned in the store of the spans.

    `num_by_outcome` counts observations by what became of them.
    """

    def __init__(self, index: SpanIndex) -> None:
        self._index = index
        self._contexts: OrderedDict[PromptContext, list[Observation]] = OrderedDict()
        self._settle_tasks: set[asyncio.Task[None]] = set()
        self.num_by_outcome: Counter[ObservationOutcome] = Counter()
        index.evict_observation = self._evict_idle
        index.drop_outdated_observations = self._drop_outdated

    @property
    def num_observations(self) -> int:
        self._drop_outdated()
        return sum(map(len, self._contexts.values()))

    def find(self, scope: Scope, template: PromptTemplate) -> list[Observation]:
        """Find the written observations of a scope and template, oldest first."""
        self._drop_outdated()
        context = self._context(scope, template)
        for observed in list(self._contexts.get(context, ())):
            if any(entry.ended.is_set() and not entry.is_committed for entry in observed.entries()):
                self._drop(observed, "failed")
        if context in self._contexts:
            self._contexts.move_to_end(context)
        existing = self._contexts.get(context, ())
        return [each for each in existing if all(map(self._index.store.is_written, each.entries()))]

    def begin(
        self, scope: Scope, template: PromptTemplate, bases: Mapping[int, SpanEntry]
    ) -> Observation | None:
        """Reserve an entry for a new observation; None if there is no room.

        The caller prefills the prompt, which writes the observation, and then calls `end`. The
        observation is found as soon as it is written.
        """
        context = self._context(scope, template)
        # No span has this key, because the cache keys of spans are not empty.
        key = SpanKey(scope, context.epoch, "", template.context)
        real = self._index.reserve(template.num_tokens, key)
        if real is None:
            return None
        if len(self._contexts.get(context, ())) >= MAX_OBSERVATIONS_PER_CONTEXT:
            self._drop(least_used_of_oldest(self._contexts[context]), "evicted")
        observed = Observation(context=context, template=template, real=real, bases=dict(bases))
        for entry in observed.entries():  # `real` is also pinned for its writer
            self._index.store.pin(entry)
        self._contexts.setdefault(context, []).append(observed)
        return observed

    def is_missing(
        self, scope: Scope, template: PromptTemplate, bases: Mapping[int, SpanEntry]
    ) -> bool:
        """True if no observation with the same texts exists or is being written.

        False also if the weights have changed since the spans were looked up.
        """
        existing = self._contexts.get(self._context(scope, template), ())
        is_there = any(each.template.sections == template.sections for each in existing)
        return not is_there and all(k.key.epoch == self._index.epoch() for k in bases.values())

    def used(self, observations: Sequence[Observation]) -> None:
        for observed in observations:
            observed.num_uses += 1

    def end(self, observed: Observation) -> None:
        """Complete an observation after its writing request has left the engine."""
        if self._index.store.is_written(observed.real):
            self._on_write_end(observed, is_written=True)
            return
        task = asyncio.create_task(self._settle(observed))
        self._settle_tasks.add(task)
        task.add_done_callback(self._settle_tasks.discard)

    def forget(self, observations: Sequence[Observation]) -> None:
        """Drop observations whose KV the engine can no longer load."""
        for observed in observations:
            self._drop(observed, "outdated")

    def check(self) -> None:
        """Assert that all observations are pinned and that no context has too many of them."""
        for observations in self._contexts.values():
            assert 0 < len(observations) <= MAX_OBSERVATIONS_PER_CONTEXT
            assert all(entry.pins > 0 for observed in observations for entry in observed.entries())

    async def close(self) -> None:
        for task in self._settle_tasks:
            task.cancel()
        await asyncio.gather(*self._settle_tasks, return_exceptions=True)

    async def _settle(self, observed: Observation) -> None:
        try:
            is_written = await self._index.finish_write(observed.real)
        except EngineError:
            return  # the engine is gone, so the bytes are not needed again
        self._on_write_end(observed, is_written=is_written)

    def _on_write_end(self, observed: Observation, *, is_written: bool) -> None:
        self._index.store.end_write(observed.real, is_committed=is_written)
        if is_written:
            self.num_by_outcome["created"] += 1
        else:
            self._drop(observed, "failed")
        self._index.store.unpin(observed.real)

    def _evict_idle(self) -> bool:
        """Make room in the store by evicting an observation that no request uses.

        Drops all outdated observations if there are any, else one of the least recently requested
        context that has an unused observation.
        """
        if self._drop_outdated():
            return True
        for observations in self._contexts.values():
            idle = [
                each for each in observations if each.real.ended.is_set() and each.real.pins == 1
            ]
            if idle:
                self._drop(least_used_of_oldest(idle), "evicted")
                return True
        return False

    def _drop_outdated(self) -> bool:
        epoch = self._index.epoch()
        outdated = [
            observed
            for context, observations in self._contexts.items()
            if context.epoch != epoch
            for observed in observations
        ]
        for observed in outdated:
            self._drop(observed, "outdated")
        return bool(outdated)

    def _drop(self, observed: Observation, outcome: ObservationOutcome) -> None:
        """Remove an observation; its KV is freed once no request uses it."""
        existing = self._contexts.get(observed.context, [])
        if observed not in existing:
            return
        existing.remove(observed)
        if not existing:
            del self._contexts[observed.context]
        self.num_by_outcome[outcome] += 1
        self._index.store.evict(observed.real)
        for entry in observed.entries():
            self._index.store.unpin(entry)

    def _context(self, scope: Scope, template: PromptTemplate) -> PromptContext:
        return PromptContext(scope, self._index.epoch(), template.context)


def least_used_of_oldest(observations: Sequence[Observation]) -> Observation:
    """Least used of the EVICTION_WINDOW oldest observed prompts; the oldest in case of a tie."""
    return min(observations[:EVICTION_WINDOW], key=lambda observed: observed.num_uses)
