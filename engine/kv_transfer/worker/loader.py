"""In a worker: exported keys and values go into the blocks of a step, before its forward.

Keys are moved to where they stand now, and what is predicted is put together. Whatever goes wrong,
blocks that are not filled are reported to vLLM, which computes them; a place that the arena does
not have costs nothing else, any other failure switches loads off in this process.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.platforms import current_platform

from engine.kv_transfer.cache_spec import CacheForm
from engine.kv_transfer.jobs import LoadJob
from engine.kv_transfer.params import Piece
from engine.kv_transfer.worker.arena import ArenaRefused
from engine.kv_transfer.worker.assemble import Composer, runs_of
from engine.kv_transfer.worker.block_writer import CudaPlacer, PackedPlacer, Placer
from engine.kv_transfer.worker.exports import Exports
from engine.kv_transfer.worker.packed_order import packed_order
from engine.runtime.guard import Feature, feature
from kernels.rope_shift.rope_params import Rotary

SEGMENTS = feature("segments")

logger = logging.getLogger(__name__)


class Loader:
    """Owns what it reads exports by. Called from the worker's one thread."""

    def __init__(self, form: CacheForm, rank: int, guard: Feature = SEGMENTS) -> None:
        self._form = form
        self.load = guard.guarded(self._give_up)(self._load)
        self._exports = Exports(form)
        self._composer = Composer(form, self._exports, form.heads_held_by(rank))
        self._rotary: Rotary | None = None
        self._caches: list[torch.Tensor] = []
        self._placer: Placer | None = None
        self._failed: set[int] = set()
        self._step_failed = False

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """[B, H, N, 2 * D] a layer, in whatever memory order."""
        self._caches = [caches[name] for name in self._form.layers]

    def prepare(self, attention_layers: Mapping[str, Any], rotary: Rotary | None) -> None:
        """Once vLLM has chosen its attention kernels. Without `rotary` keys stay where they are."""
        self._rotary = rotary
        if current_platform.is_cpu():
            order = packed_order(self._caches, self._form, attention_layers)
            self._placer = PackedPlacer(self._caches, order, rotary)
        else:
            self._placer = CudaPlacer(self._caches, rotary)

    def take_failed(self) -> set[int]:
        """The blocks of this step that nothing was loaded into."""
        failed, self._failed = self._failed, set()
        return failed

    def take_step_failed(self) -> bool:
        """Whether this step computes over blocks that nothing was loaded into."""
        failed, self._step_failed = self._step_failed, False
        return failed

    def close(self) -> None:
        self._exports.close()

    def _load(self, job: LoadJob) -> None:
        try:
            for run in runs_of(job.pieces, self._form.block_size):
                self._fill(run, job)
        except ArenaRefused as error:
            logger.warning("a prompt was not loaded: %s", error)
            self._give_up(job)

    def _fill(self, run: list[Piece], job: LoadJob) -> None:
        block, first = self._form.block_size, job.pieces[0].start // self._form.block_size
        ids = job.block_ids[run[0].start // block - first : -(-run[-1].end // block) - first]
        if len(run) == 1 and not run[0].observed:
            self._put(self._composer.place(run[0]), run[0].shift, ids)
        else:
            self._put(self._composer.together(run, self._rotary), 0, ids)

    def _put(self, values: torch.Tensor, shift: int, block_ids: Sequence[int]) -> None:
        assert self._placer is not None, "prepared before anything is loaded"
        block = self._caches[0].shape[2]
        blocks = self._form.kernel_blocks(block_ids, block)
        self._placer.place(values, shift, blocks[: -(-values.shape[3] // block)])

    def _give_up(self, job: LoadJob) -> None:
        self._failed.update(job.block_ids)
        self._step_failed = True
