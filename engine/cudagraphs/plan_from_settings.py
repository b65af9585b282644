"""CUDA graph plan computed from the engine settings, in the service's process."""

import logging
from pathlib import Path
from typing import Any

from engine.cudagraphs.allowed_shapes import CaptureLimits
from engine.cudagraphs.draft_lengths import (
    DraftLengthTiers,
    default_tiers,
    draft_length_schedule,
)
from engine.cudagraphs.plan_score import GraphMemory, estimate_memory
from engine.cudagraphs.planner import BudgetTooSmall, Plan, plan
from engine.cudagraphs.settings import GraphsSettings
from engine.cudagraphs.shapes import Trace, read_trace
from engine.errors import StartFailed
from engine.settings import EngineSettings

log = logging.getLogger(__name__)
H100_SEQUENCES = 1024
H100_BATCHED_TOKENS = 8192
"""Batch limits of vLLM on an H100, for a plan that is made where there is no GPU."""


def capture_limits(
    engine: EngineSettings, graphs: GraphsSettings, longest_draft: int
) -> CaptureLimits:
    """Limits of a plan. `longest_draft` is 0 without drafts."""
    return CaptureLimits(
        lengths=_lengths(graphs, longest_draft),
        max_sequences=engine.max_sequences or H100_SEQUENCES,
        max_batched_tokens=engine.max_batched_tokens or H100_BATCHED_TOKENS,
    )


def _lengths(graphs: GraphsSettings, longest_draft: int) -> DraftLengthTiers:
    """Draft lengths for which CUDA graphs are needed."""
    if graphs.lengths is not None:
        return DraftLengthTiers.parse(graphs.lengths)
    return default_tiers(longest_draft) if longest_draft else DraftLengthTiers.parse("0")


def graph_memory(engine: EngineSettings, model: Path) -> GraphMemory:
    """Memory model of CUDA graphs for the model in this directory, from its config.json."""
    try:
        return estimate_memory(
            model,
            ranks=engine.tensor_parallel_size,
            dtype=engine.dtype,
            with_adapters=engine.max_adapters > 0,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StartFailed(
            f"cannot estimate graph memory from {model}/config.json: {error!r}"
        ) from error


def load_trace(graphs: GraphsSettings) -> Trace | None:
    try:
        return read_trace(graphs.trace) if graphs.trace else None
    except ValueError as error:
        raise StartFailed(f"graphs.trace: {error}") from error


def make_plan(
    engine: EngineSettings, graphs: GraphsSettings, longest_draft: int, model: Path
) -> Plan:
    """Make the CUDA graph plan; raises StartFailed with the reason if none is possible."""
    try:
        return plan(
            capture_limits(engine, graphs, longest_draft),
            graph_memory(engine, model),
            budget_bytes=graphs.budget_bytes,
            trace=load_trace(graphs),
        )
    except BudgetTooSmall as error:
        raise StartFailed(f"graphs.budget_bytes: {error}") from error


def captures_graphs(engine: EngineSettings, *, on_cpu: bool) -> bool:
    return not (engine.eager or on_cpu)


def plan_for_start(
    engine: EngineSettings,
    graphs: GraphsSettings,
    longest_draft: int,
    model: Path,
    *,
    on_cpu: bool,
) -> Plan | None:
    """CUDA graph plan of an engine start; None to use vLLM's default capture sizes."""
    if graphs.budget_bytes is None:
        return None
    if not captures_graphs(engine, on_cpu=on_cpu):
        log.warning("graphs.budget_bytes has no effect: none are captured on CPU or with eager")
        return None
    return make_plan(engine, graphs, longest_draft, model)


def set_planned_graphs(arguments: Any, planned: Plan) -> None:
    """Have vLLM capture the graphs of a plan: set their sizes and draft lengths in its arguments.

    vLLM captures the product of both, which is then filtered to the plan.
    """
    if arguments.compilation_config.cudagraph_capture_sizes is not None:
        raise StartFailed(
            "engine.vllm_args.compilation_config.cudagraph_capture_sizes and graphs.budget_bytes "
            "are both set; set one of them"
        )
    arguments.compilation_config.cudagraph_capture_sizes = planned.capture_sizes
    if arguments.speculative_config is not None:
        longest = arguments.speculative_config["num_speculative_tokens"]
        arguments.speculative_config["num_speculative_tokens_per_batch_size"] = (
            draft_length_schedule({longest, *planned.max_samples}, arguments.max_num_seqs)
        )
