"""Chains of requests over a stepped engine, as the service submits them."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coppice.wire.rollouts import PromptSpan
from engine.types.kv import ExportSlot, KvLoad
from service.kv.spans.prompt_template import joined
from service.kv.spans.spliced_prompt import TokenRun, build_load, prefill_lengths, token_runs
from tests.arena import TestArena
from tests.engine.kv_transfer.export_models import COMMITTED
from tests.engine.stepped_engine import Answer, LiveEngine

BLOCK = 32
NAMES = (f"slot-{i}" for i in itertools.count())


def spans(parts: Sequence[PromptSpan], *, recompute_tokens: int) -> list[TokenRun]:
    return token_runs(parts, recompute_tokens=recompute_tokens, block=BLOCK)


@dataclass
class Chains:
    """Chains of one engine and the exports that they load."""

    engine: LiveEngine
    arena: TestArena
    exports: dict[tuple[int, ...], ExportSlot] = field(default_factory=dict)

    def slot(self, num_tokens: int) -> ExportSlot:
        return replace(self.arena.slot(num_tokens), name=next(NAMES))

    def export(self, *exports: Sequence[int]) -> None:
        """Exports each span, prefilled alone from position 0 on."""
        for tokens in exports:
            slot = self.exports[tuple(tokens)] = self.slot(len(tokens))
            self.engine.finish(self.engine.submit(tokens, export=slot, max_tokens=1))
            assert self.arena.words(slot) == COMMITTED

    def load(
        self, parts: Sequence[PromptSpan], *, chain: str, recompute_tokens: int, n: int = 1
    ) -> KvLoad | None:
        """None if the whole prompt is prefilled."""
        runs = spans(parts, recompute_tokens=recompute_tokens)
        slots = {i: self.exports[tuple(p.token_ids)] for i, p in enumerate(parts) if p.cache_key}
        if not prefill_lengths(runs):
            return None
        return build_load(runs, slots, chain=chain, num_requests=len(prefill_lengths(runs)) + n)

    def submit(
        self,
        parts: Sequence[PromptSpan],
        load: KvLoad | None,
        *,
        recompute_tokens: int,
        n: int = 1,
        **sampling: Any,
    ) -> list[str]:
        """Submits the links, and then the samples of the load; returns the names of the samples."""
        prompt = joined(parts)
        for end in prefill_lengths(spans(parts, recompute_tokens=recompute_tokens)):
            self.engine.submit(prompt[:end], load=load, max_tokens=1)
        options: dict[str, Any] = {"max_tokens": 20} | sampling
        return [self.engine.submit(prompt, load=load, **options) for _ in range(n)]

    def sample(
        self,
        parts: Sequence[PromptSpan],
        *,
        recompute_tokens: int,
        chain: str = "chain",
        n: int = 1,
    ) -> list[Answer]:
        load = self.load(parts, chain=chain, recompute_tokens=recompute_tokens, n=n)
        return self.engine.finish(*self.submit(parts, load, recompute_tokens=recompute_tokens, n=n))
