"""vLLM's `speculative_config` for a speculation mode."""

from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs

from engine.cudagraphs.planner import Plan
from engine.settings import SpeculationSettings

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
    """Draft lengths per range of batch sizes.

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
    """The drafting method. Greedy drafts keep sampling lossless whatever the drafter computes."""
    if settings.mode != "drafter":
        return {"method": "custom_class", "model": PROPOSER}
    return {
        "method": "draft_model",
        "model": str(settings.drafter),
        "draft_tensor_parallel_size": arguments.tensor_parallel_size,
        "draft_sample_method": "greedy",
    }
