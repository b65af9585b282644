"""What vLLM is told of speculation."""

from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs

from engine.cudagraphs.planner import Plan
from engine.settings import SpeculationSettings

PROPOSER = "engine.speculation.proposer.Proposer"


def speculate(
    arguments: AsyncEngineArgs, settings: SpeculationSettings, graphs: Plan | None = None
) -> None:
    """Where a row comes so near `max_model_len` that a longest draft would not fit, vLLM drafts
    zeros for the whole batch (v1/worker/gpu_model_runner.py:4291). So there is room for one more
    behind what is served, and whoever submits keeps to what is served.

    There is always a schedule over batch sizes. Without any, the scheduler pads a request that has
    a single token to compute, a tree's child or a cached prompt, with a longest draft of -1
    (v1/core/sched/scheduler.py:1135).
    """
    longest = settings.longest_draft
    # vLLM's own check of what is asked for is made here, where nothing has lifted it yet.
    served = arguments.create_model_config().max_model_len
    arguments.max_model_len = served + longest
    arguments.speculative_config = {
        **_method(arguments, settings),
        "num_speculative_tokens": longest,
        "num_speculative_tokens_per_batch_size": _schedule(arguments, settings, graphs),
    }


def _schedule(
    arguments: AsyncEngineArgs, settings: SpeculationSettings, graphs: Plan | None
) -> list[tuple[int, int, int]]:
    """A drafter's lengths are chosen step by step, whatever stands here. But it is for these that
    vLLM captures CUDA graphs (v1/worker/gpu/cudagraph_utils.py:289), so each is here once."""
    longest, most = settings.longest_draft, arguments.max_num_seqs
    if settings.mode != "drafter":
        return [(1, most, longest)]
    lengths = {longest} | set(range(longest) if graphs is None else graphs.most_samples)
    shown = sorted(lengths, reverse=True)[:most]
    one_each = [(number, number, length) for number, length in enumerate(shown, start=1)]
    return [*one_each[:-1], (len(shown), most, shown[-1])]


def _method(arguments: AsyncEngineArgs, settings: SpeculationSettings) -> dict[str, Any]:
    """Greedy drafts keep sampling lossless whatever the drafter computes."""
    if settings.mode != "drafter":
        return {"method": "custom_class", "model": PROPOSER}
    return {
        "method": "draft_model",
        "model": str(settings.drafter),
        "draft_tensor_parallel_size": arguments.tensor_parallel_size,
        "draft_sample_method": "greedy",
    }
