"""Export of a trainer's GPU tensors by CUDA IPC, for a server on the same host to load.

torch is imported only when weights are exported: a caller with torch tensors has already imported
it. The server copies the values into its model while the call runs. PyTorch counts the processes
that have a tensor open, so its memory is not reused before the server has closed it.
"""

import base64
from collections.abc import Iterable
from importlib import import_module
from typing import Any, Self, cast, get_args

from coppice.weights.tensor_serialization import StateDict, Tensor, tensors_of
from coppice.wire.cuda_ipc_weights import CUDA_MALLOC, IpcHandle, IpcTensor, TransferDtype


class GpuWeights:
    """Weights of this process's GPU, exported for a server on the same host.

    A trainer whose ranks use several GPUs exports the full weights on each of them, and one rank
    adds the `tensors` of the others. The tensors of the state dict must not change before
    `transfer_weights` returns.

    Args:
        state: torch tensors on GPUs by name, gathered if they are sharded.
    """

    def __init__(self, state: StateDict) -> None:
        tensors = tensors_of(state)
        self._memory = {one.name: _on_gpu(one.name, state[one.name]) for one in tensors}
        self._exports: list[tuple[bytes, int]] = []
        self._is_refused = self._is_lost = False
        try:
            self._tensors = [self._export(one) for one in tensors]
            for device in {tensor.device for tensor in self._memory.values()}:
                import_module("torch").cuda.synchronize(device)  # the server waits for no event
        except BaseException:
            self.mark_refused()
            self.close()
            raise

    @property
    def tensors(self) -> list[IpcTensor]:
        """Locations of the tensors; they can be pickled, to be sent to another rank."""
        return self._tensors

    def add(self, tensors: Iterable[IpcTensor]) -> None:
        """Adds the copies of the same weights on the GPU of another rank of the trainer.

        Raises ValueError if that rank has other tensors.
        """
        others = {tensor.name: tensor for tensor in tensors}
        if others.keys() != self._memory.keys():
            raise ValueError("the other rank has tensors of other names")
        self._tensors = [_merged(tensor, others[tensor.name]) for tensor in self._tensors]

    def mark_refused(self) -> None:
        """Marks the tensors as not open in a server, so that `close` releases their memory.

        PyTorch keeps the memory of exported tensors until another process has opened and closed
        them. `transfer_weights` calls it if the server answers with an error. Call it on the other
        ranks, whose tensors were added, too.
        """
        self._is_refused = True

    def mark_lost(self) -> None:
        """Marks the tensors as possibly open in a server; `close` leaves them to it."""
        self._is_lost = True

    def close(self) -> None:
        """Releases the memory that only this object refers to. Call it after the transfer.

        A server that still has a tensor open, as after TimedOut, keeps its memory.
        """
        if self._is_refused and not self._is_lost:
            self._release_exports()
        self._memory.clear()
        import_module("torch").cuda.ipc_collect()

    def _release_exports(self) -> None:
        """Decrements the counters of this rank's exports, as a process does that closes them.

        Counters that the server has decremented become negative, which PyTorch takes for zero.
        """
        storage: Any = import_module("torch").UntypedStorage
        for counter, offset in self._exports:
            storage._release_ipc_counter_cuda(counter, offset)
        self._exports.clear()

    def _export(self, tensor: Tensor) -> IpcTensor:
        memory = self._memory[tensor.name]
        reductions: Any = import_module("torch.multiprocessing.reductions")
        _, arguments = reductions.reduce_tensor(memory)
        handle, _, start, _, counter, counter_offset, *_ = arguments[7:]
        self._exports.append((counter, counter_offset))
        if handle[1:2] != CUDA_MALLOC:
            raise ValueError(
                f"{tensor.name} is in an expandable segment, which cannot be opened: remove "
                "expandable_segments from PYTORCH_CUDA_ALLOC_CONF, or use publish_weights"
            )
        gpu = str(import_module("torch").cuda.get_device_properties(memory.device).uuid)
        location = IpcHandle(
            handle=base64.b64encode(handle).decode(),
            offset=start + memory.storage_offset() * memory.element_size(),
            ref_counter=counter.decode(),
            ref_counter_offset=counter_offset,
        )
        dtype, shape = _dtype(tensor), list(tensor.shape)
        return IpcTensor(name=tensor.name, dtype=dtype, shape=shape, handles={gpu: location})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _on_gpu(name: str, tensor: Any) -> Any:
    """The tensor without gradient, contiguous; a copy unless it is contiguous already."""
    if getattr(getattr(tensor, "device", None), "type", "cpu") != "cuda":
        raise ValueError(f"{name} is not on a GPU: use publish_weights")
    return tensor.detach().contiguous()


def _dtype(tensor: Tensor) -> TransferDtype:
    if tensor.dtype not in get_args(TransferDtype):
        raise ValueError(f"{tensor.name} has dtype {tensor.dtype}, and not BF16, F16 or F32")
    return cast(TransferDtype, tensor.dtype)


def _merged(tensor: IpcTensor, other: IpcTensor) -> IpcTensor:
    if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
        raise ValueError(f"{tensor.name} has another dtype or shape on the other rank")
    return tensor.model_copy(update={"handles": {**tensor.handles, **other.handles}})
