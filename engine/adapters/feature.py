"""Feature class of LoRA adapters: vLLM arguments, load, unload, and reload after sleep."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs

from engine.adapters.loaded_adapters import LoadedAdapters
from engine.adapters.worker_methods import METHODS
from engine.errors import LoadFailed
from engine.feature_base import EngineFeature, StartSettings, WorkerPart, feature_status
from engine.types.feature_stats import FeatureStatus
from engine.weights.validation import TARGET_MODULES


def lora_arguments(num: int, rank: int) -> dict[str, Any]:
    """vLLM's LoRA arguments. A step can use all loaded adapters, so vLLM never evicts any."""
    if not num:
        return {}
    return {
        "enable_lora": True,
        "max_loras": num,
        "max_cpu_loras": num,
        "max_lora_rank": rank,
        "lora_target_modules": sorted(TARGET_MODULES),
    }


class Adapters(EngineFeature):
    """Adapters that are loaded into the running engine."""

    name = "lora_adapters"
    covers = {
        "enable_lora": "engine.max_adapters",
        "max_loras": "engine.max_adapters",
        "max_cpu_loras": "engine.max_adapters",
        "max_lora_rank": "engine.max_adapter_rank",
    }
    worker = WorkerPart(methods=METHODS)

    def __init__(self, settings: StartSettings) -> None:
        super().__init__(settings)
        self.loaded = LoadedAdapters(settings.engine.max_adapters)
        self._are_dropped = False

    def set_arguments(self, arguments: AsyncEngineArgs, *, on_cpu: bool) -> None:
        for name, value in lora_arguments(*self._limits()).items():
            setattr(arguments, name, value)

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
