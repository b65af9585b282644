"""Put a checkpoint's values into the running model, in a worker, layer by layer.

vLLM's layerwise reload buffers a layer's tensors, builds the layer in the format of its kernels and
copies that into the storage that is already there, so CUDA graphs stay valid and one layer's
memory is enough. Two things are left to us: the head of a tied model on CPU, and a clean state
after a load that broke off.

Call it with the engine paused. A forward over a half-loaded model kills the worker.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
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
from engine.weights.tensor_file import StoredTensor, read_into

TORCH_DTYPES: Final = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def read_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in host memory, one at a time, those of a layer next to each other."""
    for name, stored in sorted(checkpoint.tensors.items()):
        yield name, _read_tensor(stored)


def _read_tensor(stored: StoredTensor) -> torch.Tensor:
    flat = torch.empty(stored.num_bytes, dtype=torch.uint8, device="cpu")
    read_into(stored, flat.numpy().data)
    return flat.view(TORCH_DTYPES[stored.dtype]).reshape(stored.shape)


def load(
    worker: Any, tensors: Iterable[tuple[str, torch.Tensor]], *, drafter: bool = False
) -> None:
    """Load every tensor of the model, or of the small one that drafts for it. After an exception
    only `reset` and another load help."""
    model = _model(worker, drafter)
    config = worker.model_config
    if drafter:
        config = worker.vllm_config.speculative_config.draft_model_config
    tied = _tied_modules(model)
    with torch.device(worker.device), torch.inference_mode(False), torch.no_grad():
        initialize_layerwise_reload(model)
        _cancel_reload(tied)
        model.load_weights(tensors)
        finalize_layerwise_reload(model, config)
        _repack_tied_heads(tied)
    worker.synchronize_device()


def reset(worker: Any, *, drafter: bool = False) -> None:
    """Make a load that broke off as if it had not begun, but for the values it wrote."""
    _cancel_reload(_model(worker, drafter).modules())
    LOADING_LAYERS.clear()


def _model(worker: Any, drafter: bool) -> Any:
    runner = worker.model_runner
    return runner.drafter.model if drafter else runner.get_model()


def _cancel_reload(layers: Iterable[torch.nn.Module]) -> None:
    """Take layers out of the reload in progress, with the tensors they had before it.

    A layer that is left buffering counts as begun: the next reload skips it, and fails.
    """
    for layer in layers:
        info = get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()


def _tied_modules(model: torch.nn.Module) -> list[Any]:
    """Modules whose weight belongs to an earlier module: the head of a tied model.

    No tensor of a checkpoint is theirs; the shared storage is updated through its owner.
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
    """On CPU such a head computes with a packed copy of the weight, which is stale now."""
    for module in tied:
        if hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
