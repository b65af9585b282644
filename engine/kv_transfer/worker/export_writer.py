"""In a worker: the prompts that a step completes go to the arena, this rank's heads of them.

Bytes first, the rank's word last. Whatever goes wrong becomes the word FAILED, if there is room
for a word; a place that the arena does not have costs nothing else, any other failure switches the
export off in this process.
"""

import functools
import logging
from collections.abc import Mapping
from typing import Any

import torch
from vllm.platforms import current_platform

from engine.kv_transfer.cache_spec import CacheForm
from engine.kv_transfer.jobs import ExportJob
from engine.kv_transfer.worker.arena import WORD_BYTES, ArenaRefused, MappedArena
from engine.kv_transfer.worker.block_reader import Copier, CudaCopier, PackedCopier
from engine.kv_transfer.worker.packed_order import packed_order
from engine.kv_types import ExportWord
from engine.runtime.guard import Failure, Feature, attempt, feature

PROMPT_KV = feature("prompt_kv")

logger = logging.getLogger(__name__)


class ExportWriter:
    """Owns the mapped arenas. Called from the worker's one thread."""

    def __init__(self, form: CacheForm, rank: int, guard: Feature = PROMPT_KV) -> None:
        self._form, self._rank = form, rank
        self.export = guard.guarded(self._give_up)(self._export)
        self._heads = form.heads_of(rank)
        self._arenas: dict[str, MappedArena] = {}
        self._caches: list[torch.Tensor] = []
        self._copier: Copier | None = None

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """[B, H, N, 2 * D] a layer, in whatever memory order."""
        self._caches = [caches[name] for name in self._form.layers]

    def prepare(self, attention_layers: Mapping[str, Any]) -> None:
        """Find out how the cache is packed; once vLLM has chosen its attention kernels."""
        self._copier = self._copier or self._chosen(attention_layers)

    def settle(self) -> None:
        if self._copier is not None:
            self._copier.settle()

    def close(self) -> None:
        self.settle()
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()

    def _export(self, job: ExportJob) -> None:
        try:
            self._write(job)
        except ArenaRefused as error:
            logger.warning("a prompt was not exported: %s", error)
            self._give_up(job)

    def refuse(self, job: ExportJob) -> None:
        """What the step computed is not the prompt's."""
        self._give_up(job)

    def _give_up(self, job: ExportJob) -> None:
        attempt(self._say, job, ExportWord.FAILED)

    def _write(self, job: ExportJob) -> None:
        """Raises ArenaRefused before a byte is written."""
        if job.word != ExportWord.COMMITTED or not self._heads:
            self._say(job, job.word)
            return
        assert self._copier is not None, "prepared before anything is exported"
        done = functools.partial(self._done, job)
        self._copier.copy(self._kernel_blocks(job), self._out(job), done)

    def _say(self, job: ExportJob, word: ExportWord) -> None:
        arena = self._arena(job.place.arena)
        arena.put_word(job.place.words_offset + WORD_BYTES * self._rank, word)

    def _done(self, job: ExportJob, failure: Failure | None) -> None:
        attempt(self._say, job, ExportWord.FAILED if failure else ExportWord.COMMITTED)

    def _chosen(self, attention_layers: Mapping[str, Any]) -> Copier:
        if not current_platform.is_cpu():
            return CudaCopier(self._caches)
        order = packed_order(self._caches, self._form, attention_layers)
        return PackedCopier(self._caches, order)

    def _out(self, job: ExportJob) -> torch.Tensor:
        """[L, 2, this rank's heads, T, D], over the arena itself."""
        form, num_tokens, arena = self._form, job.place.num_tokens, self._arena(job.place.arena)
        region = arena.region(job.place.offset, form.num_bytes(num_tokens)).view(form.dtype)
        shape = (len(form.layers), 2, form.num_kv_heads, num_tokens, form.head_dim)
        return region.view(shape)[:, :, self._heads.start : self._heads.stop]

    def _kernel_blocks(self, job: ExportJob) -> list[int]:
        block = self._caches[0].shape[2]
        num_blocks = -(-job.place.num_tokens // block)
        return self._form.kernel_blocks(job.block_ids, block)[:num_blocks]

    def _arena(self, path: str) -> MappedArena:
        if path not in self._arenas:
            self._arenas[path] = MappedArena(path)
        return self._arenas[path]
