"""A worker that receives weights in shared memory on the CPU, in place of GPU memory.

vLLM's weight transfer engine `ipc` is replaced at vLLM's own interface, in its factory. A handle
has the path of the shared memory, in the place of CUDA's handle.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import (
    IPCWeightTransferEngine,
    IPCWeightTransferUpdateInfo,
)

from engine.weights.ipc_tensors import IpcHandle, IpcTensor
from tests.engine.faulty_worker import FaultyExtension

TRANSFER = "tests.engine.transfer_worker.TransferExtension"
DEVICES = ("cpu-0", "cpu-1")
"""In place of the UUIDs of the ranks' GPUs."""
ALIGNMENT = 64
CODES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


class SharedMemoryTransferEngine(IPCWeightTransferEngine):  # type: ignore[misc]
    """Opens the arguments of `rebuild_cuda_tensor` as shared memory on the CPU."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Without the synchronization of a GPU."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: IPCWeightTransferUpdateInfo) -> None:
        assert isinstance(update_info.ipc_handles, list)
        handles = zip(update_info.names, update_info.ipc_handles, strict=True)
        device = DEVICES[self.parallel_config.rank]
        self.model.load_weights([(name, _open(handle[device])) for name, handle in handles])


def _open(arguments: Sequence[Any]) -> torch.Tensor:
    _, size, stride, start, _, dtype, _, handle, num_bytes, offset, _, *_ = arguments
    path = handle[2:].rstrip(b"\0").decode()
    memory = np.memmap(path, np.uint8, "r", offset=0)[offset : offset + num_bytes]
    flat = torch.from_numpy(np.array(memory)).view(dtype)
    return flat.as_strided(size, stride, start)


class TransferExtension(FaultyExtension):
    """`coppice_fail_next` also makes loads of received tensors fail."""

    def coppice_transfer_obstacle(self) -> str | None:
        return None

    def coppice_load_received(self, received: dict[str, torch.Tensor]) -> int:
        return super().coppice_load_received(_Failing(received, self))


class _Failing(dict[str, torch.Tensor]):
    def __init__(self, received: dict[str, torch.Tensor], worker: TransferExtension) -> None:
        super().__init__(received)
        self._worker = worker

    def items(self) -> Any:
        return self._worker.coppice_failing(iter(list(super().items())))


@contextmanager
def shared(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[IpcTensor]]:
    """Tensors in one piece of shared memory, as a trainer would hand them over."""
    path = Path("/dev/shm") / f"coppice-test-{secrets.token_hex(8)}"
    handle = (b"\x02c" + str(path).encode()).ljust(66, b"\0")
    found, offset = [], 0
    try:
        with path.open("wb") as memory:
            for name, tensor in tensors.items():
                content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                memory.seek(offset)
                memory.write(content)
                found.append(_described(name, tensor, handle, offset))
                offset += -(-len(content) // ALIGNMENT) * ALIGNMENT
        yield found
    finally:
        path.unlink()


def _described(name: str, tensor: torch.Tensor, handle: bytes, offset: int) -> IpcTensor:
    location = IpcHandle(
        handle=handle, offset=offset, ref_counter="/torch_1_2_3", ref_counter_offset=0
    )
    return IpcTensor(
        name=name,
        dtype=CODES[tensor.dtype],
        shape=tuple(tensor.shape),
        handles=dict.fromkeys(DEVICES, location),
    )


def tensors_of(model: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(model / "model.safetensors")
    return tensors


WeightTransferEngineFactory._registry["ipc"] = lambda: SharedMemoryTransferEngine
