"""Chains of requests over a stepped engine, as the service submits them."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.kv_types import ExportSlot, KvLoad
from service.kv_reuse.spans import PromptSpan, joined
from service.kv_reuse.splicing import TokenRun, build_load, prefill_lengths, token_runs
from tests.arena import TestArena
from tests.engine.kv_transfer.export_models import COMMITTED
from tests.engine.stepped_engine import Answer, LiveEngine

BLOCK = 32
NAMES = (f"place-{i}" for i in itertools.count())


def spans(parts: Sequence[PromptSpan], *, first_tokens: int) -> list[TokenRun]:
    return token_runs(parts, first_tokens=first_tokens, block=BLOCK)


@dataclass
class Chains:
    engine: LiveEngine
    arena: TestArena
    segments: dict[tuple[int, ...], ExportSlot] = field(default_factory=dict)

    def slot(self, num_tokens: int) -> ExportSlot:
        return replace(self.arena.slot(num_tokens), name=next(NAMES))

    def keep(self, *segments: Sequence[int]) -> None:
        """Exports each span, prefilled alone from position 0 on."""
        for tokens in segments:
            slot = self.segments[tuple(tokens)] = self.slot(len(tokens))
            self.engine.finish(self.engine.submit(tokens, export=slot, max_tokens=1))
            assert self.arena.words(slot) == COMMITTED

    def load(
        self, parts: Sequence[PromptSpan], *, chain: str, first_tokens: int, n: int = 1
    ) -> KvLoad | None:
        """None if the whole prompt is prefilled."""
        cut = spans(parts, first_tokens=first_tokens)
        kept = {i: self.segments[tuple(p.token_ids)] for i, p in enumerate(parts) if p.name}
        if not prefill_lengths(cut):
            return None
        return build_load(cut, kept, chain=chain, num_requests=len(prefill_lengths(cut)) + n)

    def submit(
        self,
        parts: Sequence[PromptSpan],
        load: KvLoad | None,
        *,
        first_tokens: int,
        n: int = 1,
        **sampling: Any,
    ) -> list[str]:
        """Submits the links, and then the samples of the load; returns the names of the samples."""
        prompt = joined(parts)
        for end in prefill_lengths(spans(parts, first_tokens=first_tokens)):
            self.engine.submit(prompt[:end], load=load, max_tokens=1)
        asked: dict[str, Any] = {"max_tokens": 20} | sampling
        return [self.engine.submit(prompt, load=load, **asked) for _ in range(n)]

    def sample(
        self, parts: Sequence[PromptSpan], *, first_tokens: int, chain: str = "chain", n: int = 1
    ) -> list[Answer]:
        load = self.load(parts, chain=chain, first_tokens=first_tokens, n=n)
        return self.engine.finish(*self.submit(parts, load, first_tokens=first_tokens, n=n))
