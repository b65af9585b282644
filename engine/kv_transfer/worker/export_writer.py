"""Export of prompts that a step completes: this rank's heads are copied to the arena.

The KV bytes are written first, the rank's status last. On any failure the status becomes FAILED, if
it can be written. A region outside the arena has no other effect; any other failure disables
exports in this process.
"""

import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.platforms import current_platform

from engine.kv_transfer.cache_spec import CacheLayout
from engine.kv_transfer.jobs import ExportJob
from engine.kv_transfer.worker.arena import STATUS_BYTES, ArenaError, MappedArena
from engine.kv_transfer.worker.cache_block_reader import (
    BlockReader,
    CudaBlockReader,
    PackedBlockReader,
)
from engine.kv_transfer.worker.measure_packed_order import packed_order
from engine.kv_types import ExportStatus
from engine.runtime.guard import Failure, Feature, attempt, feature

EXPORT_FEATURE = feature("prompt_kv")

logger = logging.getLogger(__name__)


class ExportWriter:
    """Owner of the mapped arenas. Called from the worker's main thread."""

    def __init__(self, layout: CacheLayout, rank: int, guard: Feature = EXPORT_FEATURE) -> None:
        self._layout, self._rank = layout, rank
        self.export = guard.guarded(self._fail)(self._export)
        self._heads = layout.heads_to_write(rank)
        self._arenas: dict[Path, MappedArena] = {}
        self._caches: list[torch.Tensor] = []
        self._reader: BlockReader | None = None

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Register caches [B, H, N, 2 * D], one per layer, in any memory order."""
        self._caches = [caches[name] for name in self._layout.layers]

    def prepare(self, attention_layers: Mapping[str, Any]) -> None:
        """Determine the cache's packing. Call it once vLLM has chosen its attention kernels."""
        self._reader = self._reader or self._make_reader(attention_layers)

    def flush(self) -> None:
        if self._reader is not None:
            self._reader.flush()

    def close(self) -> None:
        self.flush()
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()

    def _export(self, job: ExportJob) -> None:
        try:
            self._write(job)
        except ArenaError as error:
            logger.warning("a prompt was not exported: %s", error)
            self._fail(job)

    def refuse(self, job: ExportJob) -> None:
        """Fail an export because the step computed over blocks that failed to load."""
        self._fail(job)

    def _fail(self, job: ExportJob) -> None:
        attempt(self._write_status, job, ExportStatus.FAILED)

    def _write(self, job: ExportJob) -> None:
        """Write an export. Raises ArenaError before a byte is written."""
        if job.status != ExportStatus.COMMITTED or not self._heads:
            self._write_status(job, job.status)
            return
        assert self._reader is not None, "prepared before anything is exported"
        done = functools.partial(self._on_copied, job)
        self._reader.copy(self._kernel_blocks(job), self._output_view(job), done)

    def _write_status(self, job: ExportJob, status: ExportStatus) -> None:
        arena = self._arena(job.target_slot.arena)
        arena.write_status(job.target_slot.status_offset + STATUS_BYTES * self._rank, status)

    def _on_copied(self, job: ExportJob, failure: Failure | None) -> None:
        attempt(self._write_status, job, ExportStatus.FAILED if failure else ExportStatus.COMMITTED)

    def _make_reader(self, attention_layers: Mapping[str, Any]) -> BlockReader:
        if not current_platform.is_cpu():
            return CudaBlockReader(self._caches)
        order = packed_order(self._caches, self._layout, attention_layers)
        return PackedBlockReader(self._caches, order)

    def _output_view(self, job: ExportJob) -> torch.Tensor:
        """[L, 2, this rank's heads, T, D], over the arena itself."""
        layout, num_tokens, arena = (
            self._layout,
            job.target_slot.num_tokens,
            self._arena(job.target_slot.arena),
        )
        region = arena.region(job.target_slot.offset, layout.num_bytes(num_tokens)).view(
            layout.dtype
        )
        shape = (len(layout.layers), 2, layout.num_kv_heads, num_tokens, layout.head_dim)
        return region.view(shape)[:, :, self._heads.start : self._heads.stop]

    def _kernel_blocks(self, job: ExportJob) -> list[int]:
        block = self._caches[0].shape[2]
        num_blocks = -(-job.target_slot.num_tokens // block)
        return self._layout.kernel_blocks(job.block_ids, block)[:num_blocks]

    def _arena(self, path: Path) -> MappedArena:
        if path not in self._arenas:
            self._arenas[path] = MappedArena(path)
        return self._arenas[path]
