"""Assembly of a span's KV in a worker, before it is written to the cache.

A span whose keys are only shifted is read directly from the arena. Predicted spans and spans that
share a block are assembled first, in parts small enough to limit memory. Prediction weights are
computed from all heads, so that every rank uses the same ones; everything else covers this rank's
heads.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import torch

from engine.kv_transfer.cache_spec import CacheLayout
from engine.kv_transfer.worker.export_reader import Exports
from engine.kv_types import LoadPiece
from kernels.kv_predict import Observation, predict, shift_keys_of_layers, token_weights
from kernels.rope_shift import RotaryParams

MAX_PREDICTED_TOKENS: Final = 256
"""Tokens predicted at a time, to limit memory."""


class SpanAssembler:
    """Assembler of the KV written to this rank's cache, from exported spans in the arena."""

    def __init__(self, layout: CacheLayout, exports: Exports, heads: range) -> None:
        self._layout, self._exports = layout, exports
        self._heads = slice(heads.start, heads.stop)

    def place(self, piece: LoadPiece) -> torch.Tensor:
        """[L, 2, H, T, D], with unshifted keys, over the arena itself."""
        whole = self._exports.tokens(piece.source, piece.token_offset, piece.num_tokens)
        return whole[:, :, self._heads]

    def assemble(self, run: Sequence[LoadPiece], rotary: RotaryParams | None) -> torch.Tensor:
        """[L, 2, H, T, D] of all tokens of the run, with keys shifted to their positions."""
        start, layout = run[0].start, self._layout
        num_heads = self._heads.stop - self._heads.start
        shape = (len(layout.layers), 2, num_heads, run[-1].end - start, layout.head_dim)
        out = torch.empty(shape, dtype=layout.dtype, device="cpu")
        for piece in run:
            there = out[:, :, :, piece.start - start : piece.end - start]
            if piece.observations:
                self._predict(piece, rotary, there)
            else:
                there.copy_(shift_keys_of_layers(self.place(piece), piece.shift, rotary))
        return out

    def _predict(self, piece: LoadPiece, rotary: RotaryParams | None, out: torch.Tensor) -> None:
        length = piece.num_tokens
        source = self._exports.tokens(piece.source, piece.token_offset, length)
        bases = [
            None
            if seen.base is None
            else self._exports.tokens(seen.base, seen.base_token_offset, length)
            for seen in piece.observations
        ]
        observations = [
            Observation(
                real=self._exports.tokens(seen.real, seen.token_offset, length)[:, :, self._heads],
                shift=seen.shift,
                base=None if base is None else base[:, :, self._heads],
                weights=weights,
            )
            for seen, base, weights in zip(
                piece.observations, bases, _weights(piece, source, bases), strict=True
            )
        ]
        predict(source[:, :, self._heads], piece.shift, observations, rotary, out)


def _weights(
    piece: LoadPiece, source: torch.Tensor, bases: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """Weights [A, 2, T] of A observations.

    Either all or none of a span's observations have a base.
    """
    there = [base for base in bases if base is not None]
    if there:
        assert len(there) == len(bases), "some have a base"
        return token_weights(source, there)
    shares = [seen.weight for seen in piece.observations]
    flat = torch.tensor(shares, dtype=torch.float32, device="cpu")
    return flat[:, None, None].expand(-1, 2, piece.num_tokens)


def group_runs(pieces: Sequence[LoadPiece], block: int) -> Iterator[list[LoadPiece]]:
    """Consecutive spans as runs that start at a block boundary.

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
    """Split a span at the positions inside it."""
    for cut in cuts:
        if piece.start < cut < piece.end:
            yield piece.prefix_until(cut)
            piece = piece.suffix_from(cut)
    yield piece
