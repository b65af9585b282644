"""Startup and shutdown of speculation: resolution of mode `auto` and the step profile."""

import asyncio
import logging
import time

from vllm.inputs.engine import tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from engine.launch.processes import await_engine
from engine.settings import EngineSettings, SpeculationSettings
from engine.speculation.profile import ProfileBatch, num_tokens, profile_batches
from engine.types import EngineInfo
from kernels.draft_index.store import is_built

log = logging.getLogger(__name__)

PROFILE_SECONDS = 5.0


def resolve_mode(settings: SpeculationSettings, engine: EngineSettings) -> SpeculationSettings:
    """Settings with an unusable mode replaced by `off`.

    `auto` is `off` on a GPU, where nothing has been measured. All modes but `drafter` need the
    compiled draft store. With pipeline parallelism the rank that drafts does not sample, so there
    are no drafts.
    """
    unmeasured = settings.mode == "auto" and not current_platform.is_cpu()
    can = settings.mode == "drafter" or (is_built() and not unmeasured)
    if settings.mode == "off" or (can and engine.pipeline_parallel_size == 1):
        return settings
    if settings.mode != "auto":
        log.warning("speculation is off: no compiled draft store, or pipeline parallelism")
    return settings.model_copy(update={"mode": "off"})


async def start_drafting(llm: AsyncLLM, settings: SpeculationSettings, info: EngineInfo) -> None:
    """Start drafting from the draft store, with step costs measured on this machine.

    For mode `drafter` this is done by `Drafter.start_drafting`.
    """
    if settings.mode in ("off", "drafter"):
        return
    if any(await await_engine(llm, llm.collective_rpc("coppice_start_speculation"))):
        await measure_step_costs(llm, info, settings.longest_draft)
        await await_engine(llm, llm.collective_rpc("coppice_finish_profile"))


async def stop_drafting(llm: AsyncLLM, settings: SpeculationSettings) -> None:
    """Save the draft store, if a file is configured."""
    if settings.mode not in ("off", "drafter") and settings.store_file is not None:
        await await_engine(llm, llm.collective_rpc("coppice_save_drafts"))


async def measure_step_costs(llm: AsyncLLM, info: EngineInfo, max_draft_tokens: int) -> None:
    """Run the batches of the profile for PROFILE_SECONDS.

    Large models complete only a few cells.
    """
    began = time.monotonic()
    for number, batch in enumerate(
        profile_batches(
            max_sequences=info.max_sequences,
            max_context_tokens=info.max_context_tokens,
            max_draft_tokens=max_draft_tokens,
        )
    ):
        if number > 1 and time.monotonic() - began > PROFILE_SECONDS:
            break
        await _run(llm, batch, number, num_tokens(max_draft_tokens))
    log.info("step costs measured in %.1f s", time.monotonic() - began)


async def _run(llm: AsyncLLM, batch: ProfileBatch, number: int, tokens: int) -> None:
    params = SamplingParams(
        max_tokens=tokens,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    prompt = [number % 5] * batch.prompt

    async def one(row: int) -> None:
        async for _ in llm.generate(tokens_input(prompt), params, f"profile-{number}-{row}"):
            pass

    async with asyncio.TaskGroup() as rows:
        for row in range(batch.running):
            rows.create_task(one(row))
