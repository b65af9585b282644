"""The Triton scatter of KV blocks in Triton's interpreter; run like interpreted_attention.py."""

import pytest
import torch

from kernels import kv_scatter_cuda
from kernels.kv_gather_cuda import LayerCaches, Part, split_parts
from kernels.kv_scatter_cuda import Rotation, scatter_part
from tests.kernels.interpreted_gather import caches_of
from tests.kernels.kv_layout_reference import slow_scatter
from tests.kernels.rope_shift_reference import slow_shift
from tests.kernels.test_kv_layout import LAYERS, LAYOUTS, SHAPES, random_values
from tests.kernels.test_rope_shift import HEAD_DIM, KINDS, rotary

CPU = torch.device("cpu")


def scatter_span(
    span: torch.Tensor, caches: LayerCaches, ids: list[int], rotation: Rotation | None = None
) -> None:
    whole = Part(first_row=0, end_row=caches.num_rows, first_token=0, end_token=span.shape[3])
    scatter_part(span.data_ptr(), span.stride()[:3], whole, caches, torch.tensor(ids), rotation)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [*((layout, torch.bfloat16) for layout in LAYOUTS), ("NHD", torch.float32)],
)
@pytest.mark.parametrize(("heads", "block", "dim", "ids", "num_tokens"), SHAPES)
def test_scatter_writes_the_given_tokens_only(
    heads: int,
    block: int,
    dim: int,
    ids: list[int],
    num_tokens: int,
    layout: str,
    dtype: torch.dtype,
) -> None:
    """From a part of the heads and tokens of a larger prompt."""
    dim *= 2  # keys that can be rotated have an even size
    caches = caches_of(heads, block, dim, layout, dtype)
    whole = random_values(LAYERS, 2, heads + 2, num_tokens + 5, dim, dtype=dtype)
    span = whole[:, :, 1 : heads + 1, 3 : num_tokens + 3]
    expected = [cache.clone() for cache in caches]
    slow_scatter(span, expected, ids)
    scatter_span(span, LayerCaches.of(caches), ids)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(caches, expected, strict=True))


@pytest.mark.parametrize("max_vectors", [60, 7])
def test_parts_are_written_alone(max_vectors: int) -> None:
    """Some rows, or some tokens of a row, as they are in a pinned buffer."""
    caches, ids, tokens = caches_of(2, 16, 8, "NHD", torch.float16), [3, 1], 20
    values = random_values(LAYERS, 2, 2, tokens, 8, dtype=torch.float16)
    expected = [cache.clone() for cache in caches]
    slow_scatter(values, expected, ids)
    layers, rows = LayerCaches.of(caches), values.view(-1, tokens, 8)
    for part in split_parts(layers.num_rows, tokens, 16, 16 * max_vectors):
        row = part.num_tokens * 8
        some = rows[part.first_row : part.end_row, part.first_token : part.end_token].clone()
        address = some.data_ptr() - part.first_row * row * 2
        scatter_part(address, (4 * row, 2 * row, row), part, layers, torch.tensor(ids))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(caches, expected, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_are_rotated_and_values_are_not(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_scatter_cuda, "MAX_PROGRAMS", 3)  # each program copies several tiles
    caches, ids, tokens = caches_of(2, 16, HEAD_DIM, "HND", dtype), [5, 0, 2, 7, 1], 70
    span = random_values(LAYERS, 2, 2, tokens, HEAD_DIM, dtype=dtype)
    moved = span.double()
    moved[:, 0] = slow_shift(span[:, 0].contiguous(), 57, rotary(kind))
    expected = [cache.double() for cache in caches]
    slow_scatter(moved, expected, ids)
    scatter_span(span, LayerCaches.of(caches), ids, Rotation.of(rotary(kind), 57, CPU))
    tolerance = 1e-6 if dtype is torch.float32 else 2e-2
    for cache, want in zip(caches, expected, strict=True):
        values = slice(HEAD_DIM, None)
        assert torch.equal(cache[..., values].double(), want[..., values])
        torch.testing.assert_close(cache.double(), want, atol=tolerance, rtol=tolerance)


def test_rotation_by_nothing_is_exact_and_vectors_need_not_be_powers_of_two() -> None:
    caches = caches_of(2, 16, 80, "NHD", torch.float16)
    span = random_values(LAYERS, 2, 2, 40, 80, dtype=torch.float16)
    expected = [cache.clone() for cache in caches]
    slow_scatter(span, expected, [3, 8, 1])
    rotation = Rotation(cos_sin=torch.stack((torch.ones(20), torch.zeros(20))))
    scatter_span(span, LayerCaches.of(caches), [3, 8, 1], rotation)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(caches, expected, strict=True))
