"""Attention over the parts of a plan equals plain attention: two references in float64."""

import pytest
import torch
from hypothesis import given, settings

from tests.kernels import attention_reference
from tests.kernels.decode_steps import HYDRAGEN, Levels, Shape, step_of
from tests.kernels.tree_strategies import Drawn, random_values


def assert_same(levels: Levels, shape: Shape, query_tokens: list[int] | int, seed: int) -> None:
    plan, step = step_of(levels, shape, query_tokens=query_tokens, seed=seed)
    out, lse = attention_reference.split_attention(plan, step)
    want, want_lse = attention_reference.full_attention(step)
    torch.testing.assert_close(out, want, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(lse, want_lse, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("levels", HYDRAGEN, ids=str)
def test_sharing_changes_nothing_at_hydragen_sizes(levels: Levels) -> None:
    assert_same(levels, Shape(head_size=32), 1, seed=0)


@settings(deadline=None, max_examples=10)
@given(random_values())
def test_sharing_changes_nothing_in_any_tree(case: Drawn) -> None:
    assert_same(case.levels, case.shape, case.query_tokens, case.seed)
