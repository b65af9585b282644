"""Export of a prompt's KV from a worker to the arena: this rank's heads, then its status.

The KV bytes are written first, the rank's status last. On any failure the status becomes FAILED, if
it can be written. A region outside the arena has no other effect; any other failure disables
exports in this process.
"""

import functools
import logging
from collections.abc import Mapping
from typing import Any

import torch
from vllm.platforms import current_platform

from engine.kv_transfer.cache_layout import CacheLayout
from engine.kv_transfer.jobs import ExportJob
from engine.kv_transfer.worker.cache_blocks import (
    BlockReader,
    PackedBlockReader,
    packed_order,
)
from engine.kv_transfer.worker.gpu_arena import GpuArena
from engine.kv_transfer.worker.mapped_arena import ArenaError, Arenas, SlotTarget
from engine.runtime.feature_guard import Failure, Feature, attempt, feature
from engine.types.kv import ExportStatus

EXPORT_FEATURE = feature("prompt_kv")

logger = logging.getLogger(__name__)


class ExportWriter:
    """Writes this rank's part of prompt KV exports. Called from the worker's main thread.

    `indirect_reason` is the reason why a GPU does not copy directly into the arena, if it does not.
    `gpu_arena` is the GPU memory in which KV can stay, and `gpu_arena_failure` the reason why it
    could not be allocated.
    """

    def __init__(self, layout: CacheLayout, rank: int, guard: Feature = EXPORT_FEATURE) -> None:
        self._layout, self._rank = layout, rank
        self.export = guard.guarded(self.fail)(self._export)
        self._heads = layout.heads_to_write(rank)
        self._arenas = Arenas(layout)
        self._caches: list[torch.Tensor] = []
        self._reader: BlockReader | None = None
        self.indirect_reason: str | None = "there is no GPU"
        self.gpu_arena: GpuArena | None = None
        self.gpu_arena_failure: str | None = None

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Register the KV caches [B, H, N, 2 * D], one per layer, in any memory order."""
        self._caches = [caches[name] for name in self._layout.layers]

    def prepare(self, attention_layers: Mapping[str, Any], *, gpu_bytes: int = 0) -> None:
        """Create the block reader, once vLLM has chosen its attention kernels.

        `gpu_bytes` is the size of the GPU memory in which KV can stay.
        """
        if self._reader is not None:
            return
        if current_platform.is_cpu():
            order = packed_order(self._caches, self._layout, attention_layers)
            self._reader = PackedBlockReader(self._caches, order)
        else:
            self._prepare_gpu(gpu_bytes)

    def flush(self) -> None:
        if self._reader is not None:
            self._reader.flush()

    def close(self) -> None:
        self.flush()
        self._arenas.close()

    def _export(self, job: ExportJob) -> None:
        try:
            self._write(job)
        except ArenaError as error:
            logger.warning("prompt KV was not exported: %s", error)
            self.fail(job)

    def fail(self, job: ExportJob) -> None:
        """Mark an export as FAILED, for example if its step uses blocks that failed to load."""
        attempt(self._write_status, job, ExportStatus.FAILED)

    def _write(self, job: ExportJob) -> None:
        """Write the KV of an export. If it raises ArenaError, no byte has been written."""
        if job.status != ExportStatus.COMMITTED or not self._heads:
            self._write_status(job, job.status)
            return
        assert self._reader is not None, "prepared before anything is exported"
        done = functools.partial(self._on_copied, job)
        target = SlotTarget(self._arenas, job.target_slot, self._heads)
        self._reader.copy(self._kernel_blocks(job), target, done)

    def _write_status(self, job: ExportJob, status: ExportStatus) -> None:
        self._arenas.write_status(job.target_slot, self._rank, status)

    def _on_copied(self, job: ExportJob, failure: Failure | None) -> None:
        attempt(self._write_status, job, ExportStatus.FAILED if failure else ExportStatus.COMMITTED)

    def _prepare_gpu(self, gpu_bytes: int) -> None:
        from engine.kv_transfer.worker import cuda_block_exporter, cuda_host_memory  # needs Triton

        device = self._caches[0].device
        if gpu_bytes and self._heads:
            arena = attempt(GpuArena, gpu_bytes, device, self._heads)
            if isinstance(arena, Failure):
                self.gpu_arena_failure = arena.message
            else:
                self.gpu_arena = arena
        reader = cuda_block_exporter.CudaBlockReader(self._caches, self.gpu_arena)
        reader.warm_up()
        registry = cuda_host_memory.CudaHostMemory(device)
        self.indirect_reason = cuda_host_memory.registration_failure(registry)
        self._arenas = Arenas(self._layout, None if self.indirect_reason else registry)
        self._reader = reader

    def _kernel_blocks(self, job: ExportJob) -> list[int]:
        block = self._caches[0].shape[2]
        num_blocks = -(-job.target_slot.num_tokens // block)
        return self._layout.kernel_blocks(job.block_ids, block)[:num_blocks]
