"""GPU version of the load copy: host memory to KV cache blocks, one kernel for all layers.

One kernel writes the blocks of all layers. It reads host memory over the bus, so that no GPU memory
is needed: the arena itself where the driver has registered it, else pinned buffers to which the
span is copied first. It runs on the model's stream. Another stream would gain nothing: the kernel
must follow the previous step, which may still use the blocks, and precede this one, which reads
them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

from engine.kv_transfer.worker.cuda_block_exporter import rows_by_group
from kernels.kv_gather_cuda import LayerCaches, Part
from kernels.kv_scatter_cuda import Rotation, scatter_part
from kernels.rope_shift import RotaryParams

PINNED_BYTES: Final = 2**24
NUM_PINNED_BUFFERS: Final = 4


@dataclass(slots=True, kw_only=True)
class PinnedBuffer:
    """Pinned host memory, the GPU's view of it, and the event after the kernel that reads it."""

    memory: torch.Tensor
    view: torch.Tensor
    read: Any


class PinnedRing:
    """Pinned buffers that are used in turn, allocated when they are first needed."""

    def __init__(self, num_bytes: int, num_buffers: int) -> None:
        self._num_bytes, self._num_buffers = num_bytes, num_buffers
        self._buffers: list[PinnedBuffer] = []

    def take(self) -> PinnedBuffer:
        """The next buffer, after the kernel that reads it has ended.

        Raises torch.OutOfMemoryError if there is no room for a single buffer.
        """
        if len(self._buffers) < self._num_buffers:
            try:
                self._buffers.append(self._create())
                return self._buffers[-1]
            except (RuntimeError, MemoryError) as error:  # of the driver, or of the system
                if not self._buffers:
                    raise torch.OutOfMemoryError(f"no pinned memory: {error}") from error
                self._num_buffers = len(self._buffers)
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        buffer.read.synchronize()
        return buffer

    def _create(self) -> PinnedBuffer:
        memory = torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=True)
        # A thread that waits for a blocking event sleeps instead of spinning.
        read: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        return PinnedBuffer(
            memory=memory, view=get_accelerator_view_from_cpu_tensor(memory), read=read
        )


class CudaBlockLoader:
    """Writes into the KV cache of a GPU, on the current stream."""

    def __init__(self, caches: Sequence[torch.Tensor], rotary: RotaryParams | None) -> None:
        self._caches, self._rotary = LayerCaches.of(caches), rotary
        self._dtype = caches[0].dtype
        self._ring = PinnedRing(PINNED_BYTES, NUM_PINNED_BUFFERS)
        self._written: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def warm_up(self) -> None:
        """Compile both variants of the kernel, so that the first load does not.

        Each writes the first vector of block 0, which no request uses, to itself.
        """
        ids = torch.zeros(1, dtype=torch.int64, device=self._caches.device)
        part = Part(first_row=0, end_row=1, first_token=0, end_token=1)
        address = self._caches.tensors[0].data_ptr()
        for rotation in (None, self._rotation(0)):
            scatter_part(address, (0, 0, 0), part, self._caches, ids, rotation)

    def write(
        self, span: torch.Tensor, shift: int, block_ids: Sequence[int], *, is_registered: bool
    ) -> None:
        device = self._caches.device
        ids = torch.tensor(block_ids, pin_memory=True).to(device, non_blocking=True)
        rotation = self._rotation(shift) if shift else None
        if is_registered:
            [whole] = self._caches.parts(span.shape[3], span.numel() * span.itemsize)
            address, strides = span.data_ptr(), span.stride()[:3]
            scatter_part(address, strides, whole, self._caches, ids, rotation)
        else:
            for part in self._caches.parts(span.shape[3], PINNED_BYTES):
                self._write_copy(span, part, ids, rotation)
        self._written.record()

    def flush(self) -> None:
        """Wait until the GPU has read all spans."""
        self._written.synchronize()

    def _rotation(self, shift: int) -> Rotation | None:
        if self._rotary is None:
            assert not shift, "keys that cannot be shifted are not spliced"
            return None
        return Rotation.of(self._rotary, shift, self._caches.device)

    def _write_copy(
        self, span: torch.Tensor, part: Part, ids: torch.Tensor, rotation: Rotation | None
    ) -> None:
        """Write a part of a span through pinned memory, where its rows are contiguous."""
        buffer, size = self._ring.take(), span.shape[4]
        row = part.num_tokens * size
        values = buffer.memory.view(self._dtype)[: part.num_rows * row]
        rows, end = values.view(part.num_rows, part.num_tokens, size), 0
        for some in rows_by_group(span.flatten(0, 1), part):
            rows[end : end + len(some)].copy_(some)
            end += len(some)
        address = buffer.view.data_ptr() - part.first_row * row * span.itemsize
        heads = span.shape[2]
        strides = (2 * heads * row, heads * row, row)
        scatter_part(address, strides, part, self._caches, ids, rotation)
        buffer.read.record()
