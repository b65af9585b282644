"""CUDA graph plan of an engine, made from the service's settings."""

import logging
from pathlib import Path

from engine.cudagraphs.allowed_shapes import CaptureLimits
from engine.cudagraphs.evaluation import GraphMemory, estimate_memory
from engine.cudagraphs.planner import BudgetTooSmall, Plan, plan
from engine.cudagraphs.shapes import Trace, read_trace
from engine.draft_lengths import DraftLengthTiers, default_tiers
from engine.errors import StartFailed
from engine.feature_settings import GraphsSettings, SpeculationSettings
from engine.settings import EngineSettings

log = logging.getLogger(__name__)
H100_SEQUENCES = 1024
H100_BATCHED_TOKENS = 8192
"""Batch limits of vLLM on an H100, for a plan that is made where there is no GPU."""


def capture_limits(
    engine: EngineSettings, graphs: GraphsSettings, speculation: SpeculationSettings
) -> CaptureLimits:
    return CaptureLimits(
        lengths=_lengths(graphs, speculation),
        max_sequences=engine.max_sequences or H100_SEQUENCES,
        max_batched_tokens=engine.max_batched_tokens or H100_BATCHED_TOKENS,
    )


def _lengths(graphs: GraphsSettings, speculation: SpeculationSettings) -> DraftLengthTiers:
    """Draft lengths for which CUDA graphs are needed."""
    if graphs.lengths is not None:
        return DraftLengthTiers.parse(graphs.lengths)
    drafts = speculation.mode != "off"
    return default_tiers(speculation.longest_draft) if drafts else DraftLengthTiers.parse("0")


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
    engine: EngineSettings, graphs: GraphsSettings, speculation: SpeculationSettings, model: Path
) -> Plan:
    """Make the CUDA graph plan; raises StartFailed with the reason if none is possible."""
    try:
        return plan(
            capture_limits(engine, graphs, speculation),
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
    speculation: SpeculationSettings,
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
    return make_plan(engine, graphs, speculation, model)
