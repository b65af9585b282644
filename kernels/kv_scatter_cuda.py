"""Triton kernel: contiguous KV to cache blocks of all layers, with rotation of keys.

The inverse of kv_gather_cuda, with a rotation of the keys to other positions (see rope_shift). The
KV may be in host memory that the GPU can address: then the kernel reads it over the bus, and
nothing is staged in GPU memory.

The canonical layout of a prompt is [L, 2, H, T, D]. Here it is L * 2 * H rows of T vectors of D
elements. A row's vectors are contiguous, and rows may have any strides.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import torch
import triton
import triton.language as tl

from kernels.kv_gather_cuda import LayerCaches, Part
from kernels.rope_shift import RotaryParams

TOKENS_PER_TILE: Final = 32
MAX_PROGRAMS: Final = 512
"""Enough for several reads in flight on every multiprocessor; each program copies many tiles."""
TYPES: Final = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Rotation of keys by a number of positions: cosines and sines [2, R / 2] on the GPU."""

    cos_sin: torch.Tensor

    @classmethod
    def of(cls, rotary: RotaryParams, shift: int, device: torch.device) -> Self:
        angles = torch.stack(rotary.cos_sin(shift))
        pinned = torch.empty(angles.shape, pin_memory=device.type == "cuda").copy_(angles)
        return cls(cos_sin=pinned.to(device, non_blocking=True))


def scatter_part(
    address: int,
    strides: Sequence[int],
    part: Part,
    caches: LayerCaches,
    block_ids: torch.Tensor,
    rotation: Rotation | None = None,
) -> None:
    """Scatter a part of a prompt's KV into the prompt's blocks, on the current CUDA stream.

    `address` is where the part's first token would be if the part had row 0. `strides` are those
    of layers, of keys and values, and of heads, in elements. Only the part is read.
    """
    cache = caches.tensors[0]
    head_dim, size = cache.shape[3] // 2, cache.itemsize
    half = head_dim // 2 if rotation is None else rotation.cos_sin.shape[1]
    assert part.end_token <= len(block_ids) * cache.shape[2], "blocks do not fit tokens"
    assert part.end_row <= caches.num_rows, "the cache has fewer rows"
    tiles_per_row = triton.cdiv(part.num_tokens, TOKENS_PER_TILE)
    num_tiles = part.num_rows * tiles_per_row
    angles = caches.addresses if rotation is None else rotation.cos_sin  # not read if there is none
    aligned = (address, half * size, head_dim * size, *(stride * size for stride in strides))
    _scatter_kernel[(min(num_tiles, MAX_PROGRAMS),)](
        address,
        caches.addresses,
        block_ids,
        angles,
        *strides,
        part.first_row,
        part.first_token,
        part.num_tokens,
        num_tiles,
        tiles_per_row,
        caches.num_heads,
        cache.shape[2],
        *cache.stride()[:3],
        element=TYPES[cache.dtype],
        head_dim=head_dim,
        half=half,
        padded_half=triton.next_power_of_2(half),
        padded_rest=triton.next_power_of_2(head_dim - 2 * half) if head_dim > 2 * half else 0,
        is_rotated=rotation is not None,
        alignment=math.gcd(16, caches.alignment, *aligned),
        tokens_per_tile=TOKENS_PER_TILE,
    )


# Otherwise the sizes of a prompt would compile several variants while requests are served.
@triton.jit(
    do_not_specialize=[
        "source",
        "source_layer_stride",
        "source_kind_stride",
        "source_head_stride",
        "first_row",
        "first_token",
        "num_tokens",
        "num_tiles",
        "tiles_per_row",
    ]
)
def _scatter_kernel(
    source,
    addresses,
    block_ids,
    cos_sin,
    source_layer_stride,
    source_kind_stride,
    source_head_stride,
    first_row,
    first_token,
    num_tokens,
    num_tiles,
    tiles_per_row,
    num_heads,
    block_size,
    block_stride,
    head_stride,
    token_stride,
    element: tl.constexpr,
    head_dim: tl.constexpr,
    half: tl.constexpr,
    padded_half: tl.constexpr,
    padded_rest: tl.constexpr,
    is_rotated: tl.constexpr,
    alignment: tl.constexpr,
    tokens_per_tile: tl.constexpr,
):
    pairs = tl.arange(0, padded_half)
    if is_rotated:
        cosine = tl.load(cos_sin + pairs, mask=pairs < half, other=1.0)[None, :]
        sine = tl.load(cos_sin + half + pairs, mask=pairs < half, other=0.0)[None, :]
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        row = first_row + tile // tiles_per_row
        layer = (row // (2 * num_heads)).to(tl.int64)
        is_value = row // num_heads % 2
        head = (row % num_heads).to(tl.int64)
        local = tile % tiles_per_row * tokens_per_tile + tl.arange(0, tokens_per_tile)
        is_token = local < num_tokens
        tokens = first_token + local
        start = source.to(tl.pointer_type(element))
        start += layer * source_layer_stride + is_value * source_kind_stride
        start = tl.multiple_of(start + head * source_head_stride, alignment)
        vectors = start + local[:, None] * head_dim
        blocks = tl.load(block_ids + tokens // block_size, mask=is_token, other=0).to(tl.int64)
        cache = tl.load(addresses + layer).to(tl.pointer_type(element))
        cache = tl.multiple_of(cache, alignment)
        offsets = blocks * block_stride + tokens % block_size * token_stride
        targets = cache + (offsets + head * head_stride + is_value * head_dim)[:, None]
        mask = is_token[:, None] & (pairs < half)[None, :]
        first = tl.load(vectors + pairs[None, :], mask=mask, other=0.0)
        second = tl.load(vectors + half + pairs[None, :], mask=mask, other=0.0)
        if is_rotated:
            one, two = first.to(tl.float32), second.to(tl.float32)
            first = tl.where(is_value == 0, (one * cosine - two * sine).to(element), first)
            second = tl.where(is_value == 0, (two * cosine + one * sine).to(element), second)
        tl.store(targets + pairs[None, :], first, mask=mask)
        tl.store(targets + half + pairs[None, :], second, mask=mask)
        if padded_rest > 0:
            rest = tl.arange(0, padded_rest)[None, :] + 2 * half
            rest_mask = is_token[:, None] & (rest < head_dim)
            others = tl.load(vectors + rest, mask=rest_mask, other=0.0)
            tl.store(targets + rest, others, mask=rest_mask)
