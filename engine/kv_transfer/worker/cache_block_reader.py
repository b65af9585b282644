"""Copies from cache blocks to the arena: synchronous on CPU, asynchronous on GPU.

`copy` either raises, or calls `on_done` exactly once, with None or the failure, when the bytes have
been written or never will be. No block is read after `copy` has returned and the work it queued on
the current stream has run, so the scheduler may reallocate the blocks.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from engine.kv_transfer.worker.copy_thread import CopyThread, OnDone
from kernels.kv_layout import PackOrder, gather, unpack


class BlockReader(Protocol):
    def copy(self, block_ids: Sequence[int], out: torch.Tensor, on_done: OnDone) -> None: ...

    def flush(self) -> None:
        """Return when `on_done` of every earlier `copy` has been called."""


class PackedBlockReader:
    """Reader of the packed cache of vLLM's CPU backend, on the calling thread."""

    def __init__(self, caches: Sequence[torch.Tensor], order: PackOrder) -> None:
        self._caches, self._order = caches, order

    def copy(self, block_ids: Sequence[int], out: torch.Tensor, on_done: OnDone) -> None:
        unpack(self._caches, block_ids, self._order, out)
        on_done(None)

    def flush(self) -> None:
        """No-op: copies are synchronous."""


class CudaBlockReader:
    """Reader of a GPU's cache. Not tested yet on a machine with a GPU.

    The blocks are gathered on the model's stream, in order, so they are read before a later step
    overwrites them. The gathered prompt is copied to pinned memory on a separate stream while the
    next steps run, and from there to the arena on a thread.
    """

    def __init__(self, caches: Sequence[torch.Tensor]) -> None:
        self._caches = caches
        self._stream: Any = torch.cuda.Stream(caches[0].device)  # type: ignore[no-untyped-call]
        self._copy_thread = CopyThread()

    def copy(self, block_ids: Sequence[int], out: torch.Tensor, on_done: OnDone) -> None:
        device = self._caches[0].device
        ids = torch.tensor(block_ids, pin_memory=True).to(device, non_blocking=True)
        gathered = torch.empty(out.shape, dtype=out.dtype, device=device)
        gather(self._caches, ids, gathered)
        staged = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            staged.copy_(gathered, non_blocking=True)
            gathered.record_stream(self._stream)
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._copy_thread.submit(staged, event, out, on_done)

    def flush(self) -> None:
        self._copy_thread.flush()
