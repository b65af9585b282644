"""Model and adapter names of a request, as vLLM's serving classes look them up."""

from collections.abc import Iterator, Mapping
from typing import Any

from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.lora.request import LoRARequest

from engine.protocol.openai_server import ApiCall


class ServedModels:
    """The part of vLLM's OpenAIServingModels that its serving classes use, for one request."""

    def __init__(self, name: str, path: str, call: ApiCall) -> None:
        self.base_model_paths = [BaseModelPath(name=name, model_path=path)]
        self.lora_requests = _Adapters(call)
        self._call = call

    def is_base_model(self, name: str) -> bool:
        return self._call.serves(name)

    def model_name(self, lora_request: Any = None) -> str:
        return str(lora_request.lora_name if lora_request else self.base_model_paths[0].name)


class _Adapters(Mapping[str, LoRARequest]):
    """LoRA requests by the names of the service's adapters; it lists none."""

    def __init__(self, call: ApiCall) -> None:
        self._call = call

    def __getitem__(self, name: str) -> LoRARequest:
        if not self._call.has_adapter(name):
            raise KeyError(name)
        return LoRARequest(lora_name=name, lora_int_id=1, lora_path="-")

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._call.has_adapter(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0
