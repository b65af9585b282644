"""Methods added to vLLM's workers to load and unload LoRA adapters, on all ranks or on none."""

from typing import Any

from vllm.lora.request import LoRARequest

from engine.runtime.feature_guard import Failure, attempt
from engine.weights.rank_agreement import ASLEEP, failed_ranks


def coppice_load_adapter(self: Any, name: str, number: int, path: str) -> str | None:
    """Load an adapter on every rank or on none. Returns None, or the reason of the failure."""
    if self.coppice_sleeping:
        return ASLEEP
    request = LoRARequest(name, number, path)
    loaded = attempt(self.model_runner.add_lora, request)
    if failed := failed_ranks(isinstance(loaded, Failure)):
        attempt(self.model_runner.remove_lora, number)
        return loaded.message if isinstance(loaded, Failure) else f"failed on ranks {failed}"
    return None


def coppice_unload_adapter(self: Any, number: int) -> bool:
    return not isinstance(attempt(self.model_runner.remove_lora, number), Failure)


METHODS = (coppice_load_adapter, coppice_unload_adapter)
