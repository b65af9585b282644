"""The fake engine with every await a real suspension, as vLLM's may be."""

import asyncio
from collections.abc import Awaitable, Sequence

from engine.protocol import Completion, SampleRequest
from tests.fake_engine import FakeEngine


class HesitantEngine(FakeEngine):
    """Whoever is cancelled can be cancelled before and after each call takes effect."""

    async def submit(self, samples: Sequence[SampleRequest]) -> list[Awaitable[Completion]]:
        await asyncio.sleep(0)
        completions = await super().submit(samples)
        await asyncio.sleep(0)
        return completions

    async def abort(self, sample_ids: Sequence[str]) -> None:
        await super().abort(sample_ids)
        await asyncio.sleep(0)
