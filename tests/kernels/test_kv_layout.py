"""Packing and unpacking against the reference, over edge shapes and random orders."""

import pytest
import torch

from kernels.kv_block_copy import (
    MAX_INDICES,
    PackOrder,
    UnknownPacking,
    index_digits,
    infer_order,
    pack,
    unpack,
)
from tests.kernels.kv_layout_reference import (
    gather_by_layer,
    slow_gather,
    slow_pack,
    slow_unpack,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYERS, BLOCKS = 2, 9
# heads, tokens per block, head_dim, the prompt's blocks, its tokens
SHAPES = [
    (1, 1, 1, [3], 1),
    (2, 16, 8, [5], 1),
    (2, 16, 8, [5], 16),
    (3, 16, 4, [8, 0, 4], 33),
    (2, 32, 8, [1, 2, 3, 7], 128),
]


def random_values(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def shuffled(num_values: int, seed: int) -> torch.Tensor:
    return torch.randperm(num_values, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("max_indices", [1, MAX_INDICES])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "block", "dim", "ids", "num_tokens"), SHAPES)
def test_unpack_equals_the_reference_in_any_order(
    heads: int,
    block: int,
    dim: int,
    ids: list[int],
    num_tokens: int,
    dtype: torch.dtype,
    max_indices: int,
) -> None:
    caches = list(random_values(LAYERS, BLOCKS, heads, block, 2 * dim, dtype=dtype))
    order = PackOrder(shuffled(block * dim, 1), shuffled(block * dim, 2))
    out, expected = (torch.empty(LAYERS, 2, heads, num_tokens, dim, dtype=dtype) for _ in "ab")
    unpack(caches, ids, order, out, max_indices=max_indices)
    slow_unpack(caches, ids, order, expected)
    assert torch.equal(out, expected)


# Memory layouts of a GPU's cache, as permutations of [layer, block, head, token, content].
LAYOUTS = {
    "HND": (0, 1, 2, 3, 4),
    "NHD": (0, 1, 3, 2, 4),
    "heads outermost": (0, 2, 1, 3, 4),
    "block-major HND": (1, 0, 2, 3, 4),
    "block-major NHD": (1, 0, 3, 2, 4),
    "block- and head-major": (1, 2, 0, 3, 4),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("heads", "block", "dim", "ids", "num_tokens"), SHAPES)
def test_copies_of_each_layer_equal_the_reference_in_every_layout(
    heads: int, block: int, dim: int, ids: list[int], num_tokens: int, layout: str
) -> None:
    stored = LAYOUTS[layout]
    shape = (LAYERS, BLOCKS, heads, block, 2 * dim)
    memory = random_values(*(shape[axis] for axis in stored), dtype=torch.bfloat16)
    caches = list(memory.permute(*(stored.index(axis) for axis in range(5))))
    assert caches[0].shape == shape[1:]
    out, expected = (
        torch.empty(LAYERS, 2, heads, num_tokens, dim, dtype=torch.bfloat16) for _ in "ab"
    )
    gather_by_layer(caches, torch.tensor(ids), out)
    slow_gather(caches, ids, expected)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("max_indices", [1, MAX_INDICES])
@pytest.mark.parametrize(("heads", "block", "dim", "ids", "num_tokens"), SHAPES)
def test_pack_equals_the_reference_and_writes_nothing_else(
    heads: int, block: int, dim: int, ids: list[int], num_tokens: int, max_indices: int
) -> None:
    caches = random_values(LAYERS, BLOCKS, heads, block, 2 * dim, dtype=torch.bfloat16)
    expected = caches.clone()
    order = PackOrder(shuffled(block * dim, 1), shuffled(block * dim, 2))
    values = random_values(LAYERS, 2, heads, num_tokens, dim, dtype=torch.bfloat16)
    pack(values, list(caches), ids, order, max_indices=max_indices)
    slow_pack(values, list(expected), ids, order)
    assert torch.equal(caches, expected)
    back = torch.empty_like(values)
    unpack(list(caches), ids, order, back)
    assert torch.equal(back, values)


def test_rank_writes_only_its_own_heads() -> None:
    caches = list(random_values(LAYERS, BLOCKS, 2, 16, 16, dtype=torch.float32))
    order = PackOrder(shuffled(128, 1), shuffled(128, 2))
    alone = torch.empty(LAYERS, 2, 2, 20, 8)
    unpack(caches, [4, 1], order, alone)
    whole = torch.full((LAYERS, 2, 6, 20, 8), torch.nan)
    unpack(caches, [4, 1], order, whole[:, :, 2:4])
    assert torch.equal(whole[:, :, 2:4], alone)
    assert whole[:, :, :2].isnan().all() and whole[:, :, 4:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_values", [1, 128, 129, 128 * 128, 128 * 128 + 1])
def test_order_is_learned_from_written_values(num_values: int, dtype: torch.dtype) -> None:
    order = shuffled(num_values, 3)
    written = []
    for digit in index_digits(num_values, dtype):
        packed = torch.empty(2, num_values, dtype=dtype)
        packed[:, order] = digit
        written.append(packed)
    assert torch.equal(infer_order(written), order)


def test_values_that_are_not_a_permutation_are_refused() -> None:
    digits = [digit.expand(2, -1).clone() for digit in index_digits(256, torch.float32)]
    repeated = [digit.clone() for digit in digits]
    for digit in repeated:
        digit[:, 7] = digit[:, 8]
    with pytest.raises(UnknownPacking, match="not a permutation"):
        infer_order(repeated)
    digits[0][1] = digits[0][1].flip(0)
    with pytest.raises(UnknownPacking, match="differently"):
        infer_order(digits)
