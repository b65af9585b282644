"""Base protocol of an engine: fixed properties (`info`) and current health."""

from typing import Protocol

from engine.types.info import EngineHealth, EngineInfo


class EngineState(Protocol):
    """Properties of a started engine, and its health at any time."""

    @property
    def info(self) -> EngineInfo: ...

    def health(self) -> EngineHealth: ...
