"""A group whose samples begin from a prompt that is put together: its chain first, then they."""

import asyncio
from dataclasses import dataclass

from coppice.wire.rollouts import GroupAnswer, SampleAnswer
from engine.protocol import Engine
from service.group import Group, PartDone
from service.reuse.chain import Broken, Chain
from service.reuse.group_reuse import GroupReuse


@dataclass(slots=True, kw_only=True, eq=False)
class ChainedGroup(Group):
    """Cancelling `run` anywhere ends what is in the engine, a link or samples."""

    chain: Chain
    reuse: GroupReuse

    @property
    def ends(self) -> bool:
        return self.ending is not None

    def entered(self, request_id: str) -> None:
        self._unfinished.add(request_id)

    def left(self, request_id: str) -> None:
        self._unfinished.discard(request_id)

    async def run(self, engine: Engine, done: PartDone) -> GroupAnswer:
        clock = asyncio.get_running_loop().time
        began, whole = clock(), False
        try:
            async with self._deadline(engine):
                await self._link(engine)
            if self.deadline_seconds is not None:
                self.deadline_seconds = max(0.0, self.deadline_seconds - (clock() - began))
            answer = await Group.run(self, engine, done)
            whole = all(sample.finish_reason in ("stop", "length") for sample in answer.samples)
            return answer
        finally:
            await engine.abort(list(self._unfinished))
            self._unfinished.clear()
            self.chain.release(settled=whole)

    async def _link(self, engine: Engine) -> None:
        """The samples load what the chain has made, or nothing."""
        try:
            self.load = await self.chain.run(engine, self)
            self.cache_salt = self.chain.salt
        except Broken as broken:
            await engine.abort(list(self._unfinished))
            self._unfinished.clear()
            self.reuse.reason = broken.reason
            self.chain.release(settled=False)
        self.reuse.num_computed = self.chain.num_computed
        self.reuse.num_prepared = self.chain.num_prepared
        self.reuse.round_trips = self.chain.round_trips + 1

    def _answer(self, finished: list[tuple[SampleAnswer, int]]) -> GroupAnswer:
        """What the engine did not load, because the weights have changed, was computed."""
        if self.load is not None:
            self.reuse.exact = not any(num_cached for _, num_cached in finished)
            if finished[0][1] < self.load.num_tokens:
                self.reuse.reason = "not_loaded"
        return Group._answer(self, finished)
