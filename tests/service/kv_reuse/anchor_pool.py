"""A KV pool without an engine, and anchors in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from coppice.wire.rollouts import PromptSpan
from engine.types.kv import ExportStatus
from service.kv.spans.cache import CacheEntry, SpanCache
from service.kv.spans.observed_prompts import Anchor, AnchorStore
from service.kv.spans.prompt_template import PromptTemplate, Scope, template_of
from tests.fake_engine import FakeEngine

SCOPE = Scope("key", None)


def prompt_of(*texts: int, own: int = 1, length: int = 60) -> list[PromptSpan]:
    """Spans that repeat one token each, after 40 tokens of unnamed text."""
    named = [
        PromptSpan(token_ids=[text] * length, cache_key=f"text-{i}") for i, text in enumerate(texts)
    ]
    return [PromptSpan(token_ids=[own] * 40), *named, PromptSpan(token_ids=[2] * 4)]


@dataclass
class Pool:
    store: SpanCache
    anchors: AnchorStore
    epoch: int = 0

    def bases(self, parts: list[PromptSpan], scope: Scope = SCOPE) -> dict[int, CacheEntry]:
        named = {i: part for i, part in enumerate(parts) if part.cache_key is not None}
        found = {}
        for index, part in named.items():
            got = self.store.get_or_reserve(scope, part)
            assert got is not None, "no room for a segment"
            found[index], ours = got
            if ours:
                self.commit(found[index])
        return found

    def begun(self, parts: list[PromptSpan], scope: Scope = SCOPE) -> Anchor | None:
        bases = self.bases(parts, scope)
        anchor = self.anchors.begin(scope, template_of(parts), bases)
        for cached in bases.values():
            self.store.unpin(cached, settled=True)
        return anchor

    def made(self, parts: list[PromptSpan], scope: Scope = SCOPE) -> Anchor:
        anchor = self.begun(parts, scope)
        assert anchor is not None, "no room"
        self.commit(anchor.real)
        self.anchors.end(anchor)
        return anchor

    def find(self, parts: list[PromptSpan], scope: Scope = SCOPE) -> list[Anchor]:
        return self.anchors.find(scope, template_of(parts))

    def commit(self, cached: CacheEntry) -> None:
        at = cached.slot.status_offset
        self.store.view[at : at + 8] = ExportStatus.COMMITTED.to_bytes(8, "little")
        cached.is_written = True
        cached.ended.set()

    def check(self) -> None:
        """Asserts that only spans and anchors hold slots, and that no lease is held."""
        self.store.check()
        self.anchors.check()
        anchors = [anchor for there in self.anchors._contexts.values() for anchor in there]
        pinned = [cached for anchor in anchors for cached in anchor.cached()]
        held = {*self.store._entries.values(), *pinned}
        assert self.store.num_bytes == sum(cached.extent.num_bytes for cached in held)
        assert all(cached.pins == pinned.count(cached) for cached in held)


@contextmanager
def a_pool(directory: Path, num_bytes: int = 2**24) -> Iterator[Pool]:
    pool: Any = None
    engine = FakeEngine(prompt_kv=True)
    store = SpanCache(
        engine,
        directory=directory,
        capacity_bytes=num_bytes,
        epoch=lambda: 0 if pool is None else cast(Pool, pool).epoch,
    )
    store.open()
    pool = Pool(store, AnchorStore(store))
    yield pool
    assert store._arena is not None
    store._arena.close()


def template(*texts: int, **how: int) -> PromptTemplate:
    return template_of(prompt_of(*texts, **how))
