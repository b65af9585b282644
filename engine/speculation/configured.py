"""What vLLM is told of speculation."""

from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs

from engine.settings import SpeculationSettings

PROPOSER = "engine.speculation.proposer.Proposer"


def speculate(arguments: AsyncEngineArgs, settings: SpeculationSettings) -> None:
    """Where a row comes so near `max_model_len` that a longest draft would not fit, vLLM drafts
    zeros for the whole batch (v1/worker/gpu_model_runner.py:4291). So there is room for one more
    behind what is served, and whoever submits keeps to what is served.

    The schedule over batch sizes is one length for all of them. Without any, the scheduler pads a
    request that has a single token to compute, a tree's child or a cached prompt, with a longest
    draft of -1 (v1/core/sched/scheduler.py:1135).
    """
    longest = settings.longest_draft
    # vLLM's own check of what is asked for is made here, where nothing has lifted it yet.
    served = arguments.create_model_config().max_model_len
    arguments.max_model_len = served + longest
    arguments.speculative_config = {
        **_method(arguments, settings),
        "num_speculative_tokens": longest,
        "num_speculative_tokens_per_batch_size": [(1, arguments.max_num_seqs, longest)],
    }


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
