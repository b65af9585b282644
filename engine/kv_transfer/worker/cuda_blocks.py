"""Copies KV between a GPU's cache blocks and the arena. See cache_blocks for the interface.

An export is gathered part by part, for all layers at once, into a ring of staging buffers on the
GPU, on the model's stream. A thread copies each part to the arena on a stream of its own, while the
next steps run. If the driver does not register the arena, parts are copied to pinned memory first.
"""

import mmap
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, ParamSpec, TypeVar

import torch

from engine.kv_transfer.worker.cache_blocks import CopyTarget, OnDone
from engine.kv_transfer.worker.gpu_arena import GpuArena
from engine.kv_transfer.worker.mapped_arena import HostMemoryRegistry
from engine.runtime.feature_guard import Failure, attempt
from kernels.kv_block_copy import scatter
from kernels.kv_gather_cuda import LayerCaches, Part, gather_part
from kernels.rope_shift import RotaryParams

P = ParamSpec("P")
T = TypeVar("T")
STAGING_BYTES: Final = 2**24
NUM_STAGING_BUFFERS: Final = 4
CHUNK_BYTES: Final = 2**26
"""KV that is copied from host memory to a GPU at a time, in whole layers."""
PORTABLE: Final = 1  # cudaHostRegisterPortable: registered for all threads and devices


class CudaHostMemory:
    """Registration of host memory with the CUDA driver.

    A refused call leaves an error in its thread that the thread's next kernel launch would raise.
    So it is called by the copy thread, which launches no kernel.
    """

    def register(self, address: int, num_bytes: int) -> None:
        result = _cudart().cudaHostRegister(address, num_bytes, PORTABLE)
        if result.value:
            raise RuntimeError(f"cudaHostRegister failed: {result}")

    def unregister(self, address: int) -> None:
        _cudart().cudaHostUnregister(address)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def registration_failure(registry: HostMemoryRegistry) -> str | None:
    """Reason why shared memory cannot be registered, tried with one page; None if it can be."""
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    try:
        registry.register(address, mmap.PAGESIZE)
    except RuntimeError as error:
        return str(error)
    registry.unregister(address)
    return None


class WorkThread:
    """Daemon thread that does work in the order of submission."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._num_pending = 0
        threading.Thread(target=self._run, daemon=True, name="prompt-kv").start()

    def submit(self, work: Callable[[], None]) -> None:
        with self._changed:
            self._num_pending += 1
        self._queue.put(work)

    def flush(self) -> None:
        """Wait until all submitted work is done."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_pending == 0)

    def _run(self) -> None:
        while True:
            attempt(self._queue.get())  # keeps no reference to the work while it waits
            with self._changed:
                self._num_pending -= 1
                self._changed.notify_all()


class StagingRing:
    """Staging buffers on a GPU, allocated when they are first needed."""

    def __init__(self, device: torch.device, num_bytes: int, num_buffers: int) -> None:
        self._device, self._num_bytes, self._num_missing = device, num_bytes, num_buffers
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        self._num_buffers = 0

    def take(self) -> torch.Tensor:
        """Take a free buffer, which may wait for the transfer of an earlier part.

        Raises torch.OutOfMemoryError if the GPU has no room for a single buffer.
        """
        if self._num_missing and self._free.empty():
            try:
                buffer = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)
            except torch.OutOfMemoryError:
                if not self._num_buffers:
                    raise
            else:
                self._num_missing, self._num_buffers = self._num_missing - 1, self._num_buffers + 1
                return buffer
        return self._free.get()

    def give_back(self, buffer: torch.Tensor) -> None:
        self._free.put(buffer)


class GpuParts:
    """Consecutive parts of GPU memory that are not reused when they have been copied."""

    def __init__(self, memory: torch.Tensor, sizes: Sequence[int]) -> None:
        self._parts = iter(memory.split(list(sizes)))  # type: ignore[no-untyped-call]

    def take(self) -> torch.Tensor:
        part: torch.Tensor = next(self._parts)
        return part

    def give_back(self, buffer: torch.Tensor) -> None:
        """No-op: the KV stays."""


class PartsCopied:
    """Outcome of a copy in several parts, reported once after the last part.

    `failure` is the first one, after which the other parts need not be copied. Parts may end in
    several threads.
    """

    def __init__(self, num_parts: int, on_done: OnDone) -> None:
        self._remaining, self._on_done = num_parts, on_done
        self.failure: Failure | None = None
        self._lock = threading.Lock()

    def finish(self, failure: Failure | None, num_parts: int = 1) -> None:
        with self._lock:
            self.failure = self.failure or failure
            self._remaining -= num_parts
            is_done = self._remaining == 0
        if is_done:
            self._on_done(self.failure)


