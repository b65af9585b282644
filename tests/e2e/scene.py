"""A real engine behind a real server, called by the real client."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coppice import AsyncRollouts
from coppice.rollout_results import RolloutResult
from engine.attention.settings import AttentionSettings
from engine.settings import EngineSettings
from engine.speculation.settings import SpeculationSettings
from engine.vllm_engine import VllmEngine
from tests.serving import Served, serving


@dataclass(frozen=True)
class Scene:
    served: Served
    rollouts: AsyncRollouts
    engine: VllmEngine
    models: dict[str, Path]

    async def greedy(self, prompts: list[list[int]], num: int, **options: Any) -> RolloutResult:
        return await self.rollouts.rollout(
            prompts, temperature=0.0, max_tokens=num, ignore_eos=True, **options
        )


@asynccontextmanager
async def scene(
    models: dict[str, Path],
    tmp_path: Path,
    num_ranks: int,
    speculation: SpeculationSettings,
    **options: Any,
) -> AsyncIterator[Scene]:
    """A running server with an engine, whose settings have these further `options`.

    Its KV cache cannot hold all samples at once, so that some are preempted.
    """
    settings = EngineSettings(
        model=str(models["v7"]),
        dtype="float32",
        seed=0,
        max_context_tokens=512,
        max_sequences=48,
        max_batched_tokens=128,
        # The drafter, here as large as the model, takes half of the cache.
        cache_bytes=3 * 2**19 * (2 if speculation.mode == "drafter" else 1),
        tensor_parallel_size=num_ranks,
        cpu_threads=1,
        prompt_kv=True,
        cache_directory=tmp_path / "cache",
        **options,
    )
    attention = AttentionSettings(shared_prefix="always")
    engine = VllmEngine(settings, attention=attention, speculation=speculation)
    weights = {"initial_version": "v7"}
    async with (
        serving(
            engine, tmp_path, weights=weights, kv={"capacity_bytes": 2**24, "spans_bytes": 2**23}
        ) as served,
        AsyncRollouts(served.url, timeout=300) as rollouts,
    ):
        yield Scene(served, rollouts, engine, models)
