"""Layer-by-layer reload of a checkpoint into the running model, in a worker.

vLLM's layerwise reload buffers a layer's tensors, builds the layer in its kernels' format and
copies that into the existing storage. So CUDA graphs stay valid, and extra memory for one layer
suffices. This module adds two things: the head of a tied model on CPU, and a clean state after a
failed load.

On a GPU, tensors are read into pinned memory, each while the previous one is loaded.

Call it while the engine is paused. A forward pass over a half-loaded model kills the worker.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    LOADING_LAYERS,
    _place_kernel_tensors,
    get_layerwise_info,
)

from engine.weights.checkpoint import Checkpoint, StoredTensor, read_into

TORCH_DTYPES: Final = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def read_tensors(
    checkpoint: Checkpoint, *, pinned: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a checkpoint's tensors in host memory, those of a layer adjacent.

    The next tensor is read while the caller uses the current one. vLLM refers to the tensors of a
    layer until the layer is complete, so each has memory of its own; PyTorch reuses pinned memory.
    """
    tensors = sorted(checkpoint.tensors.items())
    with ThreadPoolExecutor(1, "read-weights") as reader:
        following = None
        for number, (name, stored) in enumerate(tensors):
            current = following or reader.submit(_read_tensor, stored, pinned)
            following = None
            if number + 1 < len(tensors):
                following = reader.submit(_read_tensor, tensors[number + 1][1], pinned)
            yield name, current.result()


def _read_tensor(stored: StoredTensor, pinned: bool) -> torch.Tensor:
    # Explicitly on the CPU: `load` makes the GPU the default device.
    flat = torch.empty(stored.num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    read_into(stored, flat.numpy().data)
    return flat.view(TORCH_DTYPES[stored.dtype]).reshape(stored.shape)


class NotReloadable(Exception):
    """vLLM's loader of this model left a layer as it was."""


def load(
    worker: Any,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    drafter: bool = False,
    requires_all: bool = True,
) -> None:
    """Load all tensors into the model, or into its draft model.

    After an exception, call `reset` and load again. `requires_all`: raise NotReloadable if a layer
    with parameters received none.
    """
    model = _model(worker, drafter)
    config = worker.model_config
    if drafter:
        config = worker.vllm_config.speculative_config.draft_model_config
    tied = _tied_modules(model)
    # Some layers read vLLM's current configuration when they convert their weights.
    with (
        set_current_vllm_config(worker.vllm_config),
        torch.device(worker.device),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        initialize_layerwise_reload(model)
        _cancel_reload(tied)
        model.load_weights(tensors)
        if requires_all and (layers := _layers_not_loaded(model)):
            raise NotReloadable(f"vLLM cannot load new weights into {layers[0]} of this model")
        finalize_layerwise_reload(model, config)
        _repack_tied_heads(tied)
    worker.synchronize_device()


def reset(worker: Any, *, drafter: bool = False) -> None:
    """Discard vLLM's reload state after a failed load. Values already written stay."""
    _cancel_reload(_model(worker, drafter).modules())
    LOADING_LAYERS.clear()


def _model(worker: Any, drafter: bool) -> Any:
    runner = worker.model_runner
    return runner.get_draft_model() if drafter else runner.get_model()


def _layers_not_loaded(model: torch.nn.Module) -> list[str]:
    """Names of the layers whose parameters received no tensor.

    Some models write to parameters without their weight loader. During a reload these are on the
    meta device, so that the values are lost without an error.
    """
    return [name for name, layer in model.named_modules() if _is_not_loaded(layer)]


def _is_not_loaded(layer: torch.nn.Module) -> bool:
    info = get_layerwise_info(layer)
    has_parameters = info.kernel_tensors is not None and bool(info.kernel_tensors[0])
    is_waiting = info.can_load() and info.load_numel == 0
    return has_parameters and is_waiting and not is_deferred_attention_layer(layer)


def _cancel_reload(layers: Iterable[torch.nn.Module]) -> None:
    """Remove layers from the reload in progress and restore their previous tensors.

    A layer that is still buffering counts as started: the next reload would skip it and fail.
    """
    for layer in layers:
        info = get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()


def _tied_modules(model: torch.nn.Module) -> list[Any]:
    """Modules that share the weight of an earlier module, such as the head of a tied model.

    A checkpoint has no tensors for them; the shared storage is updated through its owner.
    """
    owners: set[int] = set()
    tied: list[Any] = []
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None:
            if id(weight) in owners:
                tied.append(module)
            owners.add(id(weight))
    return tied


def _repack_tied_heads(tied: Iterable[Any]) -> None:
    """Rebuild the packed weight copies that tied heads use on CPU, stale after a load."""
    for module in tied:
        if hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
