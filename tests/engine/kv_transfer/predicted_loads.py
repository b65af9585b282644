"""Observations over a stepped engine, selected and loaded as the service does."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coppice.wire.rollouts import PromptSpan
from engine.types.kv import ExportSlot, KvLoad
from service.kv.arena import Extent
from service.kv.spans.index import SpanEntry, SpanKey
from service.kv.spans.observations import Observation, PromptContext
from service.kv.spans.predicted_prompt import load_pieces
from service.kv.spans.prediction_sources import (
    distance,
    find_candidates,
    pairs_to_compare,
    select_observations,
)
from service.kv.spans.prompt_template import Scope, joined, template_of
from tests.arena import TestArena
from tests.engine.kv_transfer.export_models import COMMITTED
from tests.engine.stepped_engine import Answer, LiveEngine

SCOPE = Scope("key", None)
NAMES = (f"observation-{i}" for i in itertools.count())


@dataclass
class PredictedLoads:
    """Observations of one engine and loads that are predicted from them."""

    engine: LiveEngine
    arena: TestArena
    observations: list[Observation] = field(default_factory=list)
    alone: dict[tuple[int, ...], SpanEntry] = field(default_factory=dict)

    def add_observations(self, *prompts: Sequence[PromptSpan]) -> None:
        """Prefills the observations one after the other."""
        for parts in prompts:
            template, prompt = template_of(parts), joined(parts)
            context, bases = PromptContext(SCOPE, 0, template.context), self._bases(parts)
            real = self._export(prompt, template.num_tokens)
            self.observations.append(
                Observation(context=context, template=template, real=real, bases=bases)
            )

    def load(
        self,
        parts: Sequence[PromptSpan],
        *,
        chain: str,
        n: int = 1,
        max_entropy: float = 1.0,
        use_exact: bool = True,
    ) -> KvLoad:
        """Without `use_exact`, named texts are predicted even if an observation has them."""
        template, bases = template_of(parts), self._bases(parts)
        candidates = find_candidates(template, self.observations)
        assert candidates is not None, "too few observations"
        if not use_exact:
            candidates[1:] = [
                replace(
                    candidate,
                    exact_match=None,
                    observations=self.observations,
                    compared_section=i - 1 + i % 2,
                )
                for i, candidate in enumerate(candidates[1:], start=1)
            ]
        view = self.arena.bytes.data
        distances = {
            (index, observed): distance(
                view, self.arena.form, bases[index].slot, observed.bases[index].slot
            )
            for index, observed in pairs_to_compare(template, candidates)
        }
        choice = select_observations(template, candidates, distances, max_entropy)
        assert choice is not None, "not shareable"
        pieces = load_pieces(template, bases, candidates, choice)
        return KvLoad(chain=chain, num_requests=n, exact_tokens=choice.exact_tokens, pieces=pieces)

    def submit(
        self,
        parts: Sequence[PromptSpan],
        load: KvLoad,
        *,
        n: int = 1,
        salt: str | None = None,
        **sampling: Any,
    ) -> list[str]:
        options: dict[str, Any] = {"max_tokens": 12} | sampling
        return [
            self.engine.submit(joined(parts), load=load, salt=salt, seed=i, **options)
            for i in range(n)
        ]

    def sample(
        self, parts: Sequence[PromptSpan], *, chain: str, n: int = 1, **sampling: Any
    ) -> list[Answer]:
        load = self.load(parts, chain=chain, n=n)
        return self.engine.finish(*self.submit(parts, load, n=n, **sampling))

    def slot(self, num_tokens: int) -> ExportSlot:
        return replace(self.arena.slot(num_tokens), name=next(NAMES))

    def _bases(self, parts: Sequence[PromptSpan]) -> dict[int, SpanEntry]:
        template, prompt = template_of(parts), joined(parts)
        texts = {part.cache_key: list(part.token_ids) for part in parts}
        entries: dict[int, SpanEntry] = {}
        for index, section in enumerate(template.sections):
            if section.cache_key is None:
                continue
            text = texts[section.cache_key]
            assert prompt[section.start : section.end] == text[: section.num_tokens]
            if tuple(text) not in self.alone:
                self.alone[tuple(text)] = self._export(text, len(text))
            entries[index] = self.alone[tuple(text)]
        return entries

    def _export(self, prompt: Sequence[int], num_tokens: int) -> SpanEntry:
        slot = self.slot(num_tokens)
        self.engine.finish(self.engine.submit(prompt, export=slot, max_tokens=1))
        assert self.arena.words(slot) == COMMITTED
        return SpanEntry(
            slot=slot, extent=Extent(0, 0), key=SpanKey(SCOPE, 0, "", b""), is_committed=True
        )
