"""The fake engine with a real suspension at every await, as vLLM may have."""

import asyncio
from collections.abc import Awaitable, Sequence

from engine.errors import RequestRefused
from engine.types.samples import Completion, SampleRequest
from tests.fake_engine import FakeEngine


async def yield_loop(number: int = 3) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


class YieldingEngine(FakeEngine):
    """A caller can be cancelled before and after each call takes effect."""

    num_rejections = 0

    async def submit(self, samples: Sequence[SampleRequest]) -> list[Awaitable[Completion]]:
        await yield_loop()
        if self.num_rejections:
            self.num_rejections -= 1
            raise RequestRefused("for once")
        completions = await super().submit(samples)
        await yield_loop()
        return completions

    async def abort(self, sample_ids: Sequence[str]) -> None:
        await super().abort(sample_ids)
        await yield_loop()
