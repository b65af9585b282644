"""Reference implementation of packing and unpacking, one vector or value at a time."""

from collections.abc import Sequence

import torch

from kernels.kv_block_copy import PackOrder


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
