"""A KV pool without an engine, and observations in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from coppice.wire.rollouts import PromptSpan
from engine.types.kv import ExportStatus
from service.kv.spans.index import SpanEntry, SpanIndex
from service.kv.spans.observations import Observation, Observations
from service.kv.spans.prompt_template import PromptTemplate, Scope, template_of
from service.kv.store import KvStore
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
    index: SpanIndex
    observations: Observations
    epoch: int = 0

    @property
    def store(self) -> KvStore:
        return self.index.store

    def bases(self, parts: list[PromptSpan], scope: Scope = SCOPE) -> dict[int, SpanEntry]:
        named = {i: part for i, part in enumerate(parts) if part.cache_key is not None}
        found = {}
        for index, part in named.items():
            got = self.index.get_or_reserve(scope, part)
            assert got is not None, "no room for a segment"
            found[index], ours = got
            if ours:
                self.commit(found[index])
        return found

    def begun(self, parts: list[PromptSpan], scope: Scope = SCOPE) -> Observation | None:
        bases = self.bases(parts, scope)
        observed = self.observations.begin(scope, template_of(parts), bases)
        for entry in bases.values():
            self.store.unpin(entry)
        return observed

    def made(self, parts: list[PromptSpan], scope: Scope = SCOPE) -> Observation:
        observed = self.begun(parts, scope)
        assert observed is not None, "no room"
        self.commit(observed.real)
        self.observations.end(observed)
        return observed

    def find(self, parts: list[PromptSpan], scope: Scope = SCOPE) -> list[Observation]:
        return self.observations.find(scope, template_of(parts))

    def commit(self, entry: SpanEntry) -> None:
        at = entry.slot.status_offset
        self.store.arena.view[at : at + 8] = ExportStatus.COMMITTED.to_bytes(8, "little")
        self.store.end_write(entry, is_committed=True)

    def check(self) -> None:
        """Asserts that only spans and observations hold entries, and that no group pins any."""
        self.index.check()
        self.observations.check()
        observations = [
            observed for there in self.observations._contexts.values() for observed in there
        ]
        pinned = [entry for observed in observations for entry in observed.entries()]
        held = {*self.index._entries.values(), *pinned}
        assert self.index.num_bytes == sum(entry.extent.num_bytes for entry in held)
        assert all(entry.pins == pinned.count(entry) for entry in held)


@contextmanager
def a_pool(directory: Path, num_bytes: int = 2**24) -> Iterator[Pool]:
    pool: Any = None
    engine = FakeEngine(prompt_kv=True)
    index = SpanIndex(
        engine,
        directory=directory,
        capacity_bytes=num_bytes,
        epoch=lambda: 0 if pool is None else cast(Pool, pool).epoch,
    )
    index.open()
    pool = Pool(index, Observations(index))
    yield pool
    index.store.arena.close()


def template(*texts: int, **how: int) -> PromptTemplate:
    return template_of(prompt_of(*texts, **how))
