"""Tiling of causal attention inside packed rows.

Under a causal mask the CPU flash kernel processes whole tiles of 512 keys, so rows of up to 512
tokens cost twice the necessary work. Here rows are split into smaller causal tiles. Two adjacent
tiles are joined by one unmasked call, in which all queries of the second read all keys of the
first; then pairs of pairs are joined, and so on. The wasted work disappears.

Shapes: N repetitions of a tile, H heads, T packed tokens, D head size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from coppice.train.spans import Spans

# Measured: with 64 the merges cost as much as the tiles save; with 256 half of each tile is wasted.
TILE = 128


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """`num` equal ranges of tokens, `step` apart, processed by one attention call.

    In each range the first num_keys tokens are keys, and the tokens from num_before on are queries.
    A tile with num_before = 0 attends to itself under a causal mask; other tiles have no mask.
    """

    start: int
    num: int
    step: int
    num_keys: int
    num_queries: int
    num_before: int = 0

    @property
    def is_causal(self) -> bool:
        return not self.num_before

    def keys(self, packed_1HTD: Tensor) -> Tensor:
        """View [N, H, tokens, D]; the last dimension may be missing."""
        return self._view(packed_1HTD, self.start, self.num_keys)

    def queries(self, packed_1HTD: Tensor) -> Tensor:
        return self._view(packed_1HTD, self.start + self.num_before, self.num_queries)

    def _view(self, packed: Tensor, first: int, num_tokens: int) -> Tensor:
        _, head, token, *rest = packed.stride()
        size = (self.num, packed.shape[1], num_tokens, *packed.shape[3:])
        strides = (self.step * token, head, token, *rest)
        return packed.as_strided(size, strides, packed.storage_offset() + first * token)


def split_into_tiles(spans: Spans, tile: int = TILE) -> Iterator[AttentionTile]:
    """Yields tiles in which every pair of a query and a key that it reads occurs exactly once."""
    for rows in _runs_of_equal_rows(spans.lengths):
        for start, num, step, tokens in _stretches(*rows, tile):
            yield AttentionTile(start, num, step, num_keys=tokens, num_queries=tokens)
        yield from _cross_tiles(*rows, tile)
    for branch in spans.branches:
        before, after = branch.stop - branch.start, branch.end - branch.stop
        if before and after:
            yield AttentionTile(branch.start, 1, 0, before, after, num_before=before)


def _cross_tiles(start: int, num_rows: int, row_tokens: int, half: int) -> Iterator[AttentionTile]:
    while half < row_tokens:
        for first, num, step, tokens in _stretches(start, num_rows, row_tokens, 2 * half):
            if tokens > half:
                yield AttentionTile(first, num, step, half, tokens - half, num_before=half)
        half *= 2


def _stretches(
    start: int, num_rows: int, row_tokens: int, size: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yields start, count, step and length of the ranges of that size, and of the remainder."""
    whole, left = divmod(row_tokens, size)
    if whole and (num_rows == 1 or not left):
        yield start, num_rows * whole, size, size
    else:
        yield from ((start + i * size, num_rows, row_tokens, size) for i in range(whole))
    if left:
        yield start + whole * size, num_rows, row_tokens, left


def _runs_of_equal_rows(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields start, count and length of adjacent rows with equal length."""
    first = start = 0
    for row in range(1, len(lengths) + 1):
        if row == len(lengths) or lengths[row] != lengths[first]:
            if lengths[first]:
                yield start, row - first, lengths[first]
            start += (row - first) * lengths[first]
            first = row
