"""Prompts that were computed, kept so that others of their context can be predicted from them.

An anchor is a prompt's real keys and values, as a computed prompt has written them, and those of
its named segments alone. It is of one key, one salt, one activation and one shape, and dies with
its activation. Of a context so many are kept; of the oldest the least used makes room, and where
the store has none left, one that nobody uses.

Lives on one event loop.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from engine.errors import EngineError
from service.kv_reuse.cache_entry import Kept, Key
from service.kv_reuse.prefix_order import Scope
from service.kv_reuse.store import SegmentStore
from service.kv_reuse.template import Shape

MOST_ANCHORS = 20
OLDEST = 5

Fate = Literal["made", "evicted", "outdated", "failed"]


class Context(NamedTuple):
    scope: Scope
    epoch: int
    shape: bytes


@dataclass(slots=True, kw_only=True, eq=False)
class Anchor:
    """Changed by its owner only. `bases` are by stretch; all are pinned."""

    context: Context
    shape: Shape
    real: Kept
    bases: Mapping[int, Kept]
    num_uses: int = 0

    def kept(self) -> list[Kept]:
        return [self.real, *self.bases.values()]


class Anchors:
    """Owns a pin on all that an anchor is made of. `fates` counts."""

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        self._contexts: OrderedDict[Context, list[Anchor]] = OrderedDict()
        self._ending: set[asyncio.Task[None]] = set()
        self.fates: Counter[Fate] = Counter()
        store.spare = self._spare
        store.outdate = self._drop_outdated

    @property
    def num_anchors(self) -> int:
        self._drop_outdated()
        return sum(map(len, self._contexts.values()))

    def of(self, scope: Scope, shape: Shape) -> list[Anchor]:
        """Those of its context that are written, the oldest first."""
        self._drop_outdated()
        context = self._context(scope, shape)
        for anchor in list(self._contexts.get(context, ())):
            if any(kept.ended.is_set() and not kept.written for kept in anchor.kept()):
                self._drop(anchor, "failed")
        if context in self._contexts:
            self._contexts.move_to_end(context)
        there = self._contexts.get(context, ())
        return [a for a in there if all(map(self._store.is_committed, a.kept()))]

    def begin(self, scope: Scope, shape: Shape, bases: Mapping[int, Kept]) -> Anchor | None:
        """To be written by whoever computes this prompt, and ended then. None if there is no room.
        It is found as soon as it is written."""
        context = self._context(scope, shape)
        key = Key(scope, context.epoch, "", shape.context)  # no segment's: names are not empty
        real = self._store.room(shape.num_tokens, key)
        if real is None:
            return None
        if len(self._contexts.get(context, ())) >= MOST_ANCHORS:
            self._drop(least_used(self._contexts[context]), "evicted")
        anchor = Anchor(context=context, shape=shape, real=real, bases=dict(bases))
        for kept in anchor.kept():  # the room is pinned for its writer
            kept.pins += 1
        self._contexts.setdefault(context, []).append(anchor)
        return anchor

    def lacks(self, scope: Scope, shape: Shape, bases: Mapping[int, Kept]) -> bool:
        """None of the same texts is written or about to be, and weights have not changed since its
        segments were found."""
        there = self._contexts.get(self._context(scope, shape), ())
        is_there = any(a.shape.stretches == shape.stretches for a in there)
        return not is_there and all(k.key.epoch == self._store.epoch for k in bases.values())

    def used(self, anchors: Sequence[Anchor]) -> None:
        for anchor in anchors:
            anchor.num_uses += 1

    def end(self, anchor: Anchor) -> None:
        """Its writer has left the engine."""
        if self._store.is_committed(anchor.real):
            self._ended(anchor, is_written=True)
            return
        task = asyncio.create_task(self._settle(anchor))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def forget(self, anchors: Sequence[Anchor]) -> None:
        """The engine knows them no more."""
        for anchor in anchors:
            self._drop(anchor, "outdated")

    def check(self) -> None:
        """What is kept is pinned."""
        for anchors in self._contexts.values():
            assert 0 < len(anchors) <= MOST_ANCHORS
            assert all(kept.pins > 0 for anchor in anchors for kept in anchor.kept())

    async def close(self) -> None:
        for task in self._ending:
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _settle(self, anchor: Anchor) -> None:
        try:
            is_written = await self._store.conclude(anchor.real)
        except EngineError:
            return  # nobody will ever need the bytes
        self._ended(anchor, is_written=is_written)

    def _ended(self, anchor: Anchor, *, is_written: bool) -> None:
        anchor.real.written = is_written
        anchor.real.ended.set()
        if is_written:
            self.fates["made"] += 1
        else:
            self._drop(anchor, "failed")
        self._store.unpin(anchor.real, settled=True)

    def _spare(self) -> bool:
        """One less, of the context that was asked for longest ago."""
        if self._drop_outdated():
            return True
        for anchors in self._contexts.values():
            idle = [a for a in anchors if a.real.ended.is_set() and a.real.pins == 1]
            if idle:
                self._drop(least_used(idle), "evicted")
                return True
        return False

    def _drop_outdated(self) -> bool:
        epoch = self._store.epoch
        outdated = [
            anchor
            for context, anchors in self._contexts.items()
            if context.epoch != epoch
            for anchor in anchors
        ]
        for anchor in outdated:
            self._drop(anchor, "outdated")
        return bool(outdated)

    def _drop(self, anchor: Anchor, fate: Fate) -> None:
        """Found no more; its bytes are free once nobody uses them."""
        there = self._contexts.get(anchor.context, [])
        if anchor not in there:
            return
        there.remove(anchor)
        if not there:
            del self._contexts[anchor.context]
        self.fates[fate] += 1
        for kept in anchor.kept():
            self._store.unpin(kept, settled=True)

    def _context(self, scope: Scope, shape: Shape) -> Context:
        return Context(scope, self._store.epoch, shape.context)


def least_used(anchors: Sequence[Anchor]) -> Anchor:
    """Of the oldest few, the oldest of those."""
    return min(anchors[:OLDEST], key=lambda anchor: anchor.num_uses)
