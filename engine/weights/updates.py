"""Adapters that vLLM has loaded, and their names in vLLM.

vLLM caches prefixes by an adapter's name and path, and its weights by a number. Neither is ever
reused here, so a replaced adapter's KV is never matched. vLLM never holds more adapters than it has
slots for: it would evict one, and read it from disk again during a step.
"""

import logging
from pathlib import Path

from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from engine.errors import LoadFailed, RequestRefused
from engine.runtime.await_engine import await_engine

log = logging.getLogger(__name__)


class LoadedAdapters:
    """Loaded adapters by label. Only one caller may load or unload at a time."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._requests: dict[str, LoRARequest] = {}
        self._last_number = 0

    def request(self, label: str | None) -> LoRARequest | None:
        """The LoRARequest for samples under this adapter."""
        if label is None:
            return None
        if label not in self._requests:
            raise RequestRefused(f"there is no adapter {label!r}")
        return self._requests[label]

    def new_request(self, label: str, path: Path) -> LoRARequest:
        """A LoRARequest with an unused name and number."""
        self._last_number += 1
        return LoRARequest(f"{label}/{self._last_number}", self._last_number, str(path))

    async def load(self, llm: AsyncLLM, label: str, path: Path) -> None:
        assert label not in self._requests, f"{label} is loaded"
        assert len(self._requests) < self._capacity, "vLLM would throw another adapter out"
        request = self.new_request(label, path)
        lora_fields = (request.lora_name, request.lora_int_id, request.lora_path)
        load = llm.collective_rpc("coppice_load_adapter", args=lora_fields)
        reasons = [reason for reason in await await_engine(llm, load) if reason is not None]
        if reasons:
            log.warning("the adapter %s did not load: %s", label, reasons[0])
            raise LoadFailed("the engine could not load the adapter; the log says why")
        self._requests[label] = request

    async def unload(self, llm: AsyncLLM, label: str) -> None:
        """Unload an adapter. No sample may run under it."""
        held = self._requests.pop(label, None)
        if held is not None:
            await await_engine(
                llm, llm.collective_rpc("coppice_unload_adapter", args=(held.lora_int_id,))
            )
