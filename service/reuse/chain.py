"""One group's chain, up to its last link: segments computed alone where they are not kept, then a
request of one token for every place where tokens are computed.

The first link loads nothing, so it is an ordinary request that finds and leaves exact prefixes; it
runs beside the segments' own. The others have a salt that nobody else has: what they compute after
approximate tokens is found by their chain alone. Whatever does not go as planned ends the chain,
with a reason, and the prompt is computed whole.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from coppice.wire.reuse import ReuseReason
from engine.protocol import Completion, Engine, ExportSlot, Load, SampleRequest, Sampling
from service.reuse.chain_links import Link, links_of
from service.reuse.kept import Kept
from service.reuse.orders import Scope
from service.reuse.spans import Part, joined, spans_of
from service.reuse.store import SegmentStore

ONE_TOKEN = Sampling(max_tokens=1, temperature=0.0)


class Broken(Exception):
    """The prompt has to be computed whole."""

    def __init__(self, reason: ReuseReason) -> None:
        super().__init__(reason)
        self.reason = reason


class Watch(Protocol):
    """The group: told of requests that enter the engine, and of those that left it."""

    @property
    def ends(self) -> bool:
        """Nothing is wanted any more; what enters the engine now is to be aborted."""

    def entered(self, request_id: str) -> None: ...

    def left(self, request_id: str) -> None: ...


@dataclass(slots=True, kw_only=True, eq=False)
class Chain:
    """`release` gives its slots back, however far it came. Counts are of tokens."""

    store: SegmentStore
    scope: Scope
    parts: Sequence[Part]
    first_tokens: int
    priority: int
    salt: str = field(default_factory=lambda: uuid.uuid4().hex)
    num_computed: int = 0
    num_prepared: int = 0
    round_trips: int = 0
    _pinned: list[Kept] = field(default_factory=list)
    _unwritten: set[int] = field(default_factory=set)

    async def run(self, engine: Engine, watch: Watch) -> Load:
        """What the samples are to load. Broken says why there is nothing. Cancelling it leaves
        requests in the engine, which the watch knows."""
        if self.store.reason is not None:
            raise Broken(self.store.reason)
        least = engine.facts.block_size
        spans = spans_of(self.parts, first_tokens=self.first_tokens, least=least)
        *earlier, last = links_of(spans)
        if not earlier:
            raise Broken("nothing_placed")
        if watch.ends:
            raise Broken("not_written")
        segments, new = self._segments({span.part for span in spans if span.part is not None})
        rooms = [self._room(link) for link in earlier]
        await self._begin(engine, watch, earlier[0], rooms[0], new)
        await self._others(segments)
        sources = {part: kept.slot for part, kept in segments.items()}
        computed: dict[int, ExportSlot] = {0: rooms[0].slot}
        for link, room in zip(earlier[1:], rooms[1:], strict=True):
            await self._follow(engine, watch, link, room, link.load(sources, computed))
            computed[link.computed.start] = room.slot
        load = last.load(sources, computed)
        assert load is not None, "what is placed lies in front of the last link"
        return load

    def release(self, *, settled: bool) -> None:
        """`settled`: every sample that was to load has ended by itself."""
        for kept in self._pinned:
            if id(kept) in self._unwritten:
                self.store.abandon(kept)
            else:
                self.store.unpin(kept, settled=settled)
        self._pinned.clear()
        self._unwritten.clear()

    def _segments(self, indices: set[int]) -> tuple[dict[int, Kept], list[tuple[Part, Kept]]]:
        """By part; and those that are to be written here."""
        found: dict[int, Kept] = {}
        new = []
        for index in sorted(indices):
            got = self.store.segment(self.scope, self.parts[index])
            if got is None:
                raise Broken("store_full")
            found[index], ours = got
            self._pinned.append(found[index])
            if ours:
                self._unwritten.add(id(found[index]))
                new.append((self.parts[index], found[index]))
        return found, new

    def _room(self, link: Link) -> Kept:
        room = self.store.room(link.computed.num_tokens, first=link.computed.start)
        if room is None:
            raise Broken("store_full")
        self._pinned.append(room)
        self._unwritten.add(id(room))
        return room

    async def _begin(
        self,
        engine: Engine,
        watch: Watch,
        link: Link,
        room: Kept,
        new: Sequence[tuple[Part, Kept]],
    ) -> None:
        prompts = [(joined(self.parts)[: link.computed.end], room)]
        prompts += [(list(part.token_ids), kept) for part, kept in new]
        requests = [
            self._request(prompt, kept, salt=self.scope.salt, load=None) for prompt, kept in prompts
        ]
        first, *alone = await self._ask(engine, watch, requests)
        self.num_computed += link.computed.num_tokens - first.num_cached_tokens
        self.num_prepared += sum(
            len(part.token_ids) - done.num_cached_tokens
            for (part, _), done in zip(new, alone, strict=True)
        )
        for _, kept in prompts:
            await self._conclude(kept)

    async def _others(self, segments: Mapping[int, Kept]) -> None:
        """What other groups are about to write."""
        for kept in segments.values():
            await kept.ended.wait()
            if not kept.written:
                raise Broken("not_written")

    async def _follow(
        self, engine: Engine, watch: Watch, link: Link, room: Kept, load: Load | None
    ) -> None:
        prompt = joined(self.parts)[: link.computed.end]
        request = self._request(prompt, room, salt=self.salt, load=load)
        [done] = await self._ask(engine, watch, [request])
        self.num_computed += len(prompt) - done.num_cached_tokens
        if done.num_cached_tokens < link.computed.start:
            raise Broken("not_loaded")
        await self._conclude(room)

    async def _conclude(self, kept: Kept) -> None:
        written = await self.store.conclude(kept)
        self._unwritten.discard(id(kept))
        if not written:
            raise Broken("not_written")

    def _request(
        self, prompt: list[int], kept: Kept, *, salt: str | None, load: Load | None
    ) -> SampleRequest:
        return SampleRequest(
            id=uuid.uuid4().hex,
            prompt_token_ids=prompt,
            sampling=ONE_TOKEN,
            priority=self.priority,
            cache_salt=salt,
            export=kept.slot,
            speculation=False,
            load=load,
        )

    async def _ask(
        self, engine: Engine, watch: Watch, requests: Sequence[SampleRequest]
    ) -> list[Completion]:
        self.round_trips += 1
        for request in requests:
            watch.entered(request.id)
        pending = await engine.submit(requests)
        if watch.ends:
            await engine.abort([request.id for request in requests])
        done = []
        for request, completion in zip(requests, pending, strict=True):
            done.append(await completion)
            watch.left(request.id)
        if any(completion.finish in ("abort", "error") for completion in done):
            raise Broken("not_written")
        return done
