"""An engine that runs batches of samples."""

import asyncio
import random
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Final

from bench.gpu.workloads import Workload
from engine.settings import EngineSettings
from engine.types.samples import Completion, SampleRequest, Sampling, TokenDelta
from engine.vllm_engine import VllmEngine

PAIR_DELAY_SECONDS: Final = 1.0


def rehearsal_settings(model: Path) -> EngineSettings:
    """Settings of an engine on a CPU, beside others."""
    return EngineSettings(
        model=str(model), seed=0, max_context_tokens=512, cache_bytes=2**25, cpu_threads=1
    )


class Run:
    """An engine under measurement. Prompts differ in every batch, so that none is cached."""

    def __init__(self, engine: VllmEngine, vocabulary: int) -> None:
        self._engine = engine
        self._vocabulary = vocabulary
        self._batch = 0

    async def batch(self, workload: Workload) -> dict[str, float]:
        """Run a workload; returns its seconds and the number of its sampled tokens.

        Of pairs, only the samples that were submitted later count.
        """
        self._batch += 1
        earlier: list[Awaitable[Completion]] = []
        counted = range(workload.samples)
        if workload.pairs:
            earlier, counted = await self.submit(workload, range(1)), range(1, 2)
            await asyncio.sleep(PAIR_DELAY_SECONDS)
        began = time.perf_counter()
        completions = await asyncio.gather(*await self.submit(workload, counted))
        seconds = time.perf_counter() - began
        await asyncio.gather(*earlier)
        return {"seconds": seconds, "tokens": sum(len(each.token_ids) for each in completions)}

    async def submit(self, workload: Workload, numbers: range) -> list[Awaitable[Completion]]:
        """Submit these samples of each group."""
        sampling = Sampling(
            max_tokens=workload.tokens,
            ignore_eos=True,
            temperature=0.0 if workload.pairs else 1.0,
        )
        return await self._engine.submit(
            [
                SampleRequest(
                    id=f"{self._batch}-{group}-{number}",
                    prompt_token_ids=prompt,
                    sampling=sampling,
                    group=f"{self._batch}-{group}",
                    on_tokens=_ignore if workload.streams else None,
                )
                for group, prompt in enumerate(self._prompts(workload))
                for number in numbers
            ]
        )

    def _prompts(self, workload: Workload) -> list[list[int]]:
        draw = random.Random(self._batch)
        return [
            [draw.randrange(5, self._vocabulary) for _ in range(workload.prompt)]
            for _ in range(workload.groups)
        ]


def _ignore(_: TokenDelta) -> None:
    """The receiver of a stream that does nothing with it."""
