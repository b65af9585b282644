"""Chains of requests over a stepped engine, as the service submits them."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.protocol import ExportSlot, Load
from service.reuse.chain_links import Link, links_of
from service.reuse.spans import Part, joined, spans_of
from tests.arena import TestArena
from tests.engine.kv.exporting import COMMITTED
from tests.engine.live import Answer, LiveEngine

NAMES = (f"place-{i}" for i in itertools.count())


@dataclass
class Chains:
    engine: LiveEngine
    arena: TestArena
    segments: dict[tuple[int, ...], ExportSlot] = field(default_factory=dict)

    def slot(self, num_tokens: int, first: int = 0) -> ExportSlot:
        return replace(self.arena.slot(num_tokens), first=first, name=next(NAMES))

    def keep(self, *segments: Sequence[int]) -> None:
        """Computed alone, from position 0 on."""
        for tokens in segments:
            slot = self.segments[tuple(tokens)] = self.slot(len(tokens))
            self.engine.finish(self.engine.submit(tokens, export=slot, max_tokens=1))
            assert self.arena.words(slot) == COMMITTED

    def links(self, parts: Sequence[Part], *, first_tokens: int, least: int = 1) -> list[Link]:
        return links_of(spans_of(parts, first_tokens=first_tokens, least=least))

    def load(
        self, parts: Sequence[Part], *, salt: str, first_tokens: int, least: int = 1
    ) -> Load | None:
        """All links but the last; what that is to load."""
        prompt, computed = joined(parts), dict[int, ExportSlot]()
        kept = {i: self.segments[tuple(p.token_ids)] for i, p in enumerate(parts) if p.name}
        *earlier, last = self.links(parts, first_tokens=first_tokens, least=least)
        for link in earlier:
            span, load = link.computed, link.load(kept, computed)
            slot = computed[span.start] = self.slot(span.num_tokens, span.start)
            name = self.engine.submit(
                prompt[: span.end],
                export=slot,
                load=load,
                salt=None if load is None else salt,
                max_tokens=1,
            )
            [answer] = self.engine.finish(name)
            assert self.arena.words(slot) == COMMITTED
            assert load is None or answer.num_cached_tokens == span.start
        return last.load(kept, computed)

    def sample(
        self, parts: Sequence[Part], *, first_tokens: int, salt: str = "chain", n: int = 1
    ) -> list[Answer]:
        load = self.load(parts, salt=salt, first_tokens=first_tokens)
        names = [
            self.engine.submit(joined(parts), load=load, salt=salt, max_tokens=20) for _ in range(n)
        ]
        return self.engine.finish(*names)
