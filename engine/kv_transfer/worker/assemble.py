"""In a worker: what a piece's tokens are, as they are to be written into the cache.

A piece whose keys only move is taken as it lies in the arena. What is predicted, and what shares a
block with another piece, is put together first, so much at a time that it stays small. Weights are
of all heads, so that every rank weighs alike; the rest is of this rank's.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import torch

from engine.kv_transfer.cache_spec import CacheLayout
from engine.kv_transfer.params import LoadPieceParams
from engine.kv_transfer.worker.exports import Exports
from kernels.kv_predict.predict import Observation, predict, shift_keys_of_layers, token_weights
from kernels.rope_shift.rope_params import RotaryParams

MAX_PREDICTED_TOKENS: Final = 256
"""Predicted at a time, so that little is held beside the cache."""


class SpanAssembler:
    """Reads exports, writes nothing."""

    def __init__(self, layout: CacheLayout, exports: Exports, heads: range) -> None:
        self._layout, self._exports = layout, exports
        self._heads = slice(heads.start, heads.stop)

    def place(self, piece: LoadPieceParams) -> torch.Tensor:
        """[L, 2, H, T, D], unmoved, over the arena itself."""
        whole = self._exports.tokens(piece.source, piece.token_offset, piece.num_tokens)
        return whole[:, :, self._heads]

    def assemble(self, run: Sequence[LoadPieceParams], rotary: RotaryParams | None) -> torch.Tensor:
        """[L, 2, H, T, D] of all tokens of the run, moved to where they stand."""
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

    def _predict(
        self, piece: LoadPieceParams, rotary: RotaryParams | None, out: torch.Tensor
    ) -> None:
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
    piece: LoadPieceParams, source: torch.Tensor, bases: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """[A, 2, T] of the A that were observed. All of a piece's have a base, or none."""
    there = [base for base in bases if base is not None]
    if there:
        assert len(there) == len(bases), "some have a base"
        return token_weights(source, there)
    shares = [seen.weight for seen in piece.observations]
    flat = torch.tensor(shares, dtype=torch.float32, device="cpu")
    return flat[:, None, None].expand(-1, 2, piece.num_tokens)


def group_runs(pieces: Sequence[LoadPieceParams], block: int) -> Iterator[list[LoadPieceParams]]:
    """Pieces one after the other, each run from where a block begins: those that share a block are
    written together, and what is predicted in parts. A run of several is as short as such a part;
    what is as long as it likes is alone, and read where it lies."""
    run: list[LoadPieceParams] = []
    for part in _split_runs(pieces, block):
        if run and part.start % block == 0:
            yield run
            run = []
        run.append(part)
    if run:
        yield run


def _split_runs(pieces: Sequence[LoadPieceParams], block: int) -> Iterator[LoadPieceParams]:
    step = max(1, MAX_PREDICTED_TOKENS // block) * block
    for index, piece in enumerate(pieces):
        if piece.observations:
            yield from _split_at(piece, range(piece.start // step * step, piece.end, step))
        else:
            last = piece.end if index + 1 == len(pieces) else piece.end // block * block
            yield from _split_at(piece, (-(-piece.start // block) * block, last))


def _split_at(piece: LoadPieceParams, cuts: Iterable[int]) -> Iterator[LoadPieceParams]:
    """Where something of it is on both sides."""
    for cut in cuts:
        if piece.start < cut < piece.end:
            yield piece.prefix_until(cut)
            piece = piece.suffix_from(cut)
    yield piece
