"""LoRA adapters as a feature of the engine: their loads, also after the weights were dropped."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from engine.adapters.loaded_adapters import LoadedAdapters
from engine.adapters.worker_methods import METHODS
from engine.errors import LoadFailed
from engine.feature_base import EngineFeature, StartSettings, WorkerPart, feature_status
from engine.types.feature_stats import FeatureStatus


class Adapters(EngineFeature):
    """Adapters that are loaded into the running engine."""

    name = "lora_adapters"
    worker = WorkerPart(methods=METHODS)

    def __init__(self, settings: StartSettings) -> None:
        super().__init__(settings)
        self.loaded = LoadedAdapters(settings.engine.max_adapters)
        self._are_dropped = False

    def info_fields(self) -> Mapping[str, Any]:
        num, rank = self._limits()
        return {"max_adapters": num, "max_adapter_rank": rank if num else 0}

    def status(self) -> Iterable[FeatureStatus]:
        num, rank = self._limits()
        reason = f"up to {num} adapters of rank {rank}" if num else "engine.max_adapters is 0"
        yield feature_status(self.name, num, reason, "engine.max_adapters")

    def _limits(self) -> tuple[int, int]:
        return self.settings.engine.max_adapters, self.settings.engine.max_adapter_rank

    async def load(self, label: str, path: Path) -> None:
        await self.loaded.load(self.engine, label, path)

    async def unload(self, label: str) -> None:
        await self.loaded.unload(self.engine, label)

    def on_sleep(self, *, drops_weights: bool) -> None:
        self._are_dropped = drops_weights

    async def on_wake(self) -> None:
        if self._are_dropped and not await self.loaded.reload(self.engine):
            raise LoadFailed("an adapter cannot be loaded again")
        self._are_dropped = False
