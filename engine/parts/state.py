"""Base class of the vLLM engine's mixins: their common state."""

from dataclasses import replace

from vllm.v1.engine.async_llm import AsyncLLM

from engine.features import Features
from engine.launch.processes import VllmProcesses
from engine.runtime.heartbeat import Heartbeat
from engine.settings import EngineSettings
from engine.types.info import EngineHealth, EngineInfo


class VllmState:
    """`EngineState` of vLLM: processes, features and heartbeat."""

    _settings: EngineSettings
    _features: Features
    _heartbeat: Heartbeat
    _processes: VllmProcesses
    _info: EngineInfo | None = None

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "the engine has not started"
        return self._info

    @property
    def llm(self) -> AsyncLLM:
        """The AsyncLLM, for benchmarks and tests. The service does not use it."""
        return self._processes.llm

    def health(self) -> EngineHealth:
        return replace(self._heartbeat.health(), start_phase=self._processes.phases.current())
