"""Patch of vLLM's KV cache sizing on a GPU: memory is left for weights updates.

vllm/v1/worker/gpu_worker.py in 0.32.0: `determine_available_memory` gives all memory up to
`gpu_memory_utilization` to the KV cache. A weights update builds each layer anew, beside the layer
in use, before it copies it into place. Without memory for that, the update fails, and the previous
weights cannot be restored either. So the size of the largest layer is left out of the KV cache.
"""

import functools
from collections.abc import Iterable
from typing import Any


def reload_bytes(layer: Any) -> int:
    """Bytes of memory that a layer needs during its reload, beside those that it occupies.

    A layer is built in the format of the checkpoint. If its kernels use another one, the converted
    copy exists at the same time.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    loaded = [
        tensor for kind in get_layerwise_info(layer).restore_metadata for tensor in kind.values()
    ]
    in_use = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
    is_converted = hasattr(layer, "moe_config") or _formats(loaded) != _formats(in_use)
    return _num_bytes(loaded) + (_num_bytes(in_use) if is_converted else 0)


def _formats(tensors: Iterable[Any]) -> list[tuple[Any, ...]]:
    return sorted((str(tensor.dtype), *tensor.shape) for tensor in tensors)


def _num_bytes(tensors: Iterable[Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def largest_reload_bytes(runner: Any) -> int:
    """The most memory that a layer of the model, or of its draft model, needs during a reload."""
    draft = getattr(runner, "get_draft_model", lambda: None)()
    models = [model for model in (runner.get_model(), draft) if model is not None]
    return max(reload_bytes(layer) for model in models for layer in model.modules())


@functools.cache
def install() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    upstream = Worker.determine_available_memory

    @functools.wraps(upstream)
    def determine_available_memory(self: Any) -> int:
        available = int(upstream(self))
        if self.cache_config.kv_cache_memory_bytes:
            return available
        return available - largest_reload_bytes(self.model_runner)

    Worker.determine_available_memory = determine_available_memory
