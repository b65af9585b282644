"""What vLLM is told of speculation."""

from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs

from engine.cudagraphs.planner import Plan
from engine.settings import SpeculationSettings

PROPOSER = "engine.speculation.proposer.Proposer"


def set_speculative_config(
    arguments: AsyncEngineArgs, settings: SpeculationSettings, graphs: Plan | None = None
) -> None:
    """Where a row comes so near `max_model_len` that a longest draft would not fit, vLLM drafts
    zeros for the whole batch (v1/worker/gpu_model_runner.py:4291). So there is room for one more
    behind what is served, and whoever submits keeps to what is served.

    There is always a schedule over batch sizes. Without any, the scheduler pads a request that has
    a single token to compute, a tree's child or a cached prompt, with a longest draft of -1
    (v1/core/sched/scheduler.py:1135).
    """
    max_draft_tokens = settings.longest_draft
    # vLLM's own check of what is asked for is made here, where nothing has lifted it yet.
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
    """A drafter's lengths are chosen step by step, whatever stands here. But it is for these that
    vLLM captures CUDA graphs (v1/worker/gpu/cudagraph_utils.py:289), so each is here once."""
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
    """Greedy drafts keep sampling lossless whatever the drafter computes."""
    if settings.mode != "drafter":
        return {"method": "custom_class", "model": PROPOSER}
    return {
        "method": "draft_model",
        "model": str(settings.drafter),
        "draft_tensor_parallel_size": arguments.tensor_parallel_size,
        "draft_sample_method": "greedy",
    }
