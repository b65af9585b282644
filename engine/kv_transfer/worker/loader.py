"""Loading of exported KV into a step's blocks, in a worker, before the forward pass.

Keys are shifted to their new positions, and predicted KV is assembled. On any failure, blocks that
were not filled are reported to vLLM, which prefills them. A region outside the arena has no other
effect; any other failure disables loads in this process.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.platforms import current_platform

from engine.kv_transfer.cache_spec import CacheLayout
from engine.kv_transfer.jobs import LoadJob
from engine.kv_transfer.worker.arena import ArenaError
from engine.kv_transfer.worker.assemble import SpanAssembler, group_runs
from engine.kv_transfer.worker.cache_block_writer import (
    BlockWriter,
    CudaBlockWriter,
    PackedBlockWriter,
)
from engine.kv_transfer.worker.export_reader import Exports
from engine.kv_transfer.worker.measure_packed_order import packed_order
from engine.kv_types import LoadPiece
from engine.runtime.guard import Feature, feature
from kernels.rope_shift import RotaryParams

LOAD_FEATURE = feature("segments")

logger = logging.getLogger(__name__)


class Loader:
    """Owner of the mappings of exports. Called from the worker's main thread."""

    def __init__(self, layout: CacheLayout, rank: int, guard: Feature = LOAD_FEATURE) -> None:
        self._layout = layout
        self.load = guard.guarded(self._fail)(self._load)
        self._exports = Exports(layout)
        self._assembler = SpanAssembler(layout, self._exports, layout.local_heads(rank))
        self._rotary: RotaryParams | None = None
        self._caches: list[torch.Tensor] = []
        self._writer: BlockWriter | None = None
        self._failed: set[int] = set()
        self._step_failed = False

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Register caches [B, H, N, 2 * D], one per layer, in any memory order."""
        self._caches = [caches[name] for name in self._layout.layers]

    def prepare(self, attention_layers: Mapping[str, Any], rotary: RotaryParams | None) -> None:
        """Prepare the writer once vLLM has chosen its attention kernels.

        Without `rotary` keys cannot be shifted.
        """
        self._rotary = rotary
        if current_platform.is_cpu():
            order = packed_order(self._caches, self._layout, attention_layers)
            self._writer = PackedBlockWriter(self._caches, order, rotary)
        else:
            self._writer = CudaBlockWriter(self._caches, rotary)

    def take_failed_blocks(self) -> set[int]:
        """Return and clear the blocks of this step that failed to load."""
        failed, self._failed = self._failed, set()
        return failed

    def take_step_failed(self) -> bool:
        """Return and clear whether this step computes over blocks that failed to load."""
        failed, self._step_failed = self._step_failed, False
        return failed

    def close(self) -> None:
        self._exports.close()

    def _load(self, job: LoadJob) -> None:
        try:
            for run in group_runs(job.pieces, self._layout.block_size):
                self._load_run(run, job)
        except ArenaError as error:
            logger.warning("a prompt was not loaded: %s", error)
            self._fail(job)

    def _load_run(self, run: list[LoadPiece], job: LoadJob) -> None:
        block, first = self._layout.block_size, job.pieces[0].start // self._layout.block_size
        ids = job.block_ids[run[0].start // block - first : -(-run[-1].end // block) - first]
        if len(run) == 1 and not run[0].observations:
            self._write_blocks(self._assembler.place(run[0]), run[0].shift, ids)
        else:
            self._write_blocks(self._assembler.assemble(run, self._rotary), 0, ids)

    def _write_blocks(self, values: torch.Tensor, shift: int, block_ids: Sequence[int]) -> None:
        assert self._writer is not None, "prepared before anything is loaded"
        block = self._caches[0].shape[2]
        blocks = self._layout.kernel_blocks(block_ids, block)
        self._writer.place(values, shift, blocks[: -(-values.shape[3] // block)])

    def _fail(self, job: LoadJob) -> None:
        self._failed.update(job.block_ids)
        self._step_failed = True
