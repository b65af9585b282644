"""The fake engine with every await a real suspension, as vLLM's may be."""

import asyncio
from collections.abc import Awaitable, Sequence

from engine.errors import RequestRefused
from engine.protocol import Completion, SampleRequest
from tests.fake_engine import FakeEngine


async def turns(number: int = 3) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


class HesitantEngine(FakeEngine):
    """Whoever is cancelled can be cancelled before and after each call takes effect."""

    num_refusals = 0

    async def submit(self, samples: Sequence[SampleRequest]) -> list[Awaitable[Completion]]:
        await turns()
        if self.num_refusals:
            self.num_refusals -= 1
            raise RequestRefused("for once")
        completions = await super().submit(samples)
        await turns()
        return completions

    async def abort(self, sample_ids: Sequence[str]) -> None:
        await super().abort(sample_ids)
        await turns()
