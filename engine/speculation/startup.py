"""Startup of speculation: choice of mode, vLLM's speculative_config, step-time profile."""

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Any

from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from engine.cudagraphs.draft_lengths import draft_length_schedule
from engine.errors import StartFailed
from engine.runtime.await_engine import await_engine
from engine.settings import EngineSettings
from engine.speculation.baseline import GainPrediction
from engine.speculation.cost import ProfileBatch, draft_lengths, num_tokens, profile_batches
from engine.speculation.settings import SIBLING_MODES, SpeculationSettings
from engine.types.info import EngineInfo
from kernels.draft_index.compiled_store import is_built

log = logging.getLogger(__name__)
PROFILE_SECONDS = 5.0
PROPOSER = "engine.speculation.custom_class_proposer.Proposer"
GPU_METHOD = "ngram_gpu"
"""vLLM's method whose speculator `engine.speculation.worker.gpu_speculator` replaces."""


def set_speculative_config(
    arguments: AsyncEngineArgs,
    settings: SpeculationSettings,
    *,
    on_cpu: bool,
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
        **_method_config(arguments, settings, on_cpu=on_cpu),
        "num_speculative_tokens": max_draft_tokens,
        "num_speculative_tokens_per_batch_size": draft_length_schedule(
            _captured_lengths(settings, on_cpu=on_cpu), arguments.max_num_seqs
        ),
    }


def _captured_lengths(settings: SpeculationSettings, *, on_cpu: bool) -> Iterable[int]:
    """Draft lengths for which vLLM captures CUDA graphs; on CPU the longest draft alone.

    A plan of CUDA graphs replaces them by its own.
    """
    longest = settings.longest_draft
    if settings.mode != "drafter" and on_cpu:
        return {longest}
    return range(longest + 1) if settings.mode == "drafter" else draft_lengths(longest)


def _method_config(
    arguments: AsyncEngineArgs, settings: SpeculationSettings, *, on_cpu: bool
) -> dict[str, Any]:
    """Drafting method in vLLM's `speculative_config`.

    For siblings, a custom proposer on CPU. On a GPU vLLM would disable Model Runner V2,
    asynchronous scheduling and full CUDA graphs for it, so there it is the method whose speculator
    `gpu_speculator` replaces. Otherwise a draft model: greedy drafts keep sampling lossless
    whatever the drafter computes.
    """
    if settings.mode != "drafter":
        return {"method": "custom_class", "model": PROPOSER} if on_cpu else {"method": GPU_METHOD}
    return {
        "method": "draft_model",
        "model": str(settings.drafter),
        "draft_tensor_parallel_size": arguments.tensor_parallel_size,
        "draft_sample_method": "greedy",
    }


def resolve_mode(settings: SpeculationSettings, engine: EngineSettings) -> SpeculationSettings:
    """Speculation settings, with a mode that cannot be used replaced by `off`.

    All modes but `drafter` need the compiled draft store. With pipeline parallelism the rank that
    drafts does not sample, so there are no drafts.
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
    if engine.data_parallel_size > 1:
        return "step times and drafts are those of one engine, and there are several"
    if settings.mode == "drafter":
        return None
    if not is_built():
        return "the draft store is not compiled; install with a C++ compiler"
    return None


def find_obstacle(config: Any, settings: SpeculationSettings) -> str | None:
    """Reason why the mode `auto` drafts nothing with vLLM's `config`; None if it may draft.

    On a GPU drafts need Model Runner V2. Raises StartFailed if the mode is explicit.
    """
    if settings.mode == "drafter":
        needs_v2 = not current_platform.is_cpu()
    else:
        method = config.speculative_config.method if settings.mode in SIBLING_MODES else None
        needs_v2 = method == GPU_METHOD
    if not needs_v2 or config.use_v2_model_runner:
        return None
    reason = f"vLLM uses Model Runner V1 here, as {_why_v1(config)}"
    if settings.mode == "auto":
        return reason
    raise StartFailed(
        f"speculation.mode {settings.mode} is not possible on a GPU: {reason}; "
        "set speculation.mode: off"
    )


def _why_v1(config: Any) -> str:
    if envs.VLLM_USE_V2_MODEL_RUNNER is False:
        return "VLLM_USE_V2_MODEL_RUNNER is 0"
    unsupported = config._get_v2_model_runner_unsupported_features()
    return f"V2 does not support {', '.join(unsupported)}" if unsupported else "V2 needs Triton"


async def start_drafting(llm: AsyncLLM, settings: SpeculationSettings, info: EngineInfo) -> None:
    """Start drafting from the draft store, with step costs measured on this machine.

    For mode `drafter` this is done by `Drafter.start_drafting`.
    """
    if settings.mode not in SIBLING_MODES:
        return
    await measure_baseline(llm, info, settings.longest_draft)
    if current_platform.is_cpu():
        if any(await await_engine(llm, llm.collective_rpc("coppice_start_speculation"))):
            await measure_step_costs(llm, info, settings.longest_draft)
            await await_engine(llm, llm.collective_rpc("coppice_finish_profile"))
        return
    if await _utility(llm, "coppice_start_sibling_drafts"):
        await measure_step_costs(llm, info, settings.longest_draft)
        await _utility(llm, "coppice_finish_sibling_profile")


async def predict_gain(llm: AsyncLLM, settings: SpeculationSettings) -> GainPrediction | None:
    """Prediction for the drafts of a started engine; None if no step times were measured.

    Raises StartFailed if an explicit mode is predicted to lose, unless the settings allow that. The
    mode `auto` drafts only if the prediction is sufficient.
    """
    fields = None if settings.mode == "off" else await _utility(llm, "coppice_predict_gain")
    if fields is None:
        return None
    prediction = GainPrediction(best_speedup=fields[0], overhead=fields[1])
    if settings.mode == "auto":
        return prediction
    if prediction.is_loss and not settings.allow_predicted_loss:
        raise StartFailed(
            f"speculation.mode {settings.mode} is predicted to lose: {prediction}; set "
            "speculation.mode: off, or speculation.allow_predicted_loss: true to draft nevertheless"
        )
    if not prediction.is_sufficient:
        log.warning("speculation.mode %s gains little or nothing: %s", settings.mode, prediction)
    return prediction


async def measure_baseline(
    llm: AsyncLLM, info: EngineInfo, max_draft_tokens: int, *, again: bool = False
) -> int:
    """Measure and cache the baseline, before drafting starts, if there is none or `again`.

    Returns the number of batches measured: 0 if this engine cannot measure it.
    """
    if not await _utility(llm, "coppice_begin_baseline", again):
        return 0
    await measure_step_costs(llm, info, max_draft_tokens)
    num_batches: int = await _utility(llm, "coppice_finish_baseline")
    return num_batches


async def _utility(llm: AsyncLLM, method: str, *args: Any) -> Any:
    return await await_engine(llm, llm.engine_core.call_utility_async(method, *args))


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
