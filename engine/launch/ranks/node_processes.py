"""Start and supervision of vLLM's ranks on the second and further machines of an engine.

vLLM's workers wait for calls without a limit, also after EngineCore's machine is gone. So a
connection to rank 0, at its port for torch.distributed, is held open and watched.
"""

import asyncio
import logging
import math
import socket
from typing import Final

from vllm.config import VllmConfig
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from engine.errors import StartFailed
from engine.feature_base import StartSettings
from engine.features import Features
from engine.launch.arguments import WORKER_EXTENSION
from engine.launch.model_files import resolve_served_model
from engine.launch.processes import VllmProcesses, kill_processes
from engine.launch.ranks.multi_machine_setup import check_ray
from engine.launch.vllm_argument_checks import check_vllm_args
from engine.runtime.leftover_files import remove_leftover_shared_memory
from engine.settings import EngineSettings
from engine.settings.base import Section
from engine.types.info import EngineHealth, EngineStage

log = logging.getLogger(__name__)
MAX_KEEPALIVE_PROBES: Final = 60


class _RankProcesses(VllmProcesses):
    """Worker processes of this machine, without AsyncLLM and EngineCore."""

    executor: MultiprocExecutor | None = None

    def _create(self, config: VllmConfig) -> None:
        self.executor = MultiprocExecutor(config)


class EngineNode:
    """The ranks of a machine other than the first, from their start to the end of the engine."""

    def __init__(
        self,
        settings: EngineSettings,
        *,
        worker_extension: str = WORKER_EXTENSION,
        **sections: Section,
    ) -> None:
        check_vllm_args(settings)
        check_ray(settings)
        self._settings = settings
        features = Features(StartSettings(engine=settings, **sections))
        features.check()
        self._processes = _RankProcesses(settings, features, worker_extension=worker_extension)
        self._stage: EngineStage = "starting"
        self._reason: str | None = None
        self._ended = asyncio.Event()

    def health(self) -> EngineHealth:
        alive = self._stage != "dead"
        return EngineHealth(
            stage=self._stage,
            alive=alive,
            age_seconds=0.0,
            reason=self._reason,
            start_phase=self._processes.phases.current(),
        )

    async def run(self) -> str:
        """Start the ranks and wait until the engine ends. Returns the reason.

        Raises StartFailed. If cancelled, call `stop`.
        """
        start_seconds = self._settings.start_seconds
        try:
            async with asyncio.timeout(start_seconds), self._processes.phases.logged():
                await self._start()
        except TimeoutError:
            raise StartFailed(
                f"the ranks did not start within {start_seconds:g} s (engine.start_seconds); they "
                "wait for machine 0"
            ) from None
        watch = asyncio.create_task(self._watch_first_node(), name="first-node-watch")
        try:
            await self._ended.wait()
        finally:
            watch.cancel()
        assert self._reason is not None, "set before the event"
        return self._reason

    async def _start(self) -> None:
        remove_leftover_shared_memory()
        model = await asyncio.to_thread(resolve_served_model, self._settings)
        try:
            await self._processes.start(model)
        except StartFailed:
            raise
        except Exception as error:  # vLLM raises Exception if a worker does not start
            raise StartFailed(f"vLLM did not start: {error}") from error
        executor = self._processes.executor
        assert executor is not None, "the start has created it"
        loop = asyncio.get_running_loop()
        executor.register_failure_callback(
            lambda: loop.call_soon_threadsafe(self._end, "a rank of this machine has ended")
        )
        self._stage = "serving"
        log.info(
            "ready: machine %d of %d runs its ranks",
            self._settings.node_rank,
            self._settings.nnodes,
        )

    def _end(self, reason: str) -> None:
        self._reason, self._stage = self._reason or reason, "dead"
        self._ended.set()

    async def _watch_first_node(self) -> None:
        settings = self._settings
        reason = await wait_for_end_of_connection(
            settings.master_addr,
            settings.master_port,
            silent_seconds=settings.step_seconds + settings.hang_seconds,
        )
        log.info("the connection to machine 0 has ended: %s", reason)
        self._end("machine 0 has ended, or cannot be reached")

    async def stop(self) -> None:
        """Kill the ranks and remove their files. Idempotent."""
        self._stage = "dead" if self._reason else "stopping"
        await self._processes.abort_start()
        if self._processes.executor is not None:
            self._processes.executor.failure_callback = None
        await asyncio.to_thread(kill_processes)
        await self._processes.stop()


async def wait_for_end_of_connection(host: str, port: int, *, silent_seconds: float) -> str:
    """Connect to a server and wait until it closes the connection. Returns the reason.

    Nothing is sent but TCP's keepalive probes, which end the connection after `silent_seconds`
    without an answer, as of a machine that is switched off.
    """
    try:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            _set_keepalive(writer.get_extra_info("socket"), silent_seconds)
            while await reader.read(4096):
                pass
        finally:
            writer.close()
    except OSError as error:
        return str(error)
    return "closed"


def _set_keepalive(connection: socket.socket, silent_seconds: float) -> None:
    interval = math.ceil(silent_seconds / MAX_KEEPALIVE_PROBES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, number in (
        (socket.TCP_KEEPIDLE, interval),
        (socket.TCP_KEEPINTVL, interval),
        (socket.TCP_KEEPCNT, max(1, math.floor(silent_seconds / interval))),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, number)
