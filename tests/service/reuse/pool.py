"""A store without an engine, and anchors in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from engine.kv_types import ExportWord
from service.kv_reuse.anchors import Anchor, Anchors
from service.kv_reuse.cache_entry import Kept
from service.kv_reuse.layout import Part
from service.kv_reuse.prefix_order import Scope
from service.kv_reuse.store import SegmentStore
from service.kv_reuse.template import Shape, shape_of
from tests.fake_engine import FakeEngine

SCOPE = Scope("key", None)


def prompt_of(*texts: int, own: int = 1, length: int = 60) -> list[Part]:
    """Each text is a token over and over, behind 40 tokens of an own one."""
    named = [Part(token_ids=[text] * length, name=f"text-{i}") for i, text in enumerate(texts)]
    return [Part(token_ids=[own] * 40), *named, Part(token_ids=[2] * 4)]


@dataclass
class Pool:
    store: SegmentStore
    anchors: Anchors
    epoch: int = 0

    def bases(self, parts: list[Part], scope: Scope = SCOPE) -> dict[int, Kept]:
        named = {i: part for i, part in enumerate(parts) if part.name is not None}
        found = {}
        for index, part in named.items():
            got = self.store.segment(scope, part)
            assert got is not None, "no room for a segment"
            found[index], ours = got
            if ours:
                self.commit(found[index])
        return found

    def begun(self, parts: list[Part], scope: Scope = SCOPE) -> Anchor | None:
        bases = self.bases(parts, scope)
        anchor = self.anchors.begin(scope, shape_of(parts), bases)
        for kept in bases.values():
            self.store.unpin(kept, settled=True)
        return anchor

    def made(self, parts: list[Part], scope: Scope = SCOPE) -> Anchor:
        anchor = self.begun(parts, scope)
        assert anchor is not None, "no room"
        self.commit(anchor.real)
        self.anchors.end(anchor)
        return anchor

    def of(self, parts: list[Part], scope: Scope = SCOPE) -> list[Anchor]:
        return self.anchors.of(scope, shape_of(parts))

    def commit(self, kept: Kept) -> None:
        at = kept.slot.words_offset
        self.store.view[at : at + 8] = ExportWord.COMMITTED.to_bytes(8, "little")
        kept.written = True
        kept.ended.set()

    def check(self) -> None:
        """All that is taken is a segment's or an anchor's, and everybody else has let go."""
        self.store.check()
        self.anchors.check()
        anchors = [anchor for there in self.anchors._contexts.values() for anchor in there]
        pinned = [kept for anchor in anchors for kept in anchor.kept()]
        held = {*self.store._segments.values(), *pinned}
        assert self.store.num_bytes == sum(kept.extent.num_bytes for kept in held)
        assert all(kept.pins == pinned.count(kept) for kept in held)


@contextmanager
def a_pool(directory: Path, num_bytes: int = 2**24) -> Iterator[Pool]:
    pool: Any = None
    engine = FakeEngine(prompt_kv=True)
    store = SegmentStore(
        engine,
        directory=directory,
        capacity_bytes=num_bytes,
        epoch=lambda: 0 if pool is None else cast(Pool, pool).epoch,
    )
    store.open()
    pool = Pool(store, Anchors(store))
    yield pool
    assert store._arena is not None
    store._arena.close()


def shape(*texts: int, **how: int) -> Shape:
    return shape_of(prompt_of(*texts, **how))
