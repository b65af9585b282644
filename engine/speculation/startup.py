"""Startup and shutdown of speculation: mode, vLLM's configuration and measured step times."""

import asyncio
import logging
import time
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from engine.cudagraphs.planner import Plan
from engine.runtime.await_engine import await_engine
from engine.settings import EngineSettings, SpeculationSettings
from engine.speculation.cost import ProfileBatch, num_tokens, profile_batches
from engine.types import EngineInfo
from kernels.draft_index.store import is_built

PROPOSER = "engine.speculation.proposer.Proposer"


def set_speculative_config(
    arguments: AsyncEngineArgs, settings: SpeculationSettings, graphs: Plan | None = None
) -> None:
    """Set `speculative_config`, and extend `max_model_len` by the longest draft.

    When a row comes so close to `max_model_len` that a longest draft would not fit, vLLM drafts
    zeros for the whole batch (v1/worker/gpu_model_runner.py:4291). The engine therefore has room
    for one more draft past the served context length, and callers must keep to the served length.

    A schedule over batch sizes is always set. Without one, the scheduler pads a request that has a
    single token to compute (a tree's child or a cached prompt) with a longest draft of -1
    (v1/core/sched/scheduler.py:1135).
    """
    max_draft_tokens = settings.longest_draft
    # vLLM validates the requested length here, before it is extended.
    max_context_tokens = arguments.create_model_config().max_model_len
    arguments.max_model_len = max_context_tokens + max_draft_tokens
    arguments.speculative_config = {
        **_method_config(arguments, settings),
        "num_speculative_tokens": max_draft_tokens,
        "num_speculative_tokens_per_batch_size": _draft_length_schedule(
            arguments, settings, graphs
        ),
    }


def _draft_length_schedule(
    arguments: AsyncEngineArgs, settings: SpeculationSettings, graphs: Plan | None
) -> list[tuple[int, int, int]]:
    """Draft lengths per range of batch sizes, for vLLM's `speculative_config`.

    The drafter's lengths are chosen step by step and ignore this schedule. But vLLM captures CUDA
    graphs for the lengths in it (v1/worker/gpu/cudagraph_utils.py:289), so each length occurs once.
    """
    max_draft_tokens, most = settings.longest_draft, arguments.max_num_seqs
    if settings.mode != "drafter":
        return [(1, most, max_draft_tokens)]
    lengths = {max_draft_tokens} | set(
        range(max_draft_tokens) if graphs is None else graphs.max_samples
    )
    descending = sorted(lengths, reverse=True)[:most]
    schedule = [(number, number, length) for number, length in enumerate(descending, start=1)]
    return [*schedule[:-1], (len(descending), most, descending[-1])]


def _method_config(arguments: AsyncEngineArgs, settings: SpeculationSettings) -> dict[str, Any]:
    """Drafting method in vLLM's `speculative_config`: a custom proposer or a draft model.

    Greedy drafts keep sampling lossless whatever the drafter computes.
    """
    if settings.mode != "drafter":
        return {"method": "custom_class", "model": PROPOSER}
    return {
        "method": "draft_model",
        "model": str(settings.drafter),
        "draft_tensor_parallel_size": arguments.tensor_parallel_size,
        "draft_sample_method": "greedy",
    }


log = logging.getLogger(__name__)
PROFILE_SECONDS = 5.0


def resolve_mode(settings: SpeculationSettings, engine: EngineSettings) -> SpeculationSettings:
    """Speculation settings, with a mode that cannot be used replaced by `off`.

    `auto` is `off` on a GPU, where nothing has been measured. All modes but `drafter` need the
    compiled draft store. With pipeline parallelism the rank that drafts does not sample, so there
    are no drafts.
    """
    reason = why_off(settings, engine)
    if settings.mode == "off" or reason is None:
        return settings
    if settings.mode != "auto":
        log.warning("speculation is off: %s", reason)
    return settings.model_copy(update={"mode": "off"})


def why_off(settings: SpeculationSettings, engine: EngineSettings) -> str | None:
    """Reason why nothing is drafted with these settings; None if drafts are possible."""
    if settings.mode == "off":
        return "speculation.mode is off"
    if engine.pipeline_parallel_size > 1:
        return "the rank that drafts does not sample with pipeline parallelism"
    if settings.mode == "auto" and not current_platform.is_cpu():
        return "auto is off on a GPU, where no gain has been measured"
    if settings.mode != "drafter" and not is_built():
        return "the draft store is not compiled; install with a C++ compiler"
    return None


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
    """Save the draft store at shutdown, if a file is configured."""
    if settings.mode not in ("off", "drafter") and settings.store_file is not None:
        await await_engine(llm, llm.collective_rpc("coppice_save_drafts"))


async def measure_step_costs(llm: AsyncLLM, info: EngineInfo, max_draft_tokens: int) -> None:
    """Measure step times: run profiling batches for about PROFILE_SECONDS.

    Large models complete only a few batches.
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
