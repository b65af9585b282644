"""Engine implementation with vLLM's AsyncLLM: start, stop and kill, in the service's process."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import cast

from engine.errors import StartFailed
from engine.feature_base import StartSettings
from engine.features import Features
from engine.launch.arguments import WORKER_EXTENSION
from engine.launch.info import collect_info, eos_token_ids
from engine.launch.monitor import EngineMonitor
from engine.launch.processes import VllmProcesses, kill_processes
from engine.launch.ranks.data_parallel import check_settings
from engine.launch.ranks.digests import synchronize_machines
from engine.launch.ranks.multi_machine_setup import check_ray, check_serves
from engine.launch.vllm_argument_checks import check_vllm_args
from engine.openai_server.server import VllmOpenAIServer
from engine.parts.generation import VllmGeneration
from engine.parts.text import VllmText
from engine.parts.weights import VllmWeights
from engine.protocol.optional_features import FeatureKey, Interface, Stats
from engine.requests.chat_conversion import ChatProcessor
from engine.runtime.heartbeat import Heartbeat
from engine.runtime.leftover_files import remove_leftover_shared_memory
from engine.settings import EngineSettings
from engine.settings.base import Section


class VllmEngine(VllmGeneration, VllmText, VllmWeights):
    """The `engine.protocol.Engine` that runs vLLM. Use it from a single event loop.

    `sections` are those of the features in the configuration; None stands for the defaults.

    Raises StartFailed if vLLM does not accept an engine argument in the settings, or if settings
    exclude each other.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        worker_extension: str = WORKER_EXTENSION,
        **sections: Section | None,
    ) -> None:
        check_vllm_args(settings)
        check_settings(settings)
        check_ray(settings)
        check_serves(settings)
        self._settings = settings
        self._features = Features(StartSettings(engine=settings, **sections))
        self._features.check()
        self._heartbeat = Heartbeat(
            timeouts={
                "starting": settings.start_seconds,
                "serving": settings.step_seconds,
                "activating": settings.activation_seconds,
                "sleeping": settings.step_seconds,
            }
        )
        self._processes = VllmProcesses(settings, self._features, worker_extension=worker_extension)
        self._monitor_task: asyncio.Task[None] | None = None
        self._create_generation()

    def stats(self, kind: type[Stats]) -> Stats:
        return self._features.stats(kind)

    def feature(self, key: FeatureKey[Interface]) -> Interface | None:
        return cast(Interface | None, self._features.interface(key.name))

    async def start(self, version: str) -> None:
        try:
            async with self._processes.phases.logged():
                await self._start(version)
        except StartFailed as error:
            self._heartbeat.mark_dead(str(error))
            raise
        except Exception as error:  # any failure has to end the wait for readiness
            self._heartbeat.mark_dead(str(error))
            raise StartFailed(f"vLLM did not start: {error}") from error

    async def _start(self, version: str) -> None:
        remove_leftover_shared_memory()
        with self._processes.phases.phase("reading model files"):
            model = await self._open_weights(version)
            await asyncio.to_thread(self._features.open, model)
        await self._processes.start(model)
        await self._processes.verify_plugin()
        await synchronize_machines(self._processes, self._settings)
        await self._features.prepare(self._processes)
        self._chat = await asyncio.to_thread(
            ChatProcessor, self.llm, self._settings, eos_token_ids(self.llm)
        )
        self._openai_server = await asyncio.to_thread(
            VllmOpenAIServer, self.llm.vllm_config, self.llm.renderer, self._settings
        )
        variables = self._chat.template_variables
        info = collect_info(self.llm, self._settings, model, variables, self._features)
        with self._processes.phases.phase("warming up the sampler"):
            await self._generation.warm_up(info.eos_token_ids)
        await self._features.start(info)
        self._info = replace(info, features=self._features.status())
        await self._processes.set_version(version)
        self._heartbeat.set_stage("serving")
        monitor = EngineMonitor(self._heartbeat, self._processes, self._features.on_ping)
        self._monitor_task = asyncio.create_task(
            monitor.run(self._settings.hang_seconds, self._features.run), name="engine-monitor"
        )

    async def stop(self) -> None:
        self._heartbeat.set_stage("stopping")
        if self._monitor_task is not None:
            self._monitor_task.cancel()
            with suppress(asyncio.CancelledError):
                await self._monitor_task
        await self._processes.abort_start()
        await self._sampling_checks.close()
        await self._features.stop()
        await self._processes.stop()

    def kill(self) -> None:
        kill_processes()
