"""`coppice graphs plan`: the CUDA graphs that `serve` would capture on a GPU.

Planning itself needs no GPU.
"""

from engine.cudagraphs.from_settings import capture_limits, graph_memory, load_trace, make_plan
from engine.cudagraphs.planner import shape_weights
from engine.cudagraphs.report import compare, render
from engine.launch.model_files import resolve_model_config
from service.config.settings import Settings


def render_graph_plan(settings: Settings) -> str:
    """Report of the graph plan; raises StartFailed if there is none."""
    engine, graphs, speculation = settings.engine, settings.graphs, settings.speculation
    model = resolve_model_config(engine.model, engine.revision)
    plan, limits, trace = (
        make_plan(engine, graphs, speculation, model),
        capture_limits(engine, graphs, speculation),
        load_trace(graphs),
    )
    frequencies = trace.counts() if trace else shape_weights(limits, mixed_tokens=0, trace=None)
    return render(plan, compare(plan, limits, graph_memory(engine, graphs, model), frequencies))
