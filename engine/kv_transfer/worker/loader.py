"""Loading of exported KV into a worker's KV cache before the forward pass.

A span whose keys are only shifted is read directly from the arena. Predicted spans and spans that
share a block are assembled first, in parts small enough to limit memory. Prediction weights are
computed from all heads, so that every rank uses the same ones; everything else covers this rank's
heads.

On any failure, blocks that were not filled are reported to vLLM, which prefills them. A region
outside the arena and a lack of memory have no other effect; any other failure disables loads in
this process.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from vllm.platforms import current_platform

from engine.kv_transfer.cache_layout import CacheLayout
from engine.kv_transfer.jobs import LoadJob
from engine.kv_transfer.worker.cache_blocks import (
    BlockWriter,
    PackedBlockWriter,
    packed_order,
)
from engine.kv_transfer.worker.mapped_arena import ArenaError, Arenas
from engine.runtime.feature_guard import Feature, feature
from engine.types.kv import ExportSlot, LoadPiece
from kernels.rope_shift import RotaryParams
from kernels.span_kv_prediction import Observation, predict, shift_keys_of_layers, token_weights

MAX_PREDICTED_TOKENS: Final = 256
"""Tokens predicted at a time, to limit memory."""
LOAD_FEATURE = feature("kv_reuse")

logger = logging.getLogger(__name__)


class SpanAssembler:
    """Assembles the KV that is written to this rank's cache from exported spans in the arena."""

    def __init__(self, layout: CacheLayout, arenas: Arenas, heads: range) -> None:
        self._layout, self._arenas = layout, arenas
        self._heads = slice(heads.start, heads.stop)

    def local_kv(self, piece: LoadPiece) -> torch.Tensor:
        """View of this rank's heads of an exported span, [L, 2, H, T, D], with unshifted keys."""
        return self._kv(piece.source, piece.token_offset, piece.num_tokens)[:, :, self._heads]

    def assemble(self, run: Sequence[LoadPiece], rotary: RotaryParams | None) -> torch.Tensor:
        """Assemble the KV of consecutive spans, [L, 2, H, T, D], with keys at new positions."""
        start, layout = run[0].start, self._layout
        num_heads = self._heads.stop - self._heads.start
        shape = (len(layout.layers), 2, num_heads, run[-1].end - start, layout.head_dim)
        out = torch.empty(shape, dtype=layout.dtype, device="cpu")
        for piece in run:
            there = out[:, :, :, piece.start - start : piece.end - start]
            if piece.observations:
                self._predict(piece, rotary, there)
            else:
                there.copy_(shift_keys_of_layers(self.local_kv(piece), piece.shift, rotary))
        return out

    def _predict(self, piece: LoadPiece, rotary: RotaryParams | None, out: torch.Tensor) -> None:
        length = piece.num_tokens
        source = self._kv(piece.source, piece.token_offset, length)
        bases = [
            None
            if observed.base is None
            else self._kv(observed.base, observed.base_token_offset, length)
            for observed in piece.observations
        ]
        observations = [
            Observation(
                real=self._kv(observed.real, observed.token_offset, length)[:, :, self._heads],
                shift=observed.shift,
                base=None if base is None else base[:, :, self._heads],
                weights=weights,
            )
            for observed, base, weights in zip(
                piece.observations, bases, _weights(piece, source, bases), strict=True
            )
        ]
        predict(source[:, :, self._heads], piece.shift, observations, rotary, out)

    def _kv(self, slot: ExportSlot, token_offset: int, num_tokens: int) -> torch.Tensor:
        """View of tokens of a slot in the arena, [L, 2, H, T, D], with the heads of all ranks."""
        return self._arenas.kv(slot)[:, :, :, token_offset : token_offset + num_tokens]


