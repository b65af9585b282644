"""One group's chain: segments computed alone where they are not kept, then, together with the
group's samples, a request of one token for every place where tokens are computed.

The links differ in where they end only: the engine lets each find what those before it left, and
loads what is placed in between. What lies in front of the first placed token is exact, and found
and left as any prompt's. Whatever keeps the segments from being there ends the chain, with a
reason, and the prompt is computed whole.
"""

import asyncio
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from coppice.wire.reuse import ReuseReason
from engine.protocol import Completion, Engine, ExportSlot, Load, SampleRequest, Sampling
from service.reuse.chain_links import ends_of, load_of
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

    async def until_end(self) -> None:
        """Returns once nothing is wanted any more."""

    def entered(self, request_id: str) -> None: ...

    def left(self, request_id: str) -> None: ...


@dataclass(slots=True, kw_only=True, eq=False)
class Chain:
    """`links` enter the engine in front of `num_samples` samples. `release` gives the segments
    back, however far it came. Counts are of tokens."""

    store: SegmentStore
    scope: Scope
    parts: Sequence[Part]
    first_tokens: int
    priority: int
    num_samples: int
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    links: list[SampleRequest] = field(default_factory=list)
    num_computed: int = 0
    num_prepared: int = 0
    round_trips: int = 0
    _any_placed: bool = False
    _reached: int = 0
    _pinned: list[Kept] = field(default_factory=list)
    _unwritten: set[int] = field(default_factory=set)

    async def prepare(self, engine: Engine, watch: Watch) -> Load:
        """What its links and the samples are to load. Broken says why there is nothing. Cancelling
        it leaves requests in the engine, which the watch knows."""
        if self.store.reason is not None:
            raise Broken(self.store.reason)
        spans = spans_of(self.parts, first_tokens=self.first_tokens, block=engine.facts.block_size)
        ends = ends_of(spans)
        if not ends:
            raise Broken("nothing_placed")
        if watch.ends:
            raise Broken("not_written")
        segments, new = self._segments({span.part for span in spans if span.part is not None})
        await self._write(engine, watch, new)
        await self._others(segments, watch)
        sources = {part: kept.slot for part, kept in segments.items()}
        num_requests = len(ends) + self.num_samples
        load = load_of(spans, sources, chain=self.name, num_requests=num_requests)
        prompt = joined(self.parts)
        self.links = [self._request(prompt[:end], load=load) for end in ends]
        return load

    def heard(self, link: SampleRequest, done: Completion) -> None:
        """In their order."""
        if done.finish not in ("stop", "length"):
            return
        self.num_computed += len(link.prompt_token_ids) - done.num_cached_tokens
        if link is not self.links[0] and done.num_cached_tokens > self._reached:
            self._any_placed = True  # more than those before it left: it has loaded
        self._reached = len(link.prompt_token_ids)

    def is_placed(self, num_cached: int) -> bool:
        """In front of a sample that had so many tokens cached. What links left may have been
        evicted before it came: then it has loaded for itself, or computed."""
        behind_first = num_cached > len(self.links[0].prompt_token_ids)
        return behind_first and (self._any_placed or num_cached > self._reached)

    def forget(self) -> None:
        """The engine knows no more that they were written: they are to be written anew."""
        for kept in self._pinned:
            self.store.forget(kept)

    def release(self, *, settled: bool) -> None:
        """`settled`: every request that was to load has ended by itself."""
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

    async def _write(self, engine: Engine, watch: Watch, new: Sequence[tuple[Part, Kept]]) -> None:
        """Each alone, from position 0 on."""
        if not new:
            return
        requests = [self._request(list(part.token_ids), export=kept.slot) for part, kept in new]
        self.round_trips += 1
        for request, done in await self._ask(engine, watch, requests):
            self.num_prepared += len(request.prompt_token_ids) - done.num_cached_tokens
        for _, kept in new:
            await self._conclude(kept)

    async def _others(self, segments: Mapping[int, Kept], watch: Watch) -> None:
        """What other groups are about to write, however long they take while this one is wanted."""
        for kept in segments.values():
            await _first_of(kept.ended.wait(), watch.until_end())
            if not kept.written:
                raise Broken("not_written")

    async def _conclude(self, kept: Kept) -> None:
        written = await self.store.conclude(kept)
        self._unwritten.discard(id(kept))
        if not written:
            raise Broken("not_written")

    def _request(
        self, prompt: list[int], *, export: ExportSlot | None = None, load: Load | None = None
    ) -> SampleRequest:
        return SampleRequest(
            id=uuid.uuid4().hex,
            prompt_token_ids=prompt,
            sampling=ONE_TOKEN,
            priority=self.priority,
            cache_salt=self.scope.salt,
            export=export,
            speculation=False,
            load=load,
        )

    async def _ask(
        self, engine: Engine, watch: Watch, requests: Sequence[SampleRequest]
    ) -> list[tuple[SampleRequest, Completion]]:
        for request in requests:
            watch.entered(request.id)
        pending = await engine.submit(requests)
        if watch.ends:
            await engine.abort([request.id for request in requests])
        done = []
        for request, completion in zip(requests, pending, strict=True):
            done.append((request, await completion))
            watch.left(request.id)
        if any(completion.finish in ("abort", "error") for _, completion in done):
            raise Broken("not_written")
        return done


async def _first_of(*waits: Coroutine[Any, Any, object]) -> None:
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
