"""KV reuse by prediction: predict a prompt's KV from observed prompts (anchors), or prefill it.

The engine request of each sample loads the predicted KV and prefills the rest, at least the last
token. A prompt that is prefilled instead is stored as an anchor if there is room. It is submitted
like any other prompt, so its KV is exact; spans that are not cached yet are prefilled alone,
concurrently with it.
"""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from coppice.wire.kv_reuse import KvReuseReason
from coppice.wire.rollouts import PromptSpan
from engine.protocol.generation import Generation
from engine.types.kv import ExportSlot, KvLoad, LoadPiece, ObservedKv
from engine.types.samples import Completion, SampleRequest
from service.kv.prompt_source import GroupMonitor
from service.kv.spans.cache import CacheEntry
from service.kv.spans.observed_prompt_selection import (
    AnchorSelection,
    DistanceCache,
    SectionCandidates,
    find_candidates,
    pairs_to_compare,
    select_anchors,
)
from service.kv.spans.observed_prompts import Anchor, AnchorStore
from service.kv.spans.pinned_spans import ReuseFailed, SpanLease, cancel_on_end
from service.kv.spans.prompt_template import PromptTemplate, TemplateSection, template_of

MAX_SECTIONS = 128
"""Maximum number of sections of a predicted prompt.

Each section is compared with every anchor, and each keyed section is prefilled alone.
"""


def load_pieces(
    template: PromptTemplate,
    bases: Mapping[int, CacheEntry],
    found: Sequence[SectionCandidates],
    selection: AnchorSelection,
) -> tuple[LoadPiece, ...]:
    """KV pieces that the engine loads for a predicted prompt, consecutive from token 0 on."""
    return tuple(
        _piece(template.sections[index], index, candidates, bases, selection.weights[index])
        for index, candidates in enumerate(found)
        if template.sections[index].num_tokens
    )


def _piece(
    section: TemplateSection,
    index: int,
    candidates: SectionCandidates,
    bases: Mapping[int, CacheEntry],
    weights: Mapping[Anchor, float],
) -> LoadPiece:
    if candidates.exact_match is not None:
        return _from_anchor(section, candidates.exact_match, index)
    if section.cache_key is None:
        nearest = max(weights, key=lambda anchor: weights[anchor])
        observations = [_observed(section, a, index, weight=w) for a, w in weights.items()]
        return _from_anchor(section, nearest, index, observations)
    if index == 0:
        return _from_base(section, bases[0])
    observations = [_observed(section, a, index, base=a.bases[index]) for a in weights]
    return _from_base(section, bases[index], observations)


def _from_anchor(
    section: TemplateSection, anchor: Anchor, index: int, observations: Sequence[ObservedKv] = ()
) -> LoadPiece:
    """LoadPiece that takes a section's KV from the prompt KV of an anchor (observed prompt)."""
    there = anchor.template.sections[index]
    return LoadPiece(
        source=anchor.real.slot,
        token_offset=there.start,
        num_tokens=section.num_tokens,
        start=section.start,
        shift=section.start - there.start,
        observations=tuple(observations),
    )


def _from_base(
    section: TemplateSection, base: CacheEntry, observations: Sequence[ObservedKv] = ()
) -> LoadPiece:
    """LoadPiece that takes a section's KV from a prefill of the section alone."""
    return LoadPiece(
        source=base.slot,
        token_offset=0,
        num_tokens=section.num_tokens,
        start=section.start,
        shift=section.start,
        observations=tuple(observations),
    )


