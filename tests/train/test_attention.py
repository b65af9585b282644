"""Attention in two merged parts, and its gradient, equal attention over the concatenation.

Shapes: T packed tokens, P prompt tokens, K key and value heads, D head size.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coppice.train.attention.reference import reference_attention
from coppice.train.attention.shared_prompt import (
    MAX_TILED_TOKENS,
    AttentionTile,
    causal_attention,
    shared_prompt_attention,
    split_into_tiles,
)
from coppice.train.attention.windows_and_sinks import (
    CHUNK,
    MAX_CALL_KEYS,
    LayerAttention,
    window_calls,
)
from coppice.train.packed_row import Branch, Spans

pytestmark = pytest.mark.slow

# Equal and different lengths, in one tile and in many, with empty rows between them.
ROWS = [
    Spans(lengths=lengths)
    for lengths in [(1,), (5, 5, 5), (7, 1, 1, 3), (0, 2, 0, 2, 0), (33, 70), (130, 130), (300,)]
]
# Two below one, the second of which has two more below it, and a separate last one.
ROWS.append(
    Spans(
        lengths=(4, 3, 70, 2, 0, 2, 5),
        branches=(Branch(start=0, stop=4, end=81), Branch(start=7, stop=77, end=81)),
    )
)
LIMITS = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def tensors(num_kv_heads: int, P: int, T: int, dtype: torch.dtype) -> list[Tensor]:
    """q, the prompt's k and v, k and v, in the layout of a model's projections."""
    generator = torch.Generator().manual_seed(0)
    heads = [(4, T), (num_kv_heads, P), (num_kv_heads, P), (num_kv_heads, T), (num_kv_heads, T)]
    return [
        (2 * torch.randn(1, tokens, num_heads, 16, generator=generator, dtype=torch.float64))
        .to(dtype)
        .transpose(1, 2)
        .requires_grad_()
        for num_heads, tokens in heads
    ]


def distance(found: Tensor, exact: Tensor) -> float:
    difference = found.detach().double() - exact.detach().double()
    return float(difference.norm() / exact.detach().double().norm())


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("spans", ROWS, ids=str)
@pytest.mark.parametrize("P", [0, 1, 61, 300])
def test_two_merged_parts_equal_the_whole(
    P: int, spans: Spans, num_kv_heads: int, dtype: torch.dtype
) -> None:
    q, prompt_k, prompt_v, k, v = given = tensors(num_kv_heads, P, spans.num_tokens, dtype)
    exact_given = [tensor.detach().double().requires_grad_() for tensor in given]
    found = shared_prompt_attention(q, (prompt_k, prompt_v), k, v, spans, LayerAttention(scale=0.3))
    eq, eprompt_k, eprompt_v, ek, ev = exact_given
    exact = reference_attention(
        eq, (eprompt_k, eprompt_v), ek, ev, spans, LayerAttention(scale=0.3)
    )
    upstream = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found_grads = torch.autograd.grad(found, given, upstream)
    exact_grads = torch.autograd.grad(exact, exact_given, upstream.double())
    limit = LIMITS[dtype]
    assert distance(found, exact) < limit
    for found_grad, exact_grad in zip(found_grads, exact_grads, strict=True):
        # Without a prompt, the softmax of a row of one token is constant: its query has no
        # gradient.
        assert (found_grad.double() - exact_grad).norm() < limit * max(exact_grad.norm(), 10)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [1, 70, 400, None])
@pytest.mark.parametrize("spans", ROWS, ids=str)
@pytest.mark.parametrize("P", [0, 61, 300])
def test_windows_and_sinks_equal_the_reference(
    P: int, spans: Spans, window: int | None, has_sinks: bool, dtype: torch.dtype
) -> None:
    given = tensors(2, P, spans.num_tokens, dtype)
    if has_sinks:
        given.append(torch.tensor([-2.0, 0.0, 1.0, 4.0], dtype=dtype, requires_grad=True))
    exact_given = [tensor.detach().double().requires_grad_() for tensor in given]

    def attend(function: Any, tensors: list[Tensor]) -> Tensor:
        q, prompt_k, prompt_v, k, v, *sinks = tensors
        layer = LayerAttention(scale=0.3, window=window, sinks_H=sinks[0] if sinks else None)
        output: Tensor = function(q, (prompt_k, prompt_v), k, v, spans, layer)
        return output

    found = attend(shared_prompt_attention, given)
    exact = attend(reference_attention, exact_given)
    upstream = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found_grads = torch.autograd.grad(found, given, upstream)
    exact_grads = torch.autograd.grad(exact, exact_given, upstream.double())
    limit = LIMITS[dtype]
    assert distance(found, exact) < limit
    for found_grad, exact_grad in zip(found_grads, exact_grads, strict=True):
        assert (found_grad.double() - exact_grad).norm() < limit * max(exact_grad.norm(), 10)


@pytest.mark.parametrize("window", [1, 2, 5, 100])
def test_each_query_of_a_windowed_layer_is_in_one_call(window: int) -> None:
    spans, P = ROWS[-1], 9
    positions = torch.cat([torch.arange(P), spans.depths() + P])
    found = torch.zeros(spans.num_tokens, dtype=torch.int64)
    for call in window_calls(P, spans, window):
        for queries, keys in zip(call.query_index_NQ, call.key_index_NR, strict=True):
            found[queries] += 1
            distance = positions[P + queries][:, None] - positions[keys]
            assert torch.equal((distance >= 0) & (distance < window), call.mask_QR)
    assert found.eq(1).all()


def test_windowed_layer_gathers_a_bounded_number_of_keys_per_call() -> None:
    calls = list(window_calls(0, Spans(lengths=(40 * CHUNK,)), 3 * CHUNK))
    assert max(call.key_index_NR.numel() for call in calls) <= MAX_CALL_KEYS
    assert sum(call.query_index_NQ.numel() for call in calls) == 40 * CHUNK


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("T", [1, 128, 300, MAX_TILED_TOKENS + 1])
def test_single_row_attends_causally(T: int, dtype: torch.dtype) -> None:
    q, _, _, k, v = tensors(2, 0, T, dtype)
    exact_q, exact_k, exact_v = (x.detach().double().requires_grad_() for x in (q, k, v))
    found = causal_attention(q, k, v, LayerAttention(scale=0.3))
    exact = F.scaled_dot_product_attention(
        exact_q, exact_k, exact_v, is_causal=True, scale=0.3, enable_gqa=True
    )
    limit = LIMITS[dtype]
    assert distance(found, exact) < limit
    found_grads = torch.autograd.grad(found.sum(), (q, k, v))
    exact_grads = torch.autograd.grad(exact.sum(), (exact_q, exact_k, exact_v))
    for found_grad, exact_grad in zip(found_grads, exact_grads, strict=True):
        assert (found_grad.double() - exact_grad).norm() < LIMITS[dtype] * max(
            exact_grad.norm(), 10
        )


@pytest.mark.parametrize("tile", [1, 2, 4, 128])
@pytest.mark.parametrize("spans", ROWS, ids=str)
def test_tiles_cover_the_reference_mask_exactly_once(spans: Spans, tile: int) -> None:
    places_1HT = torch.arange(spans.num_tokens).view(1, 1, -1)
    read = torch.zeros(spans.num_tokens, spans.num_tokens, dtype=torch.int64)
    for piece in split_into_tiles(spans, tile):
        for keys, queries in zip(piece.keys(places_1HT), piece.queries(places_1HT), strict=True):
            pairs = torch.ones(piece.num_queries, piece.num_keys, dtype=torch.int64)
            read[queries[0][:, None], keys[0]] += pairs.tril() if piece.is_causal else pairs
    behind = torch.arange(spans.num_tokens)
    mask = (behind[:, None] >= behind) & (behind[:, None] < spans.ends())
    assert torch.equal(read, mask.long())


def test_equal_rows_and_tiles_of_a_long_row_are_one_call() -> None:
    assert list(split_into_tiles(Spans(lengths=(0, 3, 3, 5)), 8)) == [
        AttentionTile(0, 2, 3, num_keys=3, num_queries=3),
        AttentionTile(6, 1, 5, num_keys=5, num_queries=5),
    ]
    assert list(split_into_tiles(Spans(lengths=(7,)), 2)) == [
        AttentionTile(0, 3, 2, num_keys=2, num_queries=2),
        AttentionTile(6, 1, 7, num_keys=1, num_queries=1),
        AttentionTile(0, 1, 4, num_keys=2, num_queries=2, num_before=2),
        AttentionTile(4, 1, 7, num_keys=2, num_queries=1, num_before=2),
        AttentionTile(0, 1, 7, num_keys=4, num_queries=3, num_before=4),
    ]


def test_tile_is_a_view_of_its_rows() -> None:
    packed_1HTD = torch.arange(2 * 6 * 3.0).view(1, 2, 6, 3)
    [piece] = split_into_tiles(Spans(lengths=(3, 3)))
    rows_NHRD = piece.queries(packed_1HTD)
    assert rows_NHRD.shape == (2, 2, 3, 3)
    assert torch.equal(rows_NHRD[1], packed_1HTD[0, :, 3:])
    rows_NHRD.zero_()
    assert not packed_1HTD.any()
