"""`coppice graphs plan`: the CUDA graphs that a start on a GPU would capture. It needs none."""

from engine.cudagraphs.frequency import demand
from engine.cudagraphs.from_settings import limits_of, memory_of, planned, trace_of
from engine.cudagraphs.report import compared, rendered
from engine.launch.model_files import locate_config
from service.config.settings import Settings


def render_graph_plan(settings: Settings) -> str:
    """StartFailed says why there is no plan."""
    engine, graphs, speculation = settings.engine, settings.graphs, settings.speculation
    model = locate_config(engine.model, engine.revision)
    plan, limits, trace = (
        planned(engine, graphs, speculation, model),
        limits_of(engine, graphs, speculation),
        trace_of(graphs),
    )
    frequencies = trace.counts() if trace else demand(limits, mixed_tokens=0, trace=None)
    return rendered(plan, compared(plan, limits, memory_of(engine, graphs, model), frequencies))
