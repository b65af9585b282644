"""Protocols for method calls on EngineCore and its workers, and base class of sleep callbacks."""

from typing import TYPE_CHECKING, Any, Protocol

from engine.runtime.start_phases import StartPhases

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class EngineCalls(Protocol):
    """Calls of methods of EngineCore and of its workers."""

    async def call_workers(self, method: str, *args: Any) -> list[Any]: ...

    async def call_cores(self, method: str, *args: Any) -> list[Any]: ...

    async def set_version(self, version: str) -> None: ...


class RunningEngine(EngineCalls, Protocol):
    """Engine whose processes answer, seen from the service's process."""

    @property
    def llm(self) -> "AsyncLLM": ...

    @property
    def phases(self) -> StartPhases: ...


class SleepListener:
    """Receiver of releases of the engine's memory, which it ignores.

    on_sleep: memory is released next, with the weights if `drops_weights`.
    on_wake: all memory is allocated, and the weights are loaded. LoadFailed ends the engine.
    """

    def on_sleep(self, *, drops_weights: bool) -> None:
        return

    async def on_wake(self) -> None:
        return