class CudaBlockReader:
    """Reads the KV cache of a GPU.

    The blocks are gathered on the model's stream, in order, so they are read before a later step
    overwrites them. If all staging buffers are in use, the worker waits for an earlier transfer. If
    the GPU has no room for a staging buffer, this export fails, and no other. An export that stays
    on the GPU is gathered into its part of `gpu_arena` instead.
    """

    def __init__(self, caches: Sequence[torch.Tensor], gpu_arena: GpuArena | None = None) -> None:
        self._caches = LayerCaches.of(caches)
        self._gpu_arena = gpu_arena
        self._ring = StagingRing(self._caches.device, STAGING_BYTES, NUM_STAGING_BUFFERS)
        self._thread = WorkThread()
        self._stream: Any = torch.cuda.Stream(self._caches.device)  # type: ignore[no-untyped-call]
        self._pinned: torch.Tensor | None = None

    def warm_up(self) -> None:
        """Compile the gather, so that the first export does not."""
        ids = torch.zeros(1, dtype=torch.int64, device=self._caches.device)
        part = Part(first_row=0, end_row=1, first_token=0, end_token=1)
        buffer = torch.empty(
            self._caches.vector_bytes, dtype=torch.uint8, device=self._caches.device
        )
        gather_part(self._caches, ids, part, buffer)

    def copy(self, block_ids: Sequence[int], target: CopyTarget, on_done: OnDone) -> None:
        ids = torch.tensor(block_ids, pin_memory=True).to(self._caches.device, non_blocking=True)
        parts = list(self._caches.parts(target.num_tokens, STAGING_BYTES))
        outcome = PartsCopied(len(parts), on_done)
        buffers = self._buffers_on_gpu(parts, target.gpu_offset) or self._ring
        for number, part in enumerate(parts):
            failure = attempt(self._copy_part, ids, part, buffers, target, outcome)
            if failure is not None:
                # Reported after the transfers in progress, before which the slot is not reused.
                outcome.finish(failure, len(parts) - number)
                return

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Result of a function that the copy thread calls after all earlier transfers."""
        results: list[T | Failure] = []
        self._thread.submit(lambda: results.append(attempt(function, *args, **kwargs)))
        self._thread.flush()
        [result] = results
        if isinstance(result, Failure):
            raise RuntimeError(result.message)
        return result

    def flush(self) -> None:
        self._thread.flush()

    def _buffers_on_gpu(self, parts: Sequence[Part], offset: int | None) -> "GpuParts | None":
        """Memory of the parts of an export that stays on the GPU; None if it does not."""
        if offset is None:
            return None
        assert self._gpu_arena is not None, "the service has reserved GPU memory"
        sizes = [part.num_rows * part.num_tokens * self._caches.vector_bytes for part in parts]
        return GpuParts(self._gpu_arena.part(offset, sum(sizes)), sizes)

    def _copy_part(
        self,
        ids: torch.Tensor,
        part: Part,
        buffers: "StagingRing | GpuParts",
        target: CopyTarget,
        outcome: PartsCopied,
    ) -> None:
        """Queue the gather of a part, and its transfer, which returns the buffer to the ring."""
        buffer = buffers.take()
        try:
            staged = gather_part(self._caches, ids, part, buffer)
            gathered: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            gathered.record()
        except BaseException:
            buffers.give_back(buffer)
            raise

        def transfer() -> None:
            failure = outcome.failure or attempt(self._transfer, staged, gathered, part, target)
            buffers.give_back(buffer)
            outcome.finish(failure)

        self._thread.submit(transfer)

    def _transfer(
        self, staged: torch.Tensor, gathered: Any, part: Part, target: CopyTarget
    ) -> None:
        """Copy a gathered part to the arena, and wait for it. Runs on the copy thread."""
        runs = list(contiguous_runs(target.open(), part))
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(gathered)
            split = [target.registered_parts(run) for run in runs]
            registered = [piece for pieces in split if pieces for piece in pieces]
            if all(split):
                copy_pieces(staged, registered)
            else:
                self._pinned_buffer[: len(staged)].copy_(staged, non_blocking=True)
            # A thread that waits for a blocking event sleeps instead of spinning.
            copied: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record()
        copied.synchronize()
        if not all(split):
            copy_pieces(self._pinned_buffer[: len(staged)], runs)

    @property
    def _pinned_buffer(self) -> torch.Tensor:
        if self._pinned is None:
            self._pinned = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        return self._pinned


def copy_pieces(source: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Copy consecutive bytes to several places in order, on the current CUDA stream."""
    start = 0
    for target in targets:
        target.copy_(source[start : start + len(target)], non_blocking=True)
        start += len(target)


def contiguous_runs(out: torch.Tensor, part: Part) -> Iterator[torch.Tensor]:
    """Memory of a part in the canonical layout [L, 2, H, T, D], as contiguous runs of bytes.

    If `out` has all heads of the model, there is one run, else one per layer and keys or values.
    """
    groups = out.view(-1, *out.shape[2:])
    num_heads = out.shape[2]
    if out.is_contiguous():
        groups, num_heads = out.view(1, -1, *out.shape[3:]), out[..., 0, 0].numel()
    for group in range(part.first_row // num_heads, -(-part.end_row // num_heads)):
        first = max(part.first_row - group * num_heads, 0)
        rows = groups[group, first : part.end_row - group * num_heads]
        run = rows[:, part.first_token : part.end_token]
        yield run.view(-1).view(torch.uint8)


def layer_chunks(span: torch.Tensor, max_bytes: int) -> list[slice]:
    """Ranges of a span's layers, each of about `max_bytes` or a single layer."""
    layers_per_chunk = max(1, max_bytes // span[0].nbytes)
    return [slice(at, at + layers_per_chunk) for at in range(0, len(span), layers_per_chunk)]


class CudaBlockWriter:
    """Writes into the KV cache of a GPU.

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
