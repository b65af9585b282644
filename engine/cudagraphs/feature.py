"""Feature class of planned CUDA graphs: planning at start, status and counters."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from engine.cudagraphs import graph_candidates
from engine.cudagraphs.counters import (
    COUNTERS,
    Snapshot,
    aggregate_engines,
    aggregate_ranks,
)
from engine.cudagraphs.plan_from_environment import GRAPHS_ENV
from engine.cudagraphs.plan_from_settings import captures_graphs, plan_for_start, set_planned_graphs
from engine.cudagraphs.planner import Plan
from engine.cudagraphs.settings import GraphsSettings
from engine.errors import StartFailed
from engine.feature_base import EngineFeature, Ping, WorkerPart, feature_status
from engine.types.feature_stats import CudaGraphStats, FeatureStatus
from engine.types.info import EngineInfo

HOW: Final = "graphs.budget_bytes"


def coppice_reset_graph_counters(self: Any) -> Snapshot | None:
    """Reset the CUDA graph counters, after the warm-up steps."""
    COUNTERS.reset()
    return COUNTERS.read()


def _install() -> None:
    if not current_platform.is_cpu():
        graph_candidates.install()


class CudaGraphPlan(EngineFeature):
    """CUDA graphs that fit a budget."""

    name = "cuda_graph_plan"
    covers = {
        "cudagraph_capture_sizes": "graphs.budget_bytes",
        "max_cudagraph_capture_size": "graphs.budget_bytes",
    }
    worker = WorkerPart(
        install=_install, methods=(coppice_reset_graph_counters,), counted=COUNTERS.read
    )
    stats: CudaGraphStats = CudaGraphStats()

    _plan: Plan | None = None

    @property
    def _is_planned(self) -> bool:
        return self.needs_batch_limits(on_cpu=current_platform.is_cpu())

    def needs_batch_limits(self, *, on_cpu: bool) -> bool:
        has_budget = self.settings.of(GraphsSettings).budget_bytes is not None
        return has_budget and captures_graphs(self.settings.engine, on_cpu=on_cpu)

    def set_arguments(self, arguments: AsyncEngineArgs, *, on_cpu: bool) -> None:
        """Make the plan, once speculation has set its longest draft."""
        limits = {
            "max_sequences": arguments.max_num_seqs,
            "max_batched_tokens": arguments.max_num_batched_tokens,
        }
        self._plan = plan_for_start(
            self.settings.engine.model_copy(update=limits),
            self.settings.of(GraphsSettings),
            (arguments.speculative_config or {}).get("num_speculative_tokens", 0),
            Path(arguments.model),
            on_cpu=on_cpu,
        )
        if self._plan is not None:
            set_planned_graphs(arguments, self._plan)

    def environment(self) -> Mapping[str, str]:
        return {GRAPHS_ENV: self._plan.to_json() if self._plan else ""}

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
