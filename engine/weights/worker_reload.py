"""Layer-by-layer reload of weights into the running model, in a worker.

vLLM's layerwise reload buffers a layer's tensors, builds the layer in its kernels' format and
copies that into the existing storage. So CUDA graphs stay valid, and extra memory for one layer
suffices. This module adds two things: the head of a tied model on CPU, and a clean state after a
failed load.

Each rank reads only its part of the tensors, on a GPU into pinned memory, while earlier ones are
loaded.

Call it while the engine is paused. A forward pass over a half-loaded model kills the worker.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

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

from engine.weights.checkpoint import Checkpoint
from engine.weights.file_tensor import WeightsReader

_READERS: WeakKeyDictionary[torch.nn.Module, WeightsReader] = WeakKeyDictionary()


def open_tensors(
    worker: Any, checkpoint: Checkpoint, *, drafter: bool = False
) -> AbstractContextManager[Iterator[tuple[str, torch.Tensor]]]:
    """Context manager of a load: the checkpoint's tensors, of which `load` reads what it uses."""
    model = _model(worker, drafter)
    if model not in _READERS:
        pinned = worker.device.type == "cuda"
        reads_all = worker.parallel_config.world_size == 1
        _READERS[model] = WeightsReader(pinned=pinned, reads_all=reads_all)
    return _READERS[model].open(checkpoint)


def num_bytes_loaded(worker: Any, *, drafter: bool = False) -> int:
    """Number of bytes that the last load used."""
    return _READERS[_model(worker, drafter)].num_bytes


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
