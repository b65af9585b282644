"""Command `coppice measure-baseline`: step times of the engine without speculation."""

from engine.errors import StartFailed
from engine.launch.arguments import WORKER_EXTENSION
from engine.settings import EngineSettings
from engine.settings.base import Section
from engine.speculation.settings import SpeculationSettings
from engine.speculation.startup import measure_baseline
from engine.vllm_engine import VllmEngine


async def measure(
    settings: EngineSettings,
    *,
    speculation: SpeculationSettings,
    **sections: Section,
) -> int:
    """Start the engine without speculation and cache its step times.

    Returns the number of batches that were measured. Raises StartFailed or EngineDead.
    """
    if settings.data_parallel_size > 1:
        raise StartFailed(
            "the baseline is that of one engine; set engine.data_parallel_size: 1, as several "
            "engines do not draft"
        )
    off = speculation.model_copy(update={"mode": "off"})
    engine = VllmEngine(settings, worker_extension=WORKER_EXTENSION, speculation=off, **sections)
    try:
        await engine.start("baseline")
        return await measure_baseline(
            engine.llm, engine.info, speculation.longest_draft, again=True
        )
    finally:
        await engine.stop()
