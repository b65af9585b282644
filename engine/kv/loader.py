"""In a worker: exported keys and values go into the blocks of a step, before its forward.

Keys are moved to where they stand now. Whatever goes wrong, blocks that are not filled are reported
to vLLM, which computes them; a place that the arena does not have costs nothing else, any other
failure switches loads off in this process.

L layers, H this rank's heads, T tokens of a piece, D head_dim.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from vllm.platforms import current_platform

from engine.guard import Feature, feature
from engine.kv.arena import ArenaRefused, MappedArena
from engine.kv.form import CacheForm
from engine.kv.jobs import LoadJob
from engine.kv.packing import packed_order
from engine.kv.place import Piece
from engine.kv.placing import CudaPlacer, PackedPlacer, Placer
from kernels.rotary_shift.rotary import Rotary

SEGMENTS = feature("segments")

logger = logging.getLogger(__name__)


class Loader:
    """Owns its mappings of arenas. Called from the worker's one thread."""

    def __init__(self, form: CacheForm, rank: int, guard: Feature = SEGMENTS) -> None:
        self._form = form
        self.load = guard.guarded(self._give_up)(self._load)
        self._heads = form.heads_held_by(rank)
        self._arenas: dict[str, MappedArena] = {}
        self._caches: list[torch.Tensor] = []
        self._placer: Placer | None = None
        self._failed: set[int] = set()
        self._step_failed = False

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """[B, H, N, 2 * D] a layer, in whatever memory order."""
        self._caches = [caches[name] for name in self._form.layers]

    def prepare(self, attention_layers: Mapping[str, Any], rotary: Rotary | None) -> None:
        """Once vLLM has chosen its attention kernels. Without `rotary` keys stay where they are."""
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
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()

    def _load(self, job: LoadJob) -> None:
        try:
            values = self._values(job.piece)
        except ArenaRefused as error:
            logger.warning("a prompt was not loaded: %s", error)
            self._give_up(job)
            return
        assert self._placer is not None, "prepared before anything is loaded"
        block = self._caches[0].shape[2]
        blocks = self._form.kernel_blocks(job.block_ids, block)
        self._placer.place(values, job.piece.shift, blocks[: -(-job.piece.num_tokens // block)])

    def _give_up(self, job: LoadJob) -> None:
        self._failed.update(job.block_ids)
        self._step_failed = True

    def _values(self, piece: Piece) -> torch.Tensor:
        """[L, 2, H, T, D], over the arena itself."""
        form, source = self._form, piece.source
        region = self._arena(source.arena).region(source.offset, form.num_bytes(source.num_tokens))
        shape = (len(form.layers), 2, form.num_kv_heads, source.num_tokens, form.head_dim)
        heads = region.view(form.dtype).view(shape)[:, :, self._heads.start : self._heads.stop]
        return heads[:, :, :, piece.skip : piece.skip + piece.num_tokens]

    def _arena(self, path: str) -> MappedArena:
        if path not in self._arenas:
            self._arenas[path] = MappedArena(path)
        return self._arenas[path]
