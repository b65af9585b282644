"""The planned CUDA graph pool as a feature of the engine."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from vllm.platforms import current_platform

from engine.cudagraphs.counters import (
    COUNTERS,
    Snapshot,
    aggregate_engines,
    aggregate_ranks,
)
from engine.cudagraphs.from_settings import captures_graphs
from engine.errors import StartFailed
from engine.feature_base import EngineFeature, Ping, WorkerPart, feature_status
from engine.types.feature_stats import CudaGraphStats, FeatureStatus
from engine.types.info import EngineInfo

HOW: Final = "graphs.budget_bytes"


def coppice_reset_graph_counters(self: Any) -> Snapshot | None:
    """Reset the CUDA graph counters, after the warm-up steps."""
    COUNTERS.reset()
    return COUNTERS.read()


class CudaGraphPlan(EngineFeature):
    """CUDA graphs that fit a budget."""

    name = "cuda_graph_plan"
    worker = WorkerPart(methods=(coppice_reset_graph_counters,), counted=COUNTERS.read)
    stats: CudaGraphStats = CudaGraphStats()

    @property
    def _is_planned(self) -> bool:
        has_budget = self.settings.graphs.budget_bytes is not None
        on_cpu = current_platform.is_cpu()
        return has_budget and captures_graphs(self.settings.engine, on_cpu=on_cpu)

    def status(self) -> Iterable[FeatureStatus]:
        if self._is_planned:
            yield feature_status(
                self.name, True, "the graphs captured fit graphs.budget_bytes", HOW
            )
        elif current_platform.is_cpu():
            yield feature_status(self.name, False, "there are no CUDA graphs on CPU")
        elif self.settings.engine.eager:
            yield feature_status(self.name, False, "engine.eager is true", "engine.eager: false")
        else:
            reason = "graphs.budget_bytes is none: vLLM captures its own sizes"
            yield feature_status(self.name, False, reason, HOW)

    async def start(self, info: EngineInfo) -> None:
        """Reset the counters after the warm-up steps."""
        if not self._is_planned:
            return
        ranks = await self.engine.call_workers("coppice_reset_graph_counters")
        if None in ranks:
            raise StartFailed(
                "graphs.budget_bytes needs vLLM's second model runner, which is not used here; "
                "remove the setting"
            )
        self.stats = aggregate_ranks(ranks)

    def on_ping(self, pings: Sequence[Ping]) -> None:
        engines = [aggregate_ranks(each["ranks"]) for each in self.counts(pings)]
        self.stats = aggregate_engines(engines)
