"""Monitors the running engine: pings it, keeps its counters, and kills it if it hangs."""

import asyncio
import logging

from engine.attention.counters import aggregate_ranks
from engine.cudagraphs.counters import aggregate_engines as graphs_of_engines
from engine.cudagraphs.counters import aggregate_ranks as aggregate_graph_ranks
from engine.drafter.service.drafter import Drafter
from engine.errors import EngineDead, StartFailed
from engine.feature_stats import (
    CudaGraphStats,
    KeptKvStats,
    KvRetentionStats,
    SharedPrefixStats,
    SpeculationStats,
    total,
)
from engine.launch.core_methods import Ping
from engine.launch.processes import VllmProcesses, engine_processes, kill_processes
from engine.runtime.heartbeat import Heartbeat
from engine.speculation.counters import to_speculation_stats

log = logging.getLogger(__name__)


class EngineMonitor:
    """Pings the engine, keeps the counters of the last ping, and kills the engine if it hangs."""

    def __init__(self, heartbeat: Heartbeat, processes: VllmProcesses) -> None:
        self._heartbeat = heartbeat
        self._processes = processes
        self._drafter: Drafter | None = None
        self.shared_prefix = SharedPrefixStats()
        self.speculation = SpeculationStats()
        self.graphs = CudaGraphStats()
        self.kept_kv = KeptKvStats()
        self.session_kv = KvRetentionStats()

    async def start_graph_counters(self) -> None:
        """Reset the counters of planned CUDA graphs after the warm-up steps."""
        if self._processes.graph_plan is None:
            return
        ranks = await self._processes.call_workers("coppice_reset_graph_counters")
        if None in ranks:
            raise StartFailed(
                "graphs.budget_bytes needs vLLM's second model runner, which is not used here; "
                "remove the setting"
            )
        self.graphs = aggregate_graph_ranks(ranks)

    async def run(self, hang_seconds: float, drafter: Drafter | None) -> None:
        self._drafter = drafter
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._run_heartbeat())
            tasks.create_task(self._kill_if_hung(hang_seconds))
            if drafter is not None:
                tasks.create_task(drafter.run())

    async def _run_heartbeat(self) -> None:
        try:
            await self._heartbeat.run(self._ping, engine_processes())
        except EngineDead as error:
            self._heartbeat.mark_dead(str(error))
        except Exception as error:  # without a heartbeat the engine counts as dead
            log.exception("the heartbeat failed")
            self._heartbeat.mark_dead(f"the heartbeat failed: {error}")

    async def _ping(self) -> None:
        pings = await self._processes.call_cores("coppice_ping")
        self._on_speculation(pings[0])
        self.shared_prefix = total([aggregate_ranks(ping["shared_prefix"]) for ping in pings])
        self.graphs = graphs_of_engines([aggregate_graph_ranks(ping["graphs"]) for ping in pings])
        self.kept_kv = total([KeptKvStats(**ping["kept_kv"]) for ping in pings])
        self.session_kv = total([KvRetentionStats(**(ping["session_kv"] or {})) for ping in pings])

    def _on_speculation(self, ping: Ping) -> None:
        """Counters of speculation, which only a single engine has."""
        drafter = ping["drafter"]
        self.speculation = to_speculation_stats(
            drafter["speculation"] if drafter else ping["speculation"][0]
        )
        if self._drafter is not None:
            self._drafter.on_ping(drafter, ping["num_running"])

    async def _kill_if_hung(self, hang_seconds: float) -> None:
        """Kill an engine that hangs for too long, so that all pending calls fail."""
        await self._heartbeat.watch(hang_seconds)
        reason = self._heartbeat.health().reason
        log.error("the engine is killed: %s", reason)
        self._heartbeat.mark_dead(f"the engine hung: {reason}")
        kill_processes()
