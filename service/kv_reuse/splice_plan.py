"""One group's chain: segments computed alone where they are not kept, then, together with the
group's samples, a request of one token for every place where tokens are computed.

The links differ in where they end only: the engine lets each find what those before it left, and
loads what is placed in between. What lies in front of the first placed token is exact, and found
and left as any prompt's. Whatever keeps the segments from being there ends the chain, with a
reason, and the prompt is computed whole.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from coppice.wire.reuse import ReuseReason
from engine.kv_types import ExportSlot, Load
from engine.protocol import Completion, Engine, SampleRequest
from service.kv_reuse.layout import Part, joined, spans_of
from service.kv_reuse.lease import Borrowed
from service.kv_reuse.monitor import Broken, Watch
from service.kv_reuse.splice_load import ends_of, load_of


@dataclass(slots=True, kw_only=True, eq=False)
class Chain:
    """A Preparation for `num_samples` samples."""

    borrowed: Borrowed
    parts: Sequence[Part]
    first_tokens: int
    num_samples: int
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    links: list[SampleRequest] = field(default_factory=list)
    export: ExportSlot | None = None
    reason: ReuseReason | None = None
    num_anchors: int = 0
    num_computed: int = 0
    _any_placed: bool = False
    _reached: int = 0

    async def prepare(self, engine: Engine, watch: Watch) -> Load:
        """What its links and the samples are to load."""
        if self.borrowed.store.reason is not None:
            raise Broken(self.borrowed.store.reason)
        spans = spans_of(self.parts, first_tokens=self.first_tokens, block=engine.facts.block_size)
        ends = ends_of(spans)
        if not ends:
            raise Broken("nothing_placed")
        if watch.ends:
            raise Broken("not_written")
        placed = {span.part for span in spans if span.part is not None}
        segments = self.borrowed.take({index: self.parts[index] for index in placed})
        await self.borrowed.write(engine, watch)
        sources = {part: kept.slot for part, kept in segments.items()}
        num_requests = len(ends) + self.num_samples
        load = load_of(spans, sources, chain=self.name, num_requests=num_requests)
        prompt = joined(self.parts)
        self.links = [self.borrowed.request(prompt[:end], load=load) for end in ends]
        return load

    async def heard(self, link: SampleRequest, done: Completion) -> None:
        if done.finish not in ("stop", "length"):
            return
        self.num_computed += len(link.prompt_token_ids) - done.num_cached_tokens
        if link is not self.links[0] and done.num_cached_tokens > self._reached:
            self._any_placed = True  # more than those before it left: it has loaded
        self._reached = len(link.prompt_token_ids)

    def is_placed(self, num_cached: int) -> bool:
        """What links left may have been evicted before it came: then it has loaded for itself, or
        computed."""
        behind_first = num_cached > len(self.links[0].prompt_token_ids)
        return behind_first and (self._any_placed or num_cached > self._reached)

    def is_loaded(self, num_cached: int) -> bool:
        return self.is_placed(num_cached)

    def forget(self) -> None:
        self.borrowed.forget()

    def release(self, *, settled: bool) -> None:
        self.borrowed.release(settled=settled)
