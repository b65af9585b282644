"""How blocks become bytes in the arena: at once on a CPU, behind the next steps on a GPU.

`copy` raises, or `on_done` is called exactly once, with None or with what went wrong, when the
bytes have been written or never will be. No block is read any more once `copy` has returned and
whatever it put on the current stream has run, so the scheduler may hand the blocks out again.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from engine.kv_transfer.worker.d2h_copy import CopyThread, OnDone
from kernels.kv_layout.packed_order import PackOrder
from kernels.kv_layout.unpack import gather, unpack


class BlockReader(Protocol):
    def copy(self, block_ids: Sequence[int], out: torch.Tensor, on_done: OnDone) -> None: ...

    def flush(self) -> None:
        """Returns when every `on_done` of an earlier `copy` has been called."""


class PackedBlockReader:
    """From the packed cache of vLLM's CPU backend, on the calling thread."""

    def __init__(self, caches: Sequence[torch.Tensor], order: PackOrder) -> None:
        self._caches, self._order = caches, order

    def copy(self, block_ids: Sequence[int], out: torch.Tensor, on_done: OnDone) -> None:
        unpack(self._caches, block_ids, self._order, out)
        on_done(None)

    def flush(self) -> None:
        """Nothing is ever under way."""


class CudaBlockReader:
    """From a GPU's cache. Never run yet: written for a machine that has one.

    The blocks are gathered on the stream that the model computes on, in its order: a block that a
    later step overwrites has been read. The gathered prompt, which nobody overwrites, goes to
    pinned memory on a stream of its own while the next steps compute, and from there to the arena
    on a thread.
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