def _observed(
    section: TemplateSection,
    anchor: Anchor,
    index: int,
    *,
    base: CacheEntry | None = None,
    weight: float = 1.0,
) -> ObservedKv:
    there = anchor.template.sections[index]
    return ObservedKv(
        real=anchor.real.slot,
        token_offset=there.start,
        shift=section.start - there.start,
        base=None if base is None else base.slot,
        weight=weight,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class PredictionPlan:
    """Plan to predict a prompt's KV from anchors (observed prompts), for `num_samples` samples."""

    lease: SpanLease
    anchors: AnchorStore
    distances: DistanceCache
    spans: Sequence[PromptSpan]
    max_entropy: float
    num_samples: int
    prefills: list[SampleRequest] = field(default_factory=list)
    export: ExportSlot | None = None
    reason: KvReuseReason | None = None
    num_computed: int = 0
    num_anchors: int = 0
    _entry_by_request: dict[str, CacheEntry] = field(default_factory=dict)
    _anchor_to_write: Anchor | None = None
    _source_anchors: list[Anchor] = field(default_factory=list)
    _exact_tokens: int = 0
    _end: int = 0

    async def prepare(self, engine: Generation, monitor: GroupMonitor) -> KvLoad | None:
        if self.lease.cache.reason is not None:
            raise ReuseFailed(self.lease.cache.reason)
        template = template_of(self.spans)
        if template.num_template_sections == 0 or not 2 <= len(template.sections) <= MAX_SECTIONS:
            raise ReuseFailed("nothing_to_reuse")
        if monitor.ends:
            raise ReuseFailed("not_written")
        bases = self._acquire_bases(template)
        existing = self.anchors.find(self.lease.scope, template)
        found = find_candidates(template, existing)
        if found is None:
            self._prefill_and_store(template, bases, "no_observations")
            return None
        with self._pinned_while_choosing(existing):
            await self.lease.write(engine, monitor)
            selection = await cancel_on_end(monitor, self._select(template, bases, found))
            if monitor.ends:
                raise ReuseFailed("not_written")
            if selection is not None:
                return self._build_prediction(template, bases, found, selection)
        self._prefill_and_store(template, bases, "entropy_too_high")
        return None

    async def on_completed(self, request: SampleRequest, done: Completion) -> None:
        await self.lease.on_completed(self._entry_by_request.pop(request.id), request, done)

    def is_approximate(self, num_cached: int) -> bool:
        """True if a sample with `num_cached` cached tokens has used predicted KV."""
        return num_cached > self._exact_tokens

    def is_loaded(self, num_cached: int) -> bool:
        """True if a sample with `num_cached` cached tokens has loaded any KV of this plan."""
        return num_cached >= min(self._exact_tokens + 1, self._end)

    def forget(self) -> None:
        """Drop cached KV that the engine can no longer load, so that it is written again."""
        self.anchors.forget(self._source_anchors)
        self.lease.forget()

    def release(self, *, settled: bool) -> None:
        if self._anchor_to_write is not None:
            self.anchors.end(self._anchor_to_write)
            self._anchor_to_write = None
        self.lease.release(settled=settled)

    def _acquire_bases(self, template: PromptTemplate) -> dict[int, CacheEntry]:
        """Pin cache entries of keyed sections, each prefilled alone; returns them by index."""
        keyed = {span.cache_key: span for span in self.spans if span.cache_key is not None}
        sections = enumerate(template.sections)
        return self.lease.acquire(
            {i: keyed[s.cache_key] for i, s in sections if s.cache_key is not None}
        )

    @contextmanager
    def _pinned_while_choosing(self, anchors: Sequence[Anchor]) -> Iterator[None]:
        """Context manager that keeps anchors (observed prompts) pinned while some are selected.

        The lease then pins the selected ones. The selection awaits, and unpinned anchors could be
        dropped meanwhile.
        """
        held = [cached for anchor in anchors for cached in anchor.cached()]
        for cached in held:
            cached.pins += 1
        try:
            yield
        finally:
            for cached in held:
                self.lease.cache.unpin(cached, settled=True)

    async def _select(
        self,
        template: PromptTemplate,
        bases: Mapping[int, CacheEntry],
        found: Sequence[SectionCandidates],
    ) -> AnchorSelection | None:
        pairs = {
            (index, anchor): (bases[index].slot, anchor.bases[index].slot)
            for index, anchor in pairs_to_compare(template, found)
        }
        known = await self.distances.get_distances(pairs.values())
        distances = {place: known[pair] for place, pair in pairs.items()}
        return select_anchors(template, found, distances, self.max_entropy)

    def _prefill_and_store(
        self, template: PromptTemplate, bases: Mapping[int, CacheEntry], reason: KvReuseReason
    ) -> None:
        """Let the samples prefill the prompt; the first one stores it as an anchor if needed."""
        self.reason = reason
        for request, cached in self.lease.write_requests():
            self.prefills.append(request)
            self._entry_by_request[request.id] = cached
        if not self.anchors.is_missing(self.lease.scope, template, bases):
            return
        self._anchor_to_write = self.anchors.begin(self.lease.scope, template, bases)
        if self._anchor_to_write is None:
            self.reason = "cache_full"
        else:
            self.export = self._anchor_to_write.real.slot

    def _build_prediction(
        self,
        template: PromptTemplate,
        bases: Mapping[int, CacheEntry],
        found: Sequence[SectionCandidates],
        selection: AnchorSelection,
    ) -> KvLoad:
        self._source_anchors = list(selection.sources)
        self.anchors.used(list(selection.used))
        self.num_anchors = len(self._source_anchors)
        for cached in {cached for anchor in self._source_anchors for cached in anchor.cached()}:
            self.lease.pin(cached)
        pieces = load_pieces(template, bases, found, selection)
        self._exact_tokens = selection.exact_tokens
        self._end = pieces[-1].start + pieces[-1].num_tokens
        return KvLoad(
            chain=uuid.uuid4().hex,
            num_requests=self.num_samples,
            exact_tokens=selection.exact_tokens,
            pieces=pieces,
        )
