"""Copier of exported KV cache blocks from a GPU to the shared-memory arena, in the background.

An export is gathered part by part, for all layers at once, into a staging buffer on the GPU, and
copied from there to the arena, by a thread and a stream of its own, while the next steps run. If
the driver does not register the arena, parts are copied to pinned memory first. EngineCore keeps
the blocks allocated until then (see HeldBlocks).
"""

from collections.abc import Iterator, Sequence
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


class GpuParts:
    """Consecutive parts of GPU memory, in which the KV stays."""

    def __init__(self, memory: torch.Tensor, sizes: Sequence[int]) -> None:
        self._parts = iter(memory.split(list(sizes)))  # type: ignore[no-untyped-call]

    def take(self) -> torch.Tensor:
        part: torch.Tensor = next(self._parts)
        return part


class StagingBuffer:
    """Staging memory on a GPU, allocated when it is first needed and used on one stream."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._device, self._num_bytes = device, num_bytes
        self._memory: torch.Tensor | None = None

    def take(self) -> torch.Tensor:
        """The buffer. Raises torch.OutOfMemoryError if the GPU has no room for it."""
        if self._memory is None:
            self._memory = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)
        return self._memory


class CudaBlockReader:
    """Reads the KV cache of a GPU, on a thread and a stream of its own.

    Steps wait for nothing: the blocks stay allocated until `on_done` has been called. If the GPU
    has no room for the staging buffer, this export fails, and no other. An export that stays on the
    GPU is gathered into its part of `gpu_arena` instead.
    """

    def __init__(self, caches: Sequence[torch.Tensor], gpu_arena: GpuArena | None = None) -> None:
        self._caches = LayerCaches.of(caches)
        self._gpu_arena = gpu_arena
        self._staging = StagingBuffer(self._caches.device, STAGING_BYTES)
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
        filled: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        filled.record()

        def work() -> None:
            result = attempt(self._copy, ids, filled, target)
            on_done(result if isinstance(result, Failure) else None)

        self._thread.submit(work)

    def flush(self) -> None:
        self._thread.flush()

    def _copy(self, ids: torch.Tensor, filled: Any, target: CopyTarget) -> None:
        """Copy a prompt after the blocks were filled, and wait for it. Runs on the copy thread."""
        parts = list(self._caches.parts(target.num_tokens, STAGING_BYTES))
        out = target.open()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(filled)
            buffers = self._buffers_on_gpu(parts, target.gpu_offset) or self._staging
            try:
                for part in parts:
                    staged = gather_part(self._caches, ids, part, buffers.take())
                    self._transfer(staged, list(contiguous_runs(out, part)), target)
            finally:
                self._wait()  # also after a failure: the slot is reused then

    def _buffers_on_gpu(self, parts: Sequence[Part], offset: int | None) -> GpuParts | None:
        """Memory of the parts of an export that stays on the GPU; None if it does not."""
        if offset is None:
            return None
        assert self._gpu_arena is not None, "the service has reserved GPU memory"
        sizes = [part.num_rows * part.num_tokens * self._caches.vector_bytes for part in parts]
        return GpuParts(self._gpu_arena.part(offset, sum(sizes)), sizes)

    def _transfer(
        self, staged: torch.Tensor, runs: Sequence[torch.Tensor], target: CopyTarget
    ) -> None:
        """Copy a gathered part to the arena; the next gather follows on the same stream."""
        split = [target.registered_parts(run) for run in runs]
        if all(split):
            copy_pieces(staged, [piece for pieces in split if pieces for piece in pieces])
            return
        pinned = self._pinned_buffer[: len(staged)]
        pinned.copy_(staged, non_blocking=True)
        self._wait()
        copy_pieces(pinned, runs)

    def _wait(self) -> None:
        # A thread that waits for a blocking event sleeps instead of spinning.
        copied: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copied.record()
        copied.synchronize()

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
