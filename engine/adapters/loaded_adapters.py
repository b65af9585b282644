"""Registry of the LoRA adapters loaded in the running engine, in the service's process."""

import logging
from pathlib import Path

from vllm.lora.request import LoRARequest

from engine.errors import LoadFailed, RequestRefused
from engine.runtime.engine_protocols import EngineCalls
from engine.weights.updates import names_ranks_only

log = logging.getLogger(__name__)


class LoadedAdapters:
    """LoRA adapters loaded into vLLM, by label. Only one caller may load or unload at a time.

    vLLM caches prefixes by an adapter's name and path, and its weights by a number. Neither is ever
    reused here, so a replaced adapter's KV is never matched. vLLM never holds more adapters than it
    has slots for: it would evict one, and read it from disk again during a step.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._requests: dict[str, LoRARequest] = {}
        self._last_number = 0

    def request(self, label: str | None) -> LoRARequest | None:
        """The LoRARequest of a loaded adapter, or None for samples without an adapter."""
        if label is None:
            return None
        if label not in self._requests:
            raise RequestRefused(f"no adapter {label!r} is loaded")
        return self._requests[label]

    def new_request(self, label: str, path: Path) -> LoRARequest:
        """Create a LoRARequest with an unused name and number."""
        self._last_number += 1
        return LoRARequest(f"{label}/{self._last_number}", self._last_number, str(path))

    async def load(self, processes: EngineCalls, label: str, path: Path) -> None:
        assert label not in self._requests, f"{label} is loaded"
        assert len(self._requests) < self._capacity, "vLLM would evict another adapter"
        request = self.new_request(label, path)
        results = await processes.call_workers(
            "coppice_load_adapter", request.lora_name, request.lora_int_id, request.lora_path
        )
        reasons = sorted(filter(None, results), key=names_ranks_only)
        if reasons:
            log.warning("the adapter %s could not be loaded: %s", label, reasons[0])
            if len(reasons) < len(results):  # an engine has loaded it
                await processes.call_workers("coppice_unload_adapter", request.lora_int_id)
            raise LoadFailed(
                "the engine could not load the adapter; the server's log has the reason"
            )
        self._requests[label] = request

    async def reload(self, processes: EngineCalls) -> bool:
        """Load all adapters again, after the weights were dropped; returns False if one fails."""
        for request in self._requests.values():
            await processes.call_workers("coppice_unload_adapter", request.lora_int_id)
            results = await processes.call_workers(
                "coppice_load_adapter", request.lora_name, request.lora_int_id, request.lora_path
            )
            if any(reason is not None for reason in results):
                return False
        return True

    async def unload(self, processes: EngineCalls, label: str) -> None:
        """Unload an adapter that no running sample uses."""
        held = self._requests.pop(label, None)
        if held is not None:
            await processes.call_workers("coppice_unload_adapter", held.lora_int_id)
