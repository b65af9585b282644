"""Copies of KV blocks, key shifts and KV predictions on a GPU, against references on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.kv_block_copy import scatter
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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scatter_writes_the_given_tokens_only(layout: Layout, dtype: torch.dtype) -> None:
    caches, blocks = layout(dtype), [2, 8, 1]
    want = [cache.cpu().clone() for cache in caches]
    values = random(LAYERS, 2, HEADS, 2 * BLOCK + 5, SIZE, seed=1, dtype=dtype)
    scatter(values.to(DEVICE), caches, torch.tensor(blocks, device=DEVICE))
    slow_scatter(values, want, blocks)
    for cache, expected in zip(caches, want, strict=True):
        assert torch.equal(cache.cpu(), expected)


@pytest.mark.skipif(not ON_GPU, reason="Triton runs kernels on a GPU only")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("shift", [1, -1, 57, -3000, 40000])
@pytest.mark.parametrize("rotary", [ROTARY, PARTIAL], ids=["all", "half"])
def test_one_shift_equals_the_reference(dtype: torch.dtype, shift: int, rotary: Any) -> None:
    from kernels.rope_shift_cuda import shift_keys_

    keys = random(LAYERS, HEADS, 37, SIZE, dtype=dtype)
    moved = keys.to(DEVICE)
    shift_keys_(moved, shift, rotary)
    tolerance = ROUNDING.get(dtype, 1e-5)
    torch.testing.assert_close(
        moved.double().cpu(), slow_shift(keys, shift, rotary), atol=tolerance, rtol=tolerance
    )


@pytest.mark.skipif(not ON_GPU, reason="Triton runs kernels on a GPU only")
def test_shift_of_many_rows_and_back_is_the_identity() -> None:
    from kernels.rope_shift_cuda import shift_keys_

    keys = random(28, 8, 4096, 128).to(DEVICE)
    rotary = parse_rotary({"rope_theta": 1000000.0}, 128)
    moved = keys.clone()
    shift_keys_(moved, 1000, rotary)
    assert not torch.allclose(moved, keys, atol=1e-2)
    shift_keys_(moved, -1000, rotary)
    torch.testing.assert_close(moved, keys, atol=1e-5, rtol=0)


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
