"""Calls of EngineCore and the workers, without the processes that run them."""

from typing import Any, Protocol


class EngineCalls(Protocol):
    """Calls of methods of EngineCore and of its workers."""

    async def call_workers(self, method: str, *args: Any) -> list[Any]: ...

    async def call_cores(self, method: str, *args: Any) -> list[Any]: ...

    async def set_version(self, version: str) -> None: ...
