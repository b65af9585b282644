"""One group's prompt, predicted from anchors; or computed, and an anchor from then on.

All its samples are one request each, which loads everything but its last token. A computed prompt
enters the engine as any other, so its keys and values are exact; segments that are not kept yet are
computed alone beside it.
"""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from coppice.wire.reuse import ReuseReason
from engine.kv_types import ExportSlot, Load
from engine.protocol import Completion, Engine, SampleRequest
from service.kv_reuse.anchor_selection import Candidates, Choice, candidates_of, choose, compared
from service.kv_reuse.anchors import Anchor, Anchors
from service.kv_reuse.cache_entry import Kept
from service.kv_reuse.kv_distance import Distances
from service.kv_reuse.layout import Part
from service.kv_reuse.lease import Borrowed
from service.kv_reuse.monitor import Broken, Watch, unless_it_ends
from service.kv_reuse.prediction import pieces_of
from service.kv_reuse.template import Shape, shape_of

MOST_STRETCHES = 128
"""Each is compared with each anchor's, and each with a name is computed alone."""


@dataclass(slots=True, kw_only=True, eq=False)
class Anchored:
    """A Preparation for `num_samples` samples."""

    borrowed: Borrowed
    anchors: Anchors
    distances: Distances
    parts: Sequence[Part]
    threshold: float
    num_samples: int
    links: list[SampleRequest] = field(default_factory=list)
    export: ExportSlot | None = None
    reason: ReuseReason | None = None
    num_computed: int = 0
    num_anchors: int = 0
    _writes: dict[str, Kept] = field(default_factory=dict)
    _makes: Anchor | None = None
    _loads_from: list[Anchor] = field(default_factory=list)
    _exact_tokens: int = 0
    _end: int = 0

    async def prepare(self, engine: Engine, watch: Watch) -> Load | None:
        if self.borrowed.store.reason is not None:
            raise Broken(self.borrowed.store.reason)
        shape = shape_of(self.parts)
        if shape.num_shared == 0 or not 2 <= len(shape.stretches) <= MOST_STRETCHES:
            raise Broken("nothing_placed")
        if watch.ends:
            raise Broken("not_written")
        bases = self._bases(shape)
        there = self.anchors.of(self.borrowed.scope, shape)
        found = candidates_of(shape, there)
        if found is None:
            self._compute(shape, bases, "no_anchor")
            return None
        with self._held(there):
            await self.borrowed.write(engine, watch)
            choice = await unless_it_ends(watch, self._choice(shape, bases, found))
            if watch.ends:
                raise Broken("not_written")
            if choice is not None:
                return self._predict(shape, bases, found, choice)
        self._compute(shape, bases, "not_shareable")
        return None

    async def heard(self, link: SampleRequest, done: Completion) -> None:
        await self.borrowed.heard(self._writes.pop(link.id), link, done)

    def is_placed(self, num_cached: int) -> bool:
        return num_cached > self._exact_tokens

    def is_loaded(self, num_cached: int) -> bool:
        return num_cached >= min(self._exact_tokens + 1, self._end)

    def forget(self) -> None:
        self.anchors.forget(self._loads_from)
        self.borrowed.forget()

    def release(self, *, settled: bool) -> None:
        if self._makes is not None:
            self.anchors.end(self._makes)
            self._makes = None
        self.borrowed.release(settled=settled)

    def _bases(self, shape: Shape) -> dict[int, Kept]:
        """Of every named stretch."""
        named = {part.name: part for part in self.parts if part.name is not None}
        stretches = enumerate(shape.stretches)
        return self.borrowed.take({i: named[s.name] for i, s in stretches if s.name is not None})

    @contextmanager
    def _held(self, anchors: Sequence[Anchor]) -> Iterator[None]:
        """Until those that are chosen are pinned for longer: meanwhile others may drop them."""
        held = [kept for anchor in anchors for kept in anchor.kept()]
        for kept in held:
            kept.pins += 1
        try:
            yield
        finally:
            for kept in held:
                self.borrowed.store.unpin(kept, settled=True)

    async def _choice(
        self, shape: Shape, bases: Mapping[int, Kept], found: Sequence[Candidates]
    ) -> Choice | None:
        pairs = {
            (index, anchor): (bases[index].slot, anchor.bases[index].slot)
            for index, anchor in compared(shape, found)
        }
        known = await self.distances.between(pairs.values())
        distances = {place: known[pair] for place, pair in pairs.items()}
        return choose(shape, found, distances, self.threshold)

    def _compute(self, shape: Shape, bases: Mapping[int, Kept], reason: ReuseReason) -> None:
        """Its first sample writes the anchor, if there is no such one yet."""
        self.reason = reason
        for request, kept in self.borrowed.writers():
            self.links.append(request)
            self._writes[request.id] = kept
        if not self.anchors.lacks(self.borrowed.scope, shape, bases):
            return
        self._makes = self.anchors.begin(self.borrowed.scope, shape, bases)
        if self._makes is None:
            self.reason = "store_full"
        else:
            self.export = self._makes.real.slot

    def _predict(
        self,
        shape: Shape,
        bases: Mapping[int, Kept],
        found: Sequence[Candidates],
        choice: Choice,
    ) -> Load:
        self._loads_from = list(choice.sources)
        self.anchors.used(list(choice.used))
        self.num_anchors = len(self._loads_from)
        for kept in {kept for anchor in self._loads_from for kept in anchor.kept()}:
            self.borrowed.pin(kept)
        pieces = pieces_of(shape, bases, found, choice)
        self._exact_tokens = choice.exact_tokens
        self._end = pieces[-1].start + pieces[-1].num_tokens
        return Load(
            chain=uuid.uuid4().hex,
            num_requests=self.num_samples,
            exact_tokens=choice.exact_tokens,
            pieces=pieces,
        )
