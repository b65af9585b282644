"""Server with a drafter trained for the seedling (the small test model), and traffic for it.

The engine computes on one thread, so that one core is free, as cores are on a machine with a GPU.
"""

import random
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bench.harness.in_process_service import running_service
from coppice import AsyncRollouts
from engine.settings import EngineSettings
from engine.speculation.settings import SpeculationSettings
from examples.seedling.arithmetic import draw

BUILD = Path("build") / "drafter"
GROUPS, N, MAX_TOKENS = 4, 8, 200
ROLLOUTS = 3
"""Rollouts timed together, which takes longer than the test of a drafter."""


@asynccontextmanager
async def drafter_server(*, training: bool) -> AsyncIterator[AsyncRollouts]:
    with tempfile.TemporaryDirectory() as folder:
        speculation = SpeculationSettings(
            mode="drafter",
            allow_predicted_loss=True,
            longest_draft=4,
            drafter=BUILD / "fitted",
            drafter_training=training,
        )
        settings = EngineSettings(
            seed=0, cpu_threads=1, max_sequences=64, cache_directory=Path(folder)
        )
        async with (
            running_service(settings, speculation=speculation) as (_, url),
            AsyncRollouts(url, timeout=600) as rollouts,
        ):
            yield rollouts


class Traffic:
    """Rollouts of ever new prompts, as load for a server."""

    def __init__(self, rollouts: AsyncRollouts) -> None:
        self._rollouts, self._rng = rollouts, random.Random(7)

    def prompts(self) -> list[str]:
        return [draw(self._rng, held_out=True).prompt for _ in range(GROUPS)]

    async def run(self) -> None:
        while True:
            await self._rollouts.rollout(self.prompts(), n=N, max_tokens=MAX_TOKENS)

    async def timed(self) -> float:
        """Run rollouts with a fixed number of tokens; returns their seconds."""
        began = time.perf_counter()
        for _ in range(ROLLOUTS):
            await self._rollouts.rollout(
                self.prompts(), n=N, max_tokens=MAX_TOKENS, ignore_eos=True
            )
        return time.perf_counter() - began
