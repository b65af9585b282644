"""Attention in two merged parts is the attention over the concatenation, and so is its gradient.

Shapes: T packed tokens, P prompt tokens, K key and value heads, D head size.
"""

import pytest
import torch
from torch import Tensor

from coppice.train.attention import blocks_of, shared_prompt_attention
from coppice.train.reference import reference_attention
from coppice.train.spans import Branch, Spans

pytestmark = pytest.mark.slow

# Of the same lengths and others, in one block and in many, with rows of nothing between them.
ROWS = [
    Spans(lengths=lengths)
    for lengths in [(1,), (5, 5, 5), (7, 1, 1, 3), (0, 2, 0, 2, 0), (33, 70), (130, 130)]
]
# Two below one, the second of which has two more below it, and a last one that stands alone.
ROWS.append(
    Spans(
        lengths=(4, 3, 70, 2, 0, 2, 5),
        branches=(Branch(start=0, stop=4, end=81), Branch(start=7, stop=77, end=81)),
    )
)
LIMITS = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def tensors(num_kv_heads: int, P: int, T: int, dtype: torch.dtype) -> list[Tensor]:
    """q, the prompt's k and v, k and v, laid out as a model's projections leave them."""
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
def test_two_parts_are_the_whole(
    P: int, spans: Spans, num_kv_heads: int, dtype: torch.dtype
) -> None:
    q, prompt_k, prompt_v, k, v = given = tensors(num_kv_heads, P, spans.num_tokens, dtype)
    exact_given = [tensor.detach().double().requires_grad_() for tensor in given]
    found = shared_prompt_attention(q, (prompt_k, prompt_v), k, v, spans, 0.3)
    eq, eprompt_k, eprompt_v, ek, ev = exact_given
    exact = reference_attention(eq, (eprompt_k, eprompt_v), ek, ev, spans, 0.3)
    upstream = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found_grads = torch.autograd.grad(found, given, upstream)
    exact_grads = torch.autograd.grad(exact, exact_given, upstream.double())
    limit = LIMITS[dtype]
    assert distance(found, exact) < limit
    for found_grad, exact_grad in zip(found_grads, exact_grads, strict=True):
        # A row of one token is its own softmax without a prompt: its query has no gradient.
        assert (found_grad.double() - exact_grad).norm() < limit * max(exact_grad.norm(), 10)


def test_neighbours_of_one_length_make_one_block() -> None:
    blocks = list(blocks_of((0, 3, 3, 5, 0, 3)))
    assert [(block.start, block.num_rows, block.row_tokens) for block in blocks] == [
        (0, 2, 3),
        (6, 1, 5),
        (11, 1, 3),
    ]


def test_a_block_is_a_view_of_its_rows() -> None:
    packed_1HTD = torch.arange(2 * 6 * 3.0).view(1, 2, 6, 3)
    [block] = blocks_of((3, 3))
    rows_NHRD = block.of(packed_1HTD)
    assert rows_NHRD.shape == (2, 2, 3, 3)
    assert torch.equal(rows_NHRD[1], packed_1HTD[0, :, 3:])
    rows_NHRD.zero_()
    assert not packed_1HTD.any()
