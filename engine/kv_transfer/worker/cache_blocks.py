"""Copies KV between a worker's cache blocks and CPU memory, for vLLM's CPU and GPU backends.

`BlockReader.copy` either raises, or calls `on_done` exactly once, with None or the failure, when
the bytes have been written or never will be. No block is read after `copy` has returned and the
work it queued on the current stream has run, so the scheduler may reallocate the blocks.

`BlockWriter.write` reads the span before it returns, so its slot may be reused. Work that runs
afterwards, or later on the current stream, finds the blocks filled.

Shape of a span: [L, 2, H, T, D] with L layers, H heads, T tokens, D head_dim.
"""

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from vllm import _custom_ops

from engine.kv_transfer.cache_layout import CacheLayout
from engine.runtime.feature_guard import Failure, attempt, describe
from kernels.kv_block_copy import (
    PackOrder,
    gather,
    index_digits,
    infer_order,
    pack,
    scatter,
    unpack,
)
from kernels.rope_shift import RotaryParams, shift_keys

OnDone = Callable[[Failure | None], None]
PendingCopy = tuple[torch.Tensor, Any, torch.Tensor, OnDone]
CHUNK_BYTES: Final = 2**26
"""KV that is copied between a GPU and host memory at a time, in whole layers."""
MAX_PENDING_BYTES: Final = 2**29
"""Exported KV that may wait on the GPU and in pinned memory for its transfer."""
NUM_PROBED_HEADS: Final = 2  # enough to verify that heads are packed alike


class CopyThread:
    """Thread for the last stage of an export from a GPU: the copy from pinned memory to the arena.

    The worker's own thread proceeds to the next step, while this one waits for the transfer without
    holding the GIL. Copies complete in the order of submission.
    """

    def __init__(self, max_pending_bytes: int = MAX_PENDING_BYTES) -> None:
        self._queue: queue.SimpleQueue[PendingCopy] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._max_pending_bytes = max_pending_bytes
        self._num_pending = self._pending_bytes = 0
        threading.Thread(target=self._run, daemon=True, name="prompt-kv").start()

    def wait_for_room(self, num_bytes: int) -> None:
        """Wait until a copy of this size fits beside the pending ones, or none is pending."""
        most = self._max_pending_bytes - num_bytes
        with self._changed:
            self._changed.wait_for(lambda: not self._num_pending or self._pending_bytes <= most)

    def submit(self, staged: torch.Tensor, event: Any, out: torch.Tensor, on_done: OnDone) -> None:
        """Queue a copy to the arena, which the thread makes after a CUDA event.

        It copies `staged` to `out` once `event.synchronize()` returns, then calls `on_done` once.
        """
        with self._changed:
            self._num_pending += 1
            self._pending_bytes += out.nbytes
        self._queue.put((staged, event, out, on_done))

    def flush(self) -> None:
        """Wait until `on_done` of every submitted copy has been called."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_pending == 0)

    def _run(self) -> None:
        while True:
            num_bytes = _finish_copy(
                *self._queue.get()
            )  # keeps no view of the arena while it waits
            with self._changed:
                self._num_pending -= 1
                self._pending_bytes -= num_bytes
                self._changed.notify_all()


def _finish_copy(staged: torch.Tensor, event: Any, out: torch.Tensor, on_done: OnDone) -> int:
    on_done(attempt(_copy, staged, event, out))
    return out.nbytes


def _copy(staged: torch.Tensor, event: Any, out: torch.Tensor) -> None:
    event.synchronize()
    out.copy_(staged)


class BlockReader(Protocol):
    def copy(self, block_ids: Sequence[int], out: torch.Tensor, on_done: OnDone) -> None: ...

    def flush(self) -> None:
        """Wait until `on_done` of every earlier `copy` has been called."""


class PackedBlockReader:
    """Reads the packed KV cache of vLLM's CPU backend, on the calling thread."""

    def __init__(self, caches: Sequence[torch.Tensor], order: PackOrder) -> None:
        self._caches, self._order = caches, order

    def copy(self, block_ids: Sequence[int], out: torch.Tensor, on_done: OnDone) -> None:
        unpack(self._caches, block_ids, self._order, out)
        on_done(None)

    def flush(self) -> None:
        """No-op: copies are synchronous."""


