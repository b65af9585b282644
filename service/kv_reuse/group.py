"""A group whose samples begin from a prompt that is put together."""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace

from coppice.wire.rollouts import GroupAnswer, SampleAnswer
from engine.protocol import Completion, Engine, SampleRequest
from service.kv_reuse.group_reuse import GroupReuse
from service.kv_reuse.monitor import Broken
from service.kv_reuse.prompt_plan import Preparation
from service.rollouts.group import Ending, Group, PartDone


@dataclass(slots=True, kw_only=True, eq=False)
class ChainedGroup(Group):
    """Cancelling `run` anywhere ends what is in the engine, segments, links or samples."""

    chain: Preparation
    reuse: GroupReuse
    _over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ends(self) -> bool:
        return self.ending is not None

    async def until_end(self) -> None:
        await self._over.wait()

    async def end(self, engine: Engine, ending: Ending) -> None:
        self._over.set()
        await Group.end(self, engine, ending)

    def entered(self, request_id: str) -> None:
        self._unfinished.add(request_id)

    def left(self, request_id: str) -> None:
        self._unfinished.discard(request_id)

    async def run(self, engine: Engine, done: PartDone) -> GroupAnswer:
        clock = asyncio.get_running_loop().time
        began, whole = clock(), False
        try:
            async with self._deadline(engine):
                await self._prepare(engine)
            if self.deadline_seconds is not None:
                self.deadline_seconds = max(0.0, self.deadline_seconds - (clock() - began))
            answer = await Group.run(self, engine, done)
            whole = all(sample.finish_reason in ("stop", "length") for sample in answer.samples)
            return answer
        finally:
            await engine.abort(list(self._unfinished))
            self._unfinished.clear()
            self.chain.release(settled=whole)

    async def _prepare(self, engine: Engine) -> None:
        """The samples load what is placed, or nothing."""
        try:
            self.load = await self.chain.prepare(engine, self)
            self.reuse.reason = self.chain.reason
        except Broken as broken:
            await engine.abort(list(self._unfinished))
            self._unfinished.clear()
            self.reuse.reason = broken.reason
            self.chain.release(settled=False)
        self.reuse.num_prepared = self.chain.borrowed.num_prepared
        self.reuse.round_trips = self.chain.borrowed.round_trips + 1

    def _requests(self) -> list[SampleRequest]:
        """Links that samples stand on come first: who comes later finds what they leave. Others
        come behind the first sample, whose prompt they are not to delay: other groups may wait for
        what they write."""
        first, *others = Group._requests(self)
        samples = [replace(first, export=self.chain.export), *others]
        at = self._links_at
        return [*samples[:at], *self.chain.links, *samples[at:]]

    @property
    def _links_at(self) -> int:
        return 1 if self.load is None else 0

    async def _gather(
        self, engine: Engine, completions: list[Awaitable[Completion]], done: PartDone
    ) -> list[tuple[SampleAnswer, int]]:
        begin = self._links_at
        end = begin + len(self.chain.links)
        links, samples = completions[begin:end], completions[:begin] + completions[end:]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._hear(links))
            finished = await Group._gather(self, engine, samples, done)
        return finished

    async def _hear(self, completions: Sequence[Awaitable[Completion]]) -> None:
        for link, completion in zip(self.chain.links, completions, strict=True):
            await self.chain.heard(link, await completion)
            self.left(link.id)

    def _answer(self, finished: list[tuple[SampleAnswer, int]]) -> GroupAnswer:
        """What the engine did not load, because it has forgotten what it wrote, was computed."""
        self.reuse.num_computed = self.chain.num_computed
        self.reuse.num_prepared = self.chain.borrowed.num_prepared
        if self.load is not None:
            first, num_cached = finished[0]
            self.reuse.exact = not self.chain.is_placed(num_cached)
            if self.chain.is_loaded(num_cached):
                self.reuse.num_anchors = self.chain.num_anchors
            else:
                self.reuse.reason = "not_loaded"
                if first.finish_reason in ("stop", "length"):
                    self.chain.forget()
        return Group._answer(self, finished)
