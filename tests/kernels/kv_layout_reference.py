"""Reference implementation of packing and unpacking, one vector or value at a time."""

import ctypes
from collections.abc import Sequence

import torch

from kernels.kv_block_copy import PackOrder
from kernels.kv_gather_cuda import LayerCaches, Part
from kernels.kv_scatter_cuda import Rotation


def slow_unpack(
    caches: Sequence[torch.Tensor], block_ids: Sequence[int], order: PackOrder, out: torch.Tensor
) -> None:
    layers, two, heads, num_tokens, head_dim = out.shape
    block = caches[0].shape[2]
    for layer in range(layers):
        for head in range(heads):
            for token in range(num_tokens):
                packed = caches[layer][block_ids[token // block], head].flatten()
                keys, values = packed[: block * head_dim], packed[block * head_dim :]
                for channel in range(head_dim):
                    index = token % block * head_dim + channel
                    out[layer, 0, head, token, channel] = keys[order.keys[index]]
                    out[layer, 1, head, token, channel] = values[order.values[index]]


def slow_gather(
    caches: Sequence[torch.Tensor], block_ids: Sequence[int], out: torch.Tensor
) -> None:
    layers, two, heads, num_tokens, head_dim = out.shape
    block = caches[0].shape[2]
    for layer in range(layers):
        for head in range(heads):
            for token in range(num_tokens):
                both = caches[layer][block_ids[token // block], head, token % block]
                out[layer, 0, head, token] = both[:head_dim]
                out[layer, 1, head, token] = both[head_dim:]


def gather_by_layer(
    caches: Sequence[torch.Tensor], block_ids: torch.Tensor, out: torch.Tensor
) -> None:
    """Copy a prompt's KV from unpacked blocks to the canonical layout, by PyTorch, per layer."""
    num_tokens = out.shape[3]
    for cache, layer in zip(caches, out, strict=True):
        blocks = cache.index_select(0, block_ids)  # [n, H, N, 2 * D]
        halves = blocks.view(*blocks.shape[:3], 2, -1).permute(3, 1, 0, 2, 4)  # [2, H, n, N, D]
        layer.copy_(halves.flatten(2, 3)[:, :, :num_tokens])


def gather_part_by_layer(
    caches: LayerCaches, block_ids: torch.Tensor, part: Part, out: torch.Tensor
) -> torch.Tensor:
    """Like gather_part, by PyTorch."""
    _, heads, block, content = caches.tensors[0].shape
    num_tokens = len(block_ids) * block
    whole = caches.tensors[0].new_empty(len(caches.tensors), 2, heads, num_tokens, content // 2)
    gather_by_layer(caches.tensors, block_ids, whole)
    rows = whole.view(-1, num_tokens, content // 2)[part.first_row : part.end_row]
    values = rows[:, part.first_token : part.end_token].reshape(-1).view(torch.uint8)
    out[: len(values)] = values
    return out[: len(values)]


def slow_pack(
    values: torch.Tensor, caches: Sequence[torch.Tensor], block_ids: Sequence[int], order: PackOrder
) -> None:
    layers, two, heads, num_tokens, head_dim = values.shape
    block = caches[0].shape[2]
    for layer in range(layers):
        for head in range(heads):
            for token in range(num_tokens):
                packed = caches[layer][block_ids[token // block], head].view(-1)
                keys, rest = packed[: block * head_dim], packed[block * head_dim :]
                for channel in range(head_dim):
                    index = token % block * head_dim + channel
                    keys[order.keys[index]] = values[layer, 0, head, token, channel]
                    rest[order.values[index]] = values[layer, 1, head, token, channel]


def slow_scatter(
    values: torch.Tensor, caches: Sequence[torch.Tensor], block_ids: Sequence[int]
) -> None:
    layers, two, heads, num_tokens, head_dim = values.shape
    block = caches[0].shape[2]
    for layer in range(layers):
        for head in range(heads):
            for token in range(num_tokens):
                both = caches[layer][block_ids[token // block], head, token % block]
                both[:head_dim] = values[layer, 0, head, token]
                both[head_dim:] = values[layer, 1, head, token]


def scatter_part_by_vector(
    address: int,
    strides: Sequence[int],
    part: Part,
    caches: LayerCaches,
    block_ids: torch.Tensor,
    rotation: Rotation | None = None,
) -> None:
    """Like scatter_part, one vector at a time."""
    _, heads, block, content = caches.tensors[0].shape
    dtype, size = caches.tensors[0].dtype, content // 2
    for row in range(part.first_row, part.end_row):
        layer, kind, head = row // (2 * heads), row // heads % 2, row % heads
        start = layer * strides[0] + kind * strides[1] + head * strides[2]
        for number, token in enumerate(range(part.first_token, part.end_token)):
            at = address + (start + number * size) * dtype.itemsize
            vector = torch.frombuffer(
                bytearray(ctypes.string_at(at, size * dtype.itemsize)), dtype=dtype
            )
            if rotation is not None and not kind:
                vector = _rotated(vector, rotation)
            target = caches.tensors[layer][block_ids[token // block], head, token % block]
            target[kind * size : (kind + 1) * size] = vector


def _rotated(key: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    cosines, sines = rotation.cos_sin.double()
    half, moved = len(cosines), key.double()
    first, second = key[:half].double(), key[half : 2 * half].double()
    moved[:half] = first * cosines - second * sines
    moved[half : 2 * half] = second * cosines + first * sines
    return moved.to(key.dtype)
