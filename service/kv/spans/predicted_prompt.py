"""KV reuse by prediction: a prompt's KV is estimated from earlier prompts (KVCOMM).

The engine request of each sample loads the predicted KV and prefills the rest, at least the last
token. A prompt that is prefilled instead is stored as an observation if there is room. It is
submitted like any other prompt, so its KV is exact; spans that are not cached yet are prefilled
alone, concurrently with it.
"""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

from coppice.wire.kv_reuse import KvReuseMode, KvReuseReason
from engine.protocol.generation import Generation
from engine.types.kv import KvLoad, LoadPiece, ObservedKv
from engine.types.samples import Completion, SampleRequest
from service.kv.prompt_source import GroupMonitor
from service.kv.spans.index import SpanEntry
from service.kv.spans.observations import Observation, Observations
from service.kv.spans.pinned_spans import ReuseFailed, cancel_on_end
from service.kv.spans.prediction_sources import (
    DistanceCache,
    PredictionSources,
    SectionCandidates,
    find_candidates,
    pairs_to_compare,
    select_observations,
)
from service.kv.spans.prompt_template import PromptTemplate, TemplateSection, template_of
from service.kv.spans.span_prompt import SpanPrompt

DEFAULT_MAX_ENTROPY = 0.3
MAX_SECTIONS = 128
"""Maximum number of sections of a predicted prompt.

Each section is compared with every observation, and each keyed section is prefilled alone.
"""


def load_pieces(
    template: PromptTemplate,
    bases: Mapping[int, SpanEntry],
    found: Sequence[SectionCandidates],
    selection: PredictionSources,
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
    bases: Mapping[int, SpanEntry],
    weights: Mapping[Observation, float],
) -> LoadPiece:
    if candidates.exact_match is not None:
        return _from_observation(section, candidates.exact_match, index)
    if section.cache_key is None:
        nearest = max(weights, key=lambda observed: weights[observed])
        observations = [_observed(section, a, index, weight=w) for a, w in weights.items()]
        return _from_observation(section, nearest, index, observations)
    if index == 0:
        return _from_base(section, bases[0])
    observations = [_observed(section, a, index, base=a.bases[index]) for a in weights]
    return _from_base(section, bases[index], observations)


def _from_observation(
    section: TemplateSection,
    observed: Observation,
    index: int,
    observations: Sequence[ObservedKv] = (),
) -> LoadPiece:
    """LoadPiece that takes a section's KV from the prompt KV of an observation."""
    origin = observed.template.sections[index]
    return LoadPiece(
        source=observed.real.slot,
        token_offset=origin.start,
        num_tokens=section.num_tokens,
        start=section.start,
        shift=section.start - origin.start,
        observations=tuple(observations),
    )


def _from_base(
    section: TemplateSection, base: SpanEntry, observations: Sequence[ObservedKv] = ()
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
    observed: Observation,
    index: int,
    *,
    base: SpanEntry | None = None,
    weight: float = 1.0,
) -> ObservedKv:
    origin = observed.template.sections[index]
    return ObservedKv(
        real=observed.real.slot,
        token_offset=origin.start,
        shift=section.start - origin.start,
        base=None if base is None else base.slot,
        weight=weight,
    )


