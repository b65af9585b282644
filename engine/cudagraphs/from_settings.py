"""The plan that settings ask for."""

import logging
from pathlib import Path

from engine.cudagraphs.baselines import Limits
from engine.cudagraphs.draft_lengths import Lengths, of_drafter
from engine.cudagraphs.memory_model import GraphMemory, of_model
from engine.cudagraphs.planner import BudgetTooSmall, Plan, plan
from engine.cudagraphs.shape_trace import Trace, read_trace
from engine.errors import StartFailed
from engine.settings import EngineSettings, GraphsSettings, SpeculationSettings

log = logging.getLogger(__name__)


def limits_of(
    engine: EngineSettings, graphs: GraphsSettings, speculation: SpeculationSettings
) -> Limits:
    return Limits(
        lengths=_lengths(graphs, speculation),
        max_sequences=engine.max_sequences,
        max_batched_tokens=engine.max_batched_tokens,
    )


def _lengths(graphs: GraphsSettings, speculation: SpeculationSettings) -> Lengths:
    """Of what `siblings` drafts no row is as long as another: no graph has its length."""
    if graphs.lengths is not None:
        return Lengths.parse(graphs.lengths)
    drafts = speculation.mode == "drafter"
    return of_drafter(speculation.longest_draft) if drafts else Lengths.parse("0")


def memory_of(engine: EngineSettings, graphs: GraphsSettings, model: Path) -> GraphMemory:
    """`model`: a directory with the model's config.json."""
    try:
        return of_model(
            model,
            ranks=engine.tensor_parallel_size,
            dtype=engine.dtype,
            graph_bytes=graphs.graph_bytes,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StartFailed(
            f"{model}/config.json does not say what a graph takes: {error!r}"
        ) from error


def trace_of(graphs: GraphsSettings) -> Trace | None:
    try:
        return read_trace(graphs.trace) if graphs.trace else None
    except ValueError as error:
        raise StartFailed(f"graphs.trace: {error}") from error


def planned(
    engine: EngineSettings, graphs: GraphsSettings, speculation: SpeculationSettings, model: Path
) -> Plan:
    """StartFailed says why there is none."""
    try:
        return plan(
            limits_of(engine, graphs, speculation),
            memory_of(engine, graphs, model),
            budget_bytes=graphs.budget_bytes,
            mixed_tokens=graphs.mixed_tokens,
            trace=trace_of(graphs),
        )
    except BudgetTooSmall as error:
        raise StartFailed(f"graphs.budget_bytes: {error}") from error


def plan_for_start(
    engine: EngineSettings,
    graphs: GraphsSettings,
    speculation: SpeculationSettings,
    model: Path,
    *,
    on_cpu: bool,
) -> Plan | None:
    """None: vLLM captures what it does by itself."""
    if graphs.budget_bytes is None:
        return None
    if engine.eager or on_cpu:
        log.warning("graphs.budget_bytes has no effect: no CUDA graphs on CPU, nor when eager")
        return None
    return planned(engine, graphs, speculation, model)