def layer_chunks(span: torch.Tensor, max_bytes: int) -> list[slice]:
    """Ranges of a span's layers, each of about `max_bytes` or a single layer."""
    layers_per_chunk = max(1, max_bytes // span[0].nbytes)
    return [slice(at, at + layers_per_chunk) for at in range(0, len(span), layers_per_chunk)]


class ChunkedCopy:
    """Outcome of a copy in several chunks, reported once after the last chunk.

    The first failure counts. Chunks may end in several threads.
    """

    def __init__(self, num_chunks: int, on_done: OnDone) -> None:
        self._remaining, self._on_done = num_chunks, on_done
        self._failure: Failure | None = None
        self._lock = threading.Lock()

    def finish(self, failure: Failure | None, num_chunks: int = 1) -> None:
        with self._lock:
            self._failure = self._failure or failure
            self._remaining -= num_chunks
            is_done = self._remaining == 0
        if is_done:
            self._on_done(self._failure)


class CudaBlockReader:
    """Reads the KV cache of a GPU. Not tested yet on a machine with a GPU.

    The blocks are gathered on the model's stream, in order, so they are read before a later step
    overwrites them. The gathered layers are copied to pinned memory on a separate stream while the
    next steps run, and from there to the arena on a thread. Memory for more than MAX_PENDING_BYTES
    is not taken: the worker then waits for earlier transfers. If the GPU has no room even so, this
    export fails, and no other.
    """

    def __init__(
        self, caches: Sequence[torch.Tensor], copy_thread: CopyThread | None = None
    ) -> None:
        self._caches = caches
        self._stream: Any = torch.cuda.Stream(caches[0].device)  # type: ignore[no-untyped-call]
        self._copy_thread = copy_thread or CopyThread()

    def copy(self, block_ids: Sequence[int], out: torch.Tensor, on_done: OnDone) -> None:
        ids = torch.tensor(block_ids, pin_memory=True).to(self._caches[0].device, non_blocking=True)
        chunks = layer_chunks(out, CHUNK_BYTES)
        outcome = ChunkedCopy(len(chunks), on_done)
        for number, layers in enumerate(chunks):
            self._copy_thread.wait_for_room(out[layers].nbytes)
            try:
                staged, event = self._stage(ids, self._caches[layers], out[layers])
            except torch.OutOfMemoryError as error:
                outcome.finish(Failure(describe(error)), len(chunks) - number)
                return
            self._copy_thread.submit(staged, event, out[layers], outcome.finish)

    def _stage(
        self, ids: torch.Tensor, caches: Sequence[torch.Tensor], out: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        """Queue the transfer of some layers to pinned memory; returns this memory and an event."""
        device = ids.device
        gathered = torch.empty(out.shape, dtype=out.dtype, device=device)
        gather(caches, ids, gathered)
        staged = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            staged.copy_(gathered, non_blocking=True)
            gathered.record_stream(self._stream)
            # A blocking event lets the thread that waits for it sleep.
            event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record()
        return staged, event

    def flush(self) -> None:
        self._copy_thread.flush()


class BlockWriter(Protocol):
    def write(self, span: torch.Tensor, shift: int, block_ids: Sequence[int]) -> None:
        """Write a span to blocks, with its keys shifted by `shift` positions."""


class PackedBlockWriter:
    """Writes into the packed KV cache of vLLM's CPU backend, on the calling thread."""

    def __init__(
        self, caches: Sequence[torch.Tensor], order: PackOrder, rotary: RotaryParams | None
    ) -> None:
        self._caches, self._order, self._rotary = caches, order, rotary

    def write(self, span: torch.Tensor, shift: int, block_ids: Sequence[int]) -> None:
        values = span
        if shift:
            assert self._rotary is not None, "keys that cannot be shifted are not spliced"
            values = torch.empty(span.shape, dtype=span.dtype)
            values[:, 0] = shift_keys(span[:, 0], shift, self._rotary)
            values[:, 1] = span[:, 1]
        pack(values, self._caches, block_ids, self._order)


class CudaBlockWriter:
    """Writes into the KV cache of a GPU. Not tested yet on a machine with a GPU.

    The span is copied to pinned memory, some layers at a time. The copies to the device, the key
    shifts and the scatters are queued on the model's stream, in order.
    """

    def __init__(self, caches: Sequence[torch.Tensor], rotary: RotaryParams | None) -> None:
        self._caches, self._rotary = caches, rotary

    def write(self, span: torch.Tensor, shift: int, block_ids: Sequence[int]) -> None:
        ids = torch.tensor(block_ids, pin_memory=True).to(self._caches[0].device, non_blocking=True)
        for layers in layer_chunks(span, CHUNK_BYTES):
            self._write_layers(span[layers], shift, self._caches[layers], ids)

    def _write_layers(
        self, span: torch.Tensor, shift: int, caches: Sequence[torch.Tensor], ids: torch.Tensor
    ) -> None:
        from kernels.rope_shift_cuda import shift_keys_

        staged = torch.empty(span.shape, dtype=span.dtype, pin_memory=True).copy_(span)
        values = staged.to(ids.device, non_blocking=True)
        if shift:
            assert self._rotary is not None, "keys that cannot be shifted are not spliced"
            keys = values[:, 0].contiguous()
            shift_keys_(keys, shift, self._rotary)
            values[:, 0] = keys
        scatter(values, caches, ids)


def packed_order(
    caches: Sequence[torch.Tensor], layout: CacheLayout, attention_layers: Mapping[str, Any]
) -> PackOrder:
    """Order in which the model's cache on CPU stores the elements of a block.

    Call it once vLLM has chosen the attention kernels.
    """
    isa = attention_layers[layout.layers[0]].isa
    return derive_order(caches[0].shape[2], layout.head_dim, layout.dtype, isa)


def derive_order(block: int, head_dim: int, dtype: torch.dtype, isa: str) -> PackOrder:
    """Measure, with vLLM's cache-write operation, the order in which a block's elements are stored.

    The order depends on `isa`, the instruction set of the attention kernel.

    Keys and values are distinguished by writing one of them at a time. Raises UnknownPacking if
    packing is not a permutation.
    """
    digits = index_digits(block * head_dim, dtype)
    zeros = torch.zeros(block, NUM_PROBED_HEADS, head_dim, dtype=dtype, device="cpu")
    written = []
    for digit in digits:
        vectors = digit.view(block, 1, head_dim).expand(-1, NUM_PROBED_HEADS, -1).contiguous()
        keys = write_block(vectors, zeros, isa)
        values = write_block(zeros, vectors, isa)
        written.append((keys[:, : keys.shape[1] // 2], values[:, values.shape[1] // 2 :]))
    return PackOrder(
        keys=infer_order([keys for keys, _ in written]),
        values=infer_order([values for _, values in written]),
    )


def write_block(keys: torch.Tensor, values: torch.Tensor, isa: str) -> torch.Tensor:
    """Pack a block of keys and values [N, H, D] as vLLM does; returns [H, 2 * N * D]."""
    block, heads, head_dim = keys.shape
    cache = torch.zeros(1, heads, 2 * block, head_dim, dtype=keys.dtype, device="cpu")
    halves: Any = cache.chunk(2, dim=2)
    _custom_ops.cpu_attn_reshape_and_cache(
        keys,
        values,
        *halves,
        torch.arange(block),
        isa,
        k_scale=1.0,
        v_scale=1.0,
        kv_cache_dtype="auto",
    )
    return cache.view(heads, -1)