@dataclass(kw_only=True, eq=False)
class PredictedPrompt(SpanPrompt):
    """Prompt whose KV is predicted from observations."""

    mode: ClassVar[KvReuseMode] = "predict"
    observations: Observations
    distances: DistanceCache
    max_entropy: float
    _entry_by_request: dict[str, SpanEntry] = field(default_factory=dict)
    _observation_to_write: Observation | None = None
    _source_observations: list[Observation] = field(default_factory=list)
    _exact_tokens: int = 0
    _end: int = 0

    async def _load(self, engine: Generation, monitor: GroupMonitor) -> KvLoad | None:
        template = template_of(self.spans)
        if template.num_template_sections == 0 or not 2 <= len(template.sections) <= MAX_SECTIONS:
            raise ReuseFailed("nothing_to_reuse")
        if monitor.ends:
            raise ReuseFailed("not_written")
        bases = self._acquire_bases(template)
        existing = self.observations.find(self.pinned.scope, template)
        found = find_candidates(template, existing)
        if found is None:
            self._prefill_and_store(template, bases, "no_observations")
            return None
        with self._pinned_while_choosing(existing):
            await self.pinned.write(engine, monitor)
            selection = await cancel_on_end(monitor, self._select(template, bases, found))
            if monitor.ends:
                raise ReuseFailed("not_written")
            if selection is not None:
                return self._build_prediction(template, bases, found, selection)
        self._prefill_and_store(template, bases, "entropy_too_high")
        return None

    async def on_completed(self, request: SampleRequest, done: Completion) -> None:
        await self.pinned.on_completed(self._entry_by_request.pop(request.id), request, done)

    def is_approximate(self, num_cached: int) -> bool:
        return num_cached > self._exact_tokens

    def is_loaded(self, num_cached: int) -> bool:
        return num_cached >= min(self._exact_tokens + 1, self._end)

    def forget(self) -> None:
        self.observations.forget(self._source_observations)
        self.pinned.forget()

    def release(self, *, settled: bool) -> None:
        if self._observation_to_write is not None:
            self.observations.end(self._observation_to_write)
            self._observation_to_write = None
        self.pinned.release(settled=settled)

    def _acquire_bases(self, template: PromptTemplate) -> dict[int, SpanEntry]:
        """Pin the entries of keyed sections, each prefilled alone; returns them by index."""
        keyed = {span.cache_key: span for span in self.spans if span.cache_key is not None}
        sections = enumerate(template.sections)
        return self.pinned.acquire(
            {i: keyed[s.cache_key] for i, s in sections if s.cache_key is not None}
        )

    @contextmanager
    def _pinned_while_choosing(self, observations: Sequence[Observation]) -> Iterator[None]:
        """Context manager that keeps observations pinned while some are selected.

        The selected ones are pinned afterwards. The selection awaits, and unpinned observations
        could be dropped meanwhile.
        """
        held = [entry for observed in observations for entry in observed.entries()]
        store = self.pinned.index.store
        for entry in held:
            store.pin(entry)
        try:
            yield
        finally:
            for entry in held:
                store.unpin(entry)

    async def _select(
        self,
        template: PromptTemplate,
        bases: Mapping[int, SpanEntry],
        found: Sequence[SectionCandidates],
    ) -> PredictionSources | None:
        pairs = {
            (index, observed): (bases[index].slot, observed.bases[index].slot)
            for index, observed in pairs_to_compare(template, found)
        }
        known = await self.distances.get_distances(pairs.values())
        distances = {key: known[pair] for key, pair in pairs.items()}
        return select_observations(template, found, distances, self.max_entropy)

    def _prefill_and_store(
        self, template: PromptTemplate, bases: Mapping[int, SpanEntry], reason: KvReuseReason
    ) -> None:
        """Let the samples prefill the prompt; the first one stores an observation if needed."""
        self.reason = reason
        for request, entry in self.pinned.write_requests():
            self.prefills = [*self.prefills, request]
            self._entry_by_request[request.id] = entry
        if not self.observations.is_missing(self.pinned.scope, template, bases):
            return
        self._observation_to_write = self.observations.begin(self.pinned.scope, template, bases)
        if self._observation_to_write is None:
            self.reason = "cache_full"
        else:
            self.export = self._observation_to_write.real.slot

    def _build_prediction(
        self,
        template: PromptTemplate,
        bases: Mapping[int, SpanEntry],
        found: Sequence[SectionCandidates],
        selection: PredictionSources,
    ) -> KvLoad:
        self._source_observations = list(selection.sources)
        self.observations.used(list(selection.used))
        self.num_observations = len(self._source_observations)
        for entry in {
            entry for observed in self._source_observations for entry in observed.entries()
        }:
            self.pinned.pin(entry)
        pieces = load_pieces(template, bases, found, selection)
        self._exact_tokens = selection.exact_tokens
        self._end = pieces[-1].start + pieces[-1].num_tokens
        return KvLoad(
            chain=uuid.uuid4().hex,
            num_requests=self.num_samples,
            exact_tokens=selection.exact_tokens,
            pieces=pieces,
        )
