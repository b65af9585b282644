"""The Triton gather of KV blocks in Triton's interpreter; run like interpreted_attention.py."""

import pytest
import torch

from kernels.kv_gather_cuda import LayerCaches, gather_part
from tests.kernels.kv_layout_reference import gather_by_layer
from tests.kernels.test_kv_layout import BLOCKS, LAYERS, LAYOUTS, SHAPES, random_values


def caches_of(
    heads: int, block: int, dim: int, layout: str, dtype: torch.dtype
) -> list[torch.Tensor]:
    stored = LAYOUTS[layout]
    shape = (LAYERS, BLOCKS, heads, block, 2 * dim)
    memory = random_values(*(shape[axis] for axis in stored), dtype=dtype)
    return list(memory.permute(*(stored.index(axis) for axis in range(5))))


def gathered(
    caches: list[torch.Tensor], ids: list[int], num_tokens: int, max_bytes: int
) -> torch.Tensor:
    """The canonical layout, gathered part by part through a buffer that held other bytes."""
    layers, parts = LayerCaches.of(caches), []
    for part in layers.parts(num_tokens, max_bytes):
        buffer = torch.full((max_bytes,), 0xAB, dtype=torch.uint8)
        parts.append(gather_part(layers, torch.tensor(ids), part, buffer).clone())
        assert (buffer[len(parts[-1]) :] == 0xAB).all()
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [*((layout, torch.bfloat16) for layout in LAYOUTS), ("NHD", torch.float32)],
)
@pytest.mark.parametrize(("heads", "block", "dim", "ids", "num_tokens"), SHAPES)
def test_gather_equals_copies_of_each_layer(
    heads: int,
    block: int,
    dim: int,
    ids: list[int],
    num_tokens: int,
    layout: str,
    dtype: torch.dtype,
) -> None:
    """With buffers for everything, for a few rows, and for a part of a row."""
    caches = caches_of(heads, block, dim, layout, dtype)
    out = torch.empty(LAYERS, 2, heads, num_tokens, dim, dtype=dtype)
    gather_by_layer(caches, torch.tensor(ids), out)
    expected = out.view(-1).view(torch.uint8)
    vector = dim * dtype.itemsize
    for max_bytes in (out.nbytes, 3 * vector * num_tokens, 9 * vector):
        assert torch.equal(gathered(caches, ids, num_tokens, max_bytes), expected)


def test_vectors_that_are_no_power_of_two_are_padded_in_the_kernel_only() -> None:
    caches = caches_of(2, 16, 80, "NHD", torch.float16)
    out = torch.empty(LAYERS, 2, 2, 40, 80, dtype=torch.float16)
    gather_by_layer(caches, torch.tensor([3, 8, 1]), out)
    found = gathered(caches, [3, 8, 1], 40, out.nbytes)
    assert torch.equal(found, out.view(-1).view(torch.uint8))
