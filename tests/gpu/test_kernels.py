"""Copies of KV blocks, key shifts and KV predictions on a GPU, against references on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.rope_shift import parse_rotary
from kernels.span_kv_prediction import Observation, predict, token_weights
from tests.gpu.device import CAN_RUN, DEVICE, ON_GPU
from tests.kernels.kv_layout_reference import slow_gather, slow_scatter
from tests.kernels.kv_predict_reference import slow_predict, slow_weights
from tests.kernels.rope_shift_reference import slow_shift

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CAN_RUN, reason="no GPU")]

LAYERS, HEADS, BLOCK, SIZE, NUM_BLOCKS = 3, 2, 16, 32, 9
ROTARY = parse_rotary({"rope_type": "default", "rope_theta": 10000.0}, SIZE)
PARTIAL = parse_rotary({"rope_theta": 10000.0, "partial_rotary_factor": 0.5}, SIZE)
DTYPES = [torch.bfloat16, torch.float16]
ROUNDING = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def heads_first(dtype: torch.dtype) -> list[torch.Tensor]:
    values = random(LAYERS, NUM_BLOCKS, HEADS, BLOCK, 2 * SIZE, dtype=dtype)
    return list(values.to(DEVICE))


def tokens_first(dtype: torch.dtype) -> list[torch.Tensor]:
    values = random(LAYERS, NUM_BLOCKS, BLOCK, HEADS, 2 * SIZE, dtype=dtype)
    return [layer.transpose(1, 2) for layer in values.to(DEVICE)]


def layers_within_blocks(dtype: torch.dtype) -> list[torch.Tensor]:
    values = random(NUM_BLOCKS, HEADS, LAYERS, BLOCK, 2 * SIZE, dtype=dtype).to(DEVICE)
    return [values[:, :, layer] for layer in range(LAYERS)]


LAYOUTS = [heads_first, tokens_first, layers_within_blocks]
Layout = Callable[[torch.dtype], list[torch.Tensor]]


@pytest.mark.skipif(not ON_GPU, reason="Triton runs kernels on a GPU only")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("num_tokens", [1, BLOCK, 4 * BLOCK - 3])
def test_gather_equals_the_reference(layout: Layout, dtype: torch.dtype, num_tokens: int) -> None:
    """In one part, in parts of some rows, and in parts of a row."""
    from kernels.kv_gather_cuda import LayerCaches, gather_part

    caches, blocks = layout(dtype), [7, 0, 3, 5][: -(-num_tokens // BLOCK)]
    want = torch.empty(LAYERS, 2, HEADS, num_tokens, SIZE, dtype=dtype)
    slow_gather([cache.cpu() for cache in caches], blocks, want)
    layers, ids = LayerCaches.of(caches), torch.tensor(blocks, device=DEVICE)
    vector = SIZE * want.itemsize
    for max_bytes in (want.nbytes, 3 * num_tokens * vector, 5 * vector):
        buffer = torch.empty(max_bytes, dtype=torch.uint8, device=DEVICE)
        parts = [
            gather_part(layers, ids, part, buffer).cpu()
            for part in layers.parts(num_tokens, max_bytes)
        ]
        assert torch.equal(torch.cat(parts), want.view(-1).view(torch.uint8))


@pytest.mark.skipif(not ON_GPU, reason="Triton runs kernels on a GPU only")
@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
def test_scatter_writes_the_given_tokens_only(
    layout: Layout, dtype: torch.dtype, on_host: bool
) -> None:
    """From some heads and tokens of a larger prompt, in pinned memory and in that of the GPU."""
    from kernels.kv_gather_cuda import LayerCaches, Part
    from kernels.kv_scatter_cuda import scatter_part

    caches, blocks, num_tokens = layout(dtype), [2, 8, 1], 2 * BLOCK + 5
    want = [cache.cpu().clone() for cache in caches]
    whole = random(LAYERS, 2, HEADS + 2, num_tokens + 7, SIZE, seed=1, dtype=dtype)
    placed = whole.pin_memory() if on_host else whole.to(DEVICE)
    span = placed[:, :, 1 : HEADS + 1, 3 : num_tokens + 3]
    layers, ids = LayerCaches.of(caches), torch.tensor(blocks, device=DEVICE)
    part = Part(first_row=0, end_row=layers.num_rows, first_token=0, end_token=num_tokens)
    scatter_part(span.data_ptr(), span.stride()[:3], part, layers, ids)
    slow_scatter(whole[:, :, 1 : HEADS + 1, 3 : num_tokens + 3], want, blocks)
    for cache, expected in zip(caches, want, strict=True):
        assert torch.equal(cache.cpu(), expected)


@pytest.mark.skipif(not ON_GPU, reason="Triton runs kernels on a GPU only")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("shift", [1, -1, 57, -3000, 40000])
@pytest.mark.parametrize("rotary", [ROTARY, PARTIAL], ids=["all", "half"])
def test_rotated_keys_equal_the_reference(dtype: torch.dtype, shift: int, rotary: Any) -> None:
    from kernels.kv_gather_cuda import LayerCaches, Part
    from kernels.kv_scatter_cuda import Rotation, scatter_part

    caches, blocks, num_tokens = tokens_first(dtype), [2, 8, 1], 2 * BLOCK + 5
    span = random(LAYERS, 2, HEADS, num_tokens, SIZE, seed=1, dtype=dtype)
    moved, want = span.double(), [cache.cpu().double() for cache in caches]
    moved[:, 0] = slow_shift(span[:, 0].contiguous(), shift, rotary)
    slow_scatter(moved, want, blocks)
    layers, ids = LayerCaches.of(caches), torch.tensor(blocks, device=DEVICE)
    part = Part(first_row=0, end_row=layers.num_rows, first_token=0, end_token=num_tokens)
    there, rotation = span.to(DEVICE), Rotation.of(rotary, shift, ids.device)
    scatter_part(there.data_ptr(), there.stride()[:3], part, layers, ids, rotation)
    tolerance = ROUNDING.get(dtype, 1e-5)
    for cache, expected in zip(caches, want, strict=True):
        torch.testing.assert_close(cache.double().cpu(), expected, atol=tolerance, rtol=tolerance)


def observations(weights: torch.Tensor, device: torch.device) -> list[Observation]:
    shape = (LAYERS, 2, HEADS, 5, SIZE)
    return [
        Observation(
            real=random(*shape, seed=10 + i).to(device),
            shift=3 * i,
            base=random(*shape, seed=20 + i).to(device),
            weights=weights[i].to(device),
        )
        for i in range(len(weights))
    ]


def test_prediction_equals_the_reference() -> None:
    source = random(LAYERS, 2, HEADS, 5, SIZE)
    bases = [random(LAYERS, 2, HEADS, 5, SIZE, seed=20 + i) for i in range(2)]
    want_weights = slow_weights(source, bases)
    weights = token_weights(source.to(DEVICE), [base.to(DEVICE) for base in bases])
    torch.testing.assert_close(weights.double().cpu(), want_weights, atol=1e-5, rtol=1e-5)
    out = torch.empty_like(source, device=DEVICE)
    predict(source.to(DEVICE), 9, observations(weights, DEVICE), ROTARY, out)
    want = slow_predict(source, 9, observations(want_weights, torch.device("cpu")), ROTARY)
    torch.testing.assert_close(out.double().cpu(), want, atol=1e-4, rtol=1e-4)
