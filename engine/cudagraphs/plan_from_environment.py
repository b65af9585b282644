"""CUDA graph plan read from an environment variable, in EngineCore and workers."""

import os

from engine.cudagraphs.planner import Plan

GRAPHS_ENV = "COPPICE_ENGINE_GRAPHS"


def graph_plan() -> Plan | None:
    """The engine's CUDA graph plan, if any, read from the environment in EngineCore or a worker."""
    text = os.environ.get(GRAPHS_ENV)
    return Plan.from_json(text) if text else None
