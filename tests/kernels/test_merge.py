"""The merge of partial softmaxes, against one softmax over everything."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.attention_reference import attention_over, merge
from tests.sample_sizes import num_examples

HEAD_SIZES = [1, 63, 64, 80, 96, 112, 128, 129, 192, 256]


def pieces(
    lengths: list[int], head_size: int, *, loud: float = 1.0, seed: int = 0
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """A query and runs of keys and values; each run's keys are larger than the one's before."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(3, 4, head_size, generator=generator, dtype=torch.float64)
    keys = [
        torch.randn(n, 2, head_size, generator=generator, dtype=torch.float64) * loud**i
        for i, n in enumerate(lengths)
    ]
    values = [
        torch.randn(n, 2, head_size, generator=generator, dtype=torch.float64) for n in lengths
    ]
    return query, keys, values


def merged(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> tuple[Tensor, Tensor]:
    parts = [
        attention_over(query, k, v, 1.0, causal=False) for k, v in zip(keys, values, strict=True)
    ]
    outs, lses = zip(*parts, strict=True)
    return merge(torch.stack(outs), torch.stack(lses))


def assert_as_one(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> None:
    out, lse = merged(query, keys, values)
    want, want_lse = attention_over(query, torch.cat(keys), torch.cat(values), 1.0, causal=False)
    torch.testing.assert_close(out, want, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(lse, want_lse, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_parts_merge_to_the_softmax_over_all_of_them(head_size: int) -> None:
    assert_as_one(*pieces([5, 1, 9], head_size))


@settings(deadline=None, max_examples=num_examples(50))
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any),
    head_size=st.sampled_from(HEAD_SIZES),
    seed=st.integers(0, 2**16),
)
def test_any_number_of_parts_merges_with_some_empty(
    lengths: list[int], head_size: int, seed: int
) -> None:
    assert_as_one(*pieces(lengths, head_size, seed=seed))


@pytest.mark.parametrize("gap", [-700.0, -80.0, -50.0, 50.0, 80.0, 700.0])
def test_part_far_above_another_does_not_overflow(gap: float) -> None:
    outs = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    out, lse = merge(outs, torch.tensor([3.0, 3.0 + gap], dtype=torch.float64))
    share = torch.sigmoid(torch.tensor(gap, dtype=torch.float64))
    torch.testing.assert_close(out, (1 + share).reshape(1), atol=1e-12, rtol=0)
    assert lse == pytest.approx(3 + max(gap, 0), abs=1e-12)


def test_empty_part_is_ignored_whatever_it_contains() -> None:
    outs = torch.tensor([[1.5], [torch.nan]])
    out, lse = merge(outs, torch.tensor([0.25, -torch.inf]))
    assert (out.item(), lse.item()) == (1.5, 0.25)


def test_parts_that_are_all_empty_give_zero() -> None:
    out, lse = merge(torch.full((2, 1), torch.nan), torch.full((2,), -torch.inf))
    assert (out.item(), lse.item()) == (0.0, -torch.inf)
