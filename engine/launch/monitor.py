"""Watchdog in the service's process: kills a hanging engine."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from engine.errors import EngineDead
from engine.feature_base import Ping
from engine.launch.processes import VllmProcesses, engine_processes, kill_processes
from engine.runtime.heartbeat import Heartbeat

log = logging.getLogger(__name__)


class EngineMonitor:
    """Pings the engine, passes the answers to `on_ping`, and kills the engine if it hangs."""

    def __init__(
        self,
        heartbeat: Heartbeat,
        processes: VllmProcesses,
        on_ping: Callable[[Sequence[Ping]], None],
    ) -> None:
        self._heartbeat = heartbeat
        self._processes = processes
        self._on_ping = on_ping

    async def run(
        self, hang_seconds: float, other: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Run until cancelled, beside the other coroutine."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._run_heartbeat())
            tasks.create_task(self._kill_if_hung(hang_seconds))
            tasks.create_task(other())

    async def _run_heartbeat(self) -> None:
        try:
            await self._heartbeat.run(self._ping, engine_processes())
        except EngineDead as error:
            self._heartbeat.mark_dead(str(error))
        except Exception as error:  # without a heartbeat the engine counts as dead
            log.exception("the heartbeat failed")
            self._heartbeat.mark_dead(f"the heartbeat failed: {error}")

    async def _ping(self) -> None:
        self._on_ping(await self._processes.call_cores("coppice_ping"))

    async def _kill_if_hung(self, hang_seconds: float) -> None:
        """Kill an engine that hangs for too long, so that all pending calls fail."""
        await self._heartbeat.watch(hang_seconds)
        reason = self._heartbeat.health().reason
        log.error("the engine is killed: %s", reason)
        self._heartbeat.mark_dead(f"the engine hung: {reason}")
        kill_processes()
