"""Triton kernel that gathers a prompt's KV from all layers' cache blocks into contiguous rows.

The canonical layout of a prompt is [L, 2, H, T, D] (see kv_block_copy). Here it is L * 2 * H rows
of T vectors of D elements. One launch gathers any range of rows, or a range of one row's tokens, so
that a staging buffer of fixed size is filled regardless of the number of layers.

Vectors are copied as integers of up to eight bytes, whatever the dtype.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Self

import torch
import triton
import triton.language as tl

TOKENS_PER_PROGRAM: Final = 32
WORDS: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16}
"""Integers as which vectors are copied, by their size in bytes, the largest first."""


class UnsupportedCaches(Exception):
    """The layers' caches differ in shape, dtype or strides, or their vectors are not contiguous."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Part of a prompt's KV: the tokens [first_token, end_token) of the rows [first_row, end_row).

    Either the rows are complete, or there is one row.
    """

    first_row: int
    end_row: int
    first_token: int
    end_token: int

    @property
    def num_rows(self) -> int:
        return self.end_row - self.first_row

    @property
    def num_tokens(self) -> int:
        return self.end_token - self.first_token


def split_parts(num_rows: int, num_tokens: int, vector_bytes: int, max_bytes: int) -> list[Part]:
    """Split a prompt's KV into parts of at most `max_bytes`, in the order of the canonical layout.

    A vector has `vector_bytes`, which must fit into `max_bytes`.
    """
    tokens = max(1, min(num_tokens, max_bytes // vector_bytes))
    rows = max(1, max_bytes // (num_tokens * vector_bytes))
    return [
        Part(
            first_row=row,
            end_row=min(row + rows, num_rows),
            first_token=token,
            end_token=min(token + tokens, num_tokens),
        )
        for row, token in itertools.product(range(0, num_rows, rows), range(0, num_tokens, tokens))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCaches:
    """KV caches [B, H, N, 2 * D] of all layers, in any memory order, as words.

    `addresses` are those of the layers' first elements. Sizes and strides are numbers of words of
    `word_bytes`. All vectors are aligned to a multiple of `alignment` bytes.
    """

    tensors: tuple[torch.Tensor, ...]
    addresses: torch.Tensor
    word_bytes: int
    vector_words: int
    strides: tuple[int, int, int]
    alignment: int

    @classmethod
    def of(cls, caches: Sequence[torch.Tensor]) -> Self:
        """Raises UnsupportedCaches unless all caches are alike."""
        first = caches[0]
        for number, cache in enumerate(caches):
            if (cache.shape, cache.dtype) != (first.shape, first.dtype):
                raise UnsupportedCaches(f"layers 0 and {number} differ in shape or dtype")
            if cache.stride() != first.stride():
                raise UnsupportedCaches(f"layers 0 and {number} differ in strides")
        if first.stride(3) != 1:
            raise UnsupportedCaches("the elements of a vector are not contiguous")
        addresses = [cache.data_ptr() for cache in caches]
        vector_bytes = first.shape[3] // 2 * first.itemsize
        sizes = [vector_bytes, *addresses, *(n * first.itemsize for n in first.stride()[:3])]
        word = next((size for size in WORDS if not any(n % size for n in sizes)), None)
        if word is None:
            raise UnsupportedCaches(f"vectors of {first.dtype} are not aligned")
        block, head, token = (n * first.itemsize // word for n in first.stride()[:3])
        return cls(
            tensors=tuple(caches),
            addresses=torch.tensor(addresses, dtype=torch.int64).to(first.device),
            word_bytes=word,
            vector_words=vector_bytes // word,
            strides=(block, head, token),
            alignment=math.gcd(*sizes),
        )

    @property
    def device(self) -> torch.device:
        return self.addresses.device

    @property
    def num_heads(self) -> int:
        return self.tensors[0].shape[1]

    @property
    def num_rows(self) -> int:
        return len(self.tensors) * 2 * self.num_heads

    @property
    def vector_bytes(self) -> int:
        return self.vector_words * self.word_bytes

    def parts(self, num_tokens: int, max_bytes: int) -> Iterator[Part]:
        yield from split_parts(self.num_rows, num_tokens, self.vector_bytes, max_bytes)


def gather_part(
    caches: LayerCaches, block_ids: torch.Tensor, part: Part, out: torch.Tensor
) -> torch.Tensor:
    """Gather a part of a prompt's KV into a buffer of bytes, on the current CUDA stream.

    Returns the bytes written, [rows, tokens, D] without padding.
    """
    num_bytes = part.num_rows * part.num_tokens * caches.vector_bytes
    _, _, block, _ = caches.tensors[0].shape
    assert out.numel() >= num_bytes and out.dtype == torch.uint8, "the buffer is too small"
    assert part.end_token <= len(block_ids) * block, "blocks do not fit tokens"
    tiles = triton.cdiv(part.num_tokens, TOKENS_PER_PROGRAM)
    block_stride, head_stride, token_stride = caches.strides
    _gather_kernel[(part.num_rows * tiles,)](
        caches.addresses,
        block_ids,
        out[:num_bytes].view(WORDS[caches.word_bytes]),
        part.first_row,
        part.first_token,
        part.num_tokens,
        tiles,
        caches.num_heads,
        block,
        block_stride,
        head_stride,
        token_stride,
        vector_words=caches.vector_words,
        padded_words=triton.next_power_of_2(caches.vector_words),
        tokens_per_program=TOKENS_PER_PROGRAM,
    )
    return out[:num_bytes]


# Otherwise the sizes of a prompt would compile several variants while requests are served.
@triton.jit(do_not_specialize=["first_row", "first_token", "num_tokens", "tiles"])
def _gather_kernel(
    addresses,
    block_ids,
    out,
    first_row,
    first_token,
    num_tokens,
    tiles,
    num_heads,
    block_size,
    block_stride,
    head_stride,
    token_stride,
    vector_words: tl.constexpr,
    padded_words: tl.constexpr,
    tokens_per_program: tl.constexpr,
):
    local_row = tl.program_id(0) // tiles
    row = first_row + local_row
    layer = row // (2 * num_heads)
    is_value = row // num_heads % 2
    head = row % num_heads
    local = tl.program_id(0) % tiles * tokens_per_program + tl.arange(0, tokens_per_program)
    words = tl.arange(0, padded_words)
    is_token = local < num_tokens
    mask = is_token[:, None] & (words < vector_words)[None, :]
    tokens = first_token + local
    blocks = tl.load(block_ids + tokens // block_size, mask=is_token, other=0).to(tl.int64)
    cache = tl.load(addresses + layer).to(tl.pointer_type(out.dtype.element_ty))
    starts = blocks * block_stride + tokens % block_size * token_stride
    starts += head.to(tl.int64) * head_stride + is_value * vector_words
    vectors = tl.load(cache + starts[:, None] + words[None, :], mask=mask, other=0)
    targets = (local_row.to(tl.int64) * num_tokens + local) * vector_words
    tl.store(out + targets[:, None] + words[None, :], vectors, mask=mask)