def _weights(
    piece: LoadPiece, source: torch.Tensor, bases: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """Weights [A, 2, T] of the A observations from which a span of T tokens is predicted.

    Either all or none of a span's observations have a base.
    """
    there = [base for base in bases if base is not None]
    if there:
        assert len(there) == len(bases), "some have a base"
        return token_weights(source, there)
    shares = [observed.weight for observed in piece.observations]
    flat = torch.tensor(shares, dtype=torch.float32, device="cpu")
    return flat[:, None, None].expand(-1, 2, piece.num_tokens)


def group_runs(pieces: Sequence[LoadPiece], block: int) -> Iterator[list[LoadPiece]]:
    """Group consecutive spans into runs that each start at a block boundary.

    Spans that share a block are written together, and predicted spans are split into parts. A run
    of several spans is no longer than such a part. A longer run is a single span, read directly
    from the arena.
    """
    run: list[LoadPiece] = []
    for part in _split_runs(pieces, block):
        if run and part.start % block == 0:
            yield run
            run = []
        run.append(part)
    if run:
        yield run


def _split_runs(pieces: Sequence[LoadPiece], block: int) -> Iterator[LoadPiece]:
    step = max(1, MAX_PREDICTED_TOKENS // block) * block
    for index, piece in enumerate(pieces):
        if piece.observations:
            yield from _split_at(piece, range(piece.start // step * step, piece.end, step))
        else:
            last = piece.end if index + 1 == len(pieces) else piece.end // block * block
            yield from _split_at(piece, (-(-piece.start // block) * block, last))


def _split_at(piece: LoadPiece, cuts: Iterable[int]) -> Iterator[LoadPiece]:
    """Split a span at those of the given prompt positions that are inside it."""
    for cut in cuts:
        if piece.start < cut < piece.end:
            yield piece.prefix_until(cut)
            piece = piece.suffix_from(cut)
    yield piece


class Loader:
    """Loads exported KV into this rank's cache blocks. Called from the worker's main thread."""

    def __init__(self, layout: CacheLayout, rank: int, guard: Feature = LOAD_FEATURE) -> None:
        self._layout = layout
        self.load = guard.guarded(self._fail)(self._load)
        self._arenas = Arenas(layout)
        self._heads = layout.local_heads(rank)
        self._assembler = SpanAssembler(layout, self._arenas, self._heads)
        self._rotary: RotaryParams | None = None
        self._caches: list[torch.Tensor] = []
        self._writer: BlockWriter | None = None
        self._failed: set[int] = set()
        self._step_failed = False

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Register the KV caches [B, H, N, 2 * D], one per layer, in any memory order."""
        self._caches = [caches[name] for name in self._layout.layers]

    def prepare(self, attention_layers: Mapping[str, Any], rotary: RotaryParams | None) -> None:
        """Create the block writer. Call it once vLLM has chosen its attention kernels.

        Without `rotary` keys cannot be shifted.
        """
        self._rotary = rotary
        if current_platform.is_cpu():
            order = packed_order(self._caches, self._layout, attention_layers)
            self._writer = PackedBlockWriter(self._caches, order, rotary)
        else:
            self._prepare_gpu(rotary)

    def take_failed_blocks(self) -> set[int]:
        """Return and clear the blocks of this step that failed to load."""
        failed, self._failed = self._failed, set()
        return failed

    def take_step_failed(self) -> bool:
        """Return and clear whether this step uses blocks that failed to load."""
        failed, self._step_failed = self._step_failed, False
        return failed

    def flush(self) -> None:
        """Wait until all spans have been read, after which their slots may be reused."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        self.flush()
        self._arenas.close()

    def _prepare_gpu(self, rotary: RotaryParams | None) -> None:
        from engine.kv_transfer.worker import cuda_block_loader, cuda_host_memory  # needs Triton

        writer = cuda_block_loader.CudaBlockLoader(self._caches, rotary)
        writer.warm_up()
        registry = cuda_host_memory.CudaHostMemory(self._caches[0].device)
        if reason := cuda_host_memory.direct_read_failure(registry):
            logger.warning("prompt KV is copied twice when it is loaded: %s", reason)
        self._arenas = Arenas(self._layout, None if reason else registry)
        self._assembler = SpanAssembler(self._layout, self._arenas, self._heads)
        self._writer = writer

    def _load(self, job: LoadJob) -> None:
        try:
            for run in group_runs(job.pieces, self._layout.block_size):
                self._load_run(run, job)
        except (ArenaError, torch.OutOfMemoryError) as error:
            logger.warning("prompt KV was not loaded: %s", error)
            self._fail(job)

    def _load_run(self, run: list[LoadPiece], job: LoadJob) -> None:
        block, first = self._layout.block_size, job.pieces[0].start // self._layout.block_size
        ids = job.block_ids[run[0].start // block - first : -(-run[-1].end // block) - first]
        if len(run) == 1 and not run[0].observations:
            values = self._assembler.local_kv(run[0])
            is_registered = self._arenas.is_registered(run[0].source)
            self._write_blocks(values, run[0].shift, ids, is_registered=is_registered)
        else:
            values = self._assembler.assemble(run, self._rotary)
            self._write_blocks(values, 0, ids, is_registered=False)

    def _write_blocks(
        self, values: torch.Tensor, shift: int, block_ids: Sequence[int], *, is_registered: bool
    ) -> None:
        assert self._writer is not None, "prepared before anything is loaded"
        block = self._caches[0].shape[2]
        blocks = self._layout.kernel_blocks(block_ids, block)
        blocks = blocks[: -(-values.shape[3] // block)]
        self._writer.write(values, shift, blocks, is_registered=is_registered)

    def _fail(self, job: LoadJob) -> None:
        self._failed.update(job.block_ids)
        self._step_failed = True
