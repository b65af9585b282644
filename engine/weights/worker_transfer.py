"""Receipt of weights from a trainer's GPU memory in a worker (vLLM's weight transfer).

vLLM's engine would load each tensor into the model as it opens it. Here it opens all of them first,
with an object in place of the model that keeps them. So what cannot be opened, or has values that
are not finite, is refused before a weight changes, on all ranks. The tensors are then loaded as
those of files are (`engine.weights.worker_reload`).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from engine.errors import CheckpointRefused
from engine.weights.checkpoint import LM_HEAD, printable
from engine.weights.file_tensor import TORCH_DTYPES
from engine.weights.ipc_tensors import IpcHandle, IpcTensor

NO_ENGINE: Final = "vLLM has no weight transfer engine"
REPLACED_DEVICE: Final = 0
"""Index of the GPU in the trainer, which vLLM replaces by that of the rank's GPU."""


class ReceivedTensors(torch.nn.Module):
    """Target of vLLM's weight transfer engine that keeps the tensors which it opens."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.tensors |= dict(weights)


def obstacle(worker: Any) -> str | None:
    """Reason why the worker cannot receive weights, or None."""
    if worker.device.type != "cuda":
        return "CUDA IPC needs a GPU, and the engine runs on a CPU"
    return NO_ENGINE if worker.weight_transfer_engine is None else None


def receive(worker: Any, tensors: Sequence[IpcTensor]) -> dict[str, torch.Tensor]:
    """Open the tensors on the worker's device, sorted by name, and check their values.

    A head that the model ties to its embedding is left out, as of files.
    """
    worker.init_weight_transfer_engine({"packed": False})
    opened = ReceivedTensors()
    engine = worker.weight_transfer_engine
    engine.set_weight_update_target(opened, worker.model_config)
    try:
        engine.update_weights(update_info(tensors))
    finally:
        engine.reset_weight_update_target()
    check_values(opened.tensors, worker.model_config.dtype)
    if getattr(worker.model_config.hf_text_config, "tie_word_embeddings", False):
        opened.tensors.pop(LM_HEAD, None)
    return dict(sorted(opened.tensors.items()))


def update_info(tensors: Sequence[IpcTensor]) -> dict[str, Any]:
    """Fields of vLLM's IPCWeightTransferUpdateInfo."""
    return {
        "names": [tensor.name for tensor in tensors],
        "dtype_names": [str(TORCH_DTYPES[t.dtype]).removeprefix("torch.") for t in tensors],
        "shapes": [list(tensor.shape) for tensor in tensors],
        "ipc_handles": [
            {gpu: rebuild_arguments(tensor, handle) for gpu, handle in tensor.handles.items()}
            for tensor in tensors
        ],
    }


def rebuild_arguments(tensor: IpcTensor, handle: IpcHandle) -> tuple[Any, ...]:
    """Arguments of `torch.multiprocessing.reductions.rebuild_cuda_tensor`.

    The storage is the tensor's bytes only. No event is waited for: the trainer has synchronized its
    GPU before it sent the handles.
    """
    layout = torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype], device="meta")
    return (
        *(torch.Tensor, layout.shape, layout.stride(), 0, torch.storage.TypedStorage, layout.dtype),
        *(REPLACED_DEVICE, handle.handle, tensor.num_bytes, handle.offset, False),
        *(handle.ref_counter.encode(), handle.ref_counter_offset, b"", False),
    )


def check_values(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Raise CheckpointRefused unless all values are finite in `dtype`, the engine's.

    The device is synchronized once, and no copy of a tensor is made.
    """
    filled = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    if not filled:
        return
    largest = torch.stack([_largest_magnitude(tensor) for tensor in filled.values()])
    found = torch.stack([largest.isfinite(), largest.to(dtype).isfinite()]).tolist()
    for name, is_finite, fits in zip(filled, *found, strict=True):
        if not is_finite:
            raise CheckpointRefused(f"{printable(name)} contains NaN or infinity")
        if not fits:
            served = str(dtype).removeprefix("torch.")
            raise CheckpointRefused(
                f"{printable(name)} has values that overflow in {served}, the engine's dtype"
            )


def _largest_magnitude(tensor: torch.Tensor) -> torch.Tensor:
    """Largest magnitude in float32, which is exact; NaN if the tensor has one."""
    low, high = torch.aminmax(tensor)
    return torch.maximum(low.float().abs(), high.float().abs())
