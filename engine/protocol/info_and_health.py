"""Base protocol of an engine: its fixed properties (`info`) and its health, readable any time."""

from typing import Protocol

from engine.types.info import EngineHealth, EngineInfo


class EngineState(Protocol):
    """Properties of a started engine, and its health at any time."""

    @property
    def info(self) -> EngineInfo: ...

    def health(self) -> EngineHealth: ...
