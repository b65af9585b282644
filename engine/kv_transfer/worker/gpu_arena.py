"""GPU buffer of exported KV, read by other processes on the host over CUDA IPC.

Processes on the same host open it by CUDA IPC. The service allocates parts of it; offsets are the
same on every rank. A part has the rank's heads of a prompt, [L, 2, H, T, D], contiguous.
"""

import base64
from typing import Any

import torch
from torch.multiprocessing import reductions

from engine.types.kv import GpuIpc, GpuMemory


class GpuArena:
    """GPU memory for exported KV.

    It is allocated once, and other processes may have it mapped at any time, so it is never freed.
    """

    def __init__(self, num_bytes: int, device: torch.device, heads: range) -> None:
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._heads = heads
        self._ipc = ipc_of(self._memory)

    def part(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Bytes of a part. Raises ValueError if it exceeds the memory."""
        if offset < 0 or num_bytes <= 0 or offset + num_bytes > self._memory.numel():
            raise ValueError(f"{num_bytes} bytes at {offset} are outside the GPU memory")
        return self._memory[offset : offset + num_bytes]

    def info(self) -> GpuMemory:
        """Description of the memory for readers, once per rank."""
        properties = torch.cuda.get_device_properties(self._memory.device)
        return GpuMemory(
            gpu=str(properties.uuid),
            num_bytes=self._memory.numel(),
            first_head=self._heads.start,
            num_heads=len(self._heads),
            ipc=self._ipc,
        )


def ipc_of(memory: torch.Tensor) -> GpuIpc:
    """Arguments with which another process opens GPU memory, from PyTorch's serialization of it."""
    reduce: Any = reductions.reduce_tensor
    _, arguments = reduce(memory)
    handle, num_bytes, offset, _, counter, counter_offset, event, synchronize = arguments[7:]
    return GpuIpc(
        handle=base64.b64encode(handle).decode(),
        num_bytes=num_bytes,
        offset=offset,
        ref_counter=base64.b64encode(counter).decode(),
        ref_counter_offset=counter_offset,
        event=base64.b64encode(event or b"").decode(),
        event_sync_required=synchronize,
    )
