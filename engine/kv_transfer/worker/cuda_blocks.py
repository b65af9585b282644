"""Copies KV from a GPU's cache blocks to the arena. See cache_blocks for the interface.

An export is gathered part by part, for all layers at once, into a ring of staging buffers on the
GPU, on the model's stream. A thread copies each part to the arena on a stream of its own, while the
next steps run. If the driver does not register the arena, parts are copied to pinned memory first.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, ParamSpec, TypeVar

import torch

from engine.kv_transfer.worker.cache_blocks import CopyTarget, OnDone
from engine.kv_transfer.worker.cuda_host_memory import WorkThread
from engine.kv_transfer.worker.gpu_arena import GpuArena
from engine.runtime.feature_guard import Failure, attempt
from kernels.kv_gather_cuda import LayerCaches, Part, gather_part

P = ParamSpec("P")
T = TypeVar("T")
STAGING_BYTES: Final = 2**24
NUM_STAGING_BUFFERS: Final = 4


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
        self._thread = WorkThread(self._caches.device)
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
        return self._thread.call(function, *args, **kwargs)

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
    if out.is_contiguous():
        groups = out.view(1, -1, *out.shape[3:])
    for run in rows_by_group(groups, part):
        yield run.view(-1).view(torch.uint8)


def rows_by_group(groups: torch.Tensor, part: Part) -> Iterator[torch.Tensor]:
    """Views of a part of rows that are stored in groups of equal size, [groups, rows, T, D]."""
    num_rows = groups.shape[1]
    for group in range(part.first_row // num_rows, -(-part.end_row // num_rows)):
        first = max(part.first_row - group * num_rows, 0)
        rows = groups[group, first : part.end_row - group * num_rows]
        yield rows[:, part.first_token : part.end_token]
