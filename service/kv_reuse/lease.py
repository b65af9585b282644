"""The segments of one group: found where they are kept, and else computed alone, from position 0
on. They stay where they are until they are given back."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.kv_types import ExportSlot, Load
from engine.protocol import Completion, Engine, SampleRequest, Sampling
from service.kv_reuse.cache_entry import Kept
from service.kv_reuse.layout import Part
from service.kv_reuse.monitor import Broken, Watch, unless_it_ends
from service.kv_reuse.prefix_order import Scope
from service.kv_reuse.store import SegmentStore

ONE_TOKEN = Sampling(max_tokens=1, temperature=0.0)


@dataclass(slots=True, kw_only=True, eq=False)
class Borrowed:
    """Counts are of what was computed alone for it."""

    store: SegmentStore
    scope: Scope
    priority: int
    num_prepared: int = 0
    round_trips: int = 0
    _segments: dict[int, Kept] = field(default_factory=dict)
    _pinned: list[Kept] = field(default_factory=list)
    _unwritten: dict[int, tuple[Part, Kept]] = field(default_factory=dict)

    def take(self, parts: Mapping[int, Part]) -> dict[int, Kept]:
        """By the same numbers. Some are still to be written, here or by others."""
        for index in sorted(parts):
            got = self.store.segment(self.scope, parts[index])
            if got is None:
                raise Broken("store_full")
            kept, ours = got
            self._segments[index] = kept
            self._pinned.append(kept)
            if ours:
                self._unwritten[id(kept)] = parts[index], kept
        return self._segments

    def pin(self, kept: Kept) -> None:
        """Kept already, and for others too."""
        assert kept.pins > 0, "what nobody holds may be gone"
        kept.pins += 1
        self._pinned.append(kept)

    def writers(self) -> list[tuple[SampleRequest, Kept]]:
        """What has to enter the engine so that all are written."""
        return [
            (self.request(list(part.token_ids), export=kept.slot), kept)
            for part, kept in self._unwritten.values()
        ]

    async def write(self, engine: Engine, watch: Watch) -> None:
        """Returns when all are; Broken if they cannot be."""
        if self._unwritten:
            await self._write(engine, watch, self.writers())
        for kept in self._segments.values():
            await unless_it_ends(watch, kept.ended.wait())
            if not kept.written:
                raise Broken("not_written")

    async def heard(self, kept: Kept, request: SampleRequest, done: Completion) -> bool:
        """Its writer has ended: whether it is written."""
        if done.finish in ("stop", "length"):
            self.num_prepared += len(request.prompt_token_ids) - done.num_cached_tokens
        written = await self.store.conclude(kept)
        self._unwritten.pop(id(kept), None)
        return written

    def forget(self) -> None:
        for kept in self._pinned:
            self.store.forget(kept)

    def release(self, *, settled: bool) -> None:
        for kept in self._pinned:
            if self._unwritten.pop(id(kept), None) is not None:
                self.store.abandon(kept)
            else:
                self.store.unpin(kept, settled=settled)
        self._pinned.clear()
        self._segments.clear()

    def request(
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

    async def _write(
        self, engine: Engine, watch: Watch, writers: Sequence[tuple[SampleRequest, Kept]]
    ) -> None:
        self.round_trips += 1
        requests = [request for request, _ in writers]
        for request in requests:
            watch.entered(request.id)
        pending = await engine.submit(requests)
        if watch.ends:
            await engine.abort([request.id for request in requests])
        done = []
        for request, awaited in zip(requests, pending, strict=True):
            done.append(await awaited)
            watch.left(request.id)
        if any(completion.finish in ("abort", "error") for completion in done):
            raise Broken("not_written")
        for (request, kept), completion in zip(writers, done, strict=True):
            if not await self.heard(kept, request, completion):
                raise Broken("not_written")
