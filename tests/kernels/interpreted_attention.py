"""The Triton kernels in Triton's interpreter, which is enabled before they are imported.

test_cuda_kernel.py runs this file in a process of its own: vLLM's Triton kernels must stay compiled
in the main one. Only float16 is tested: Triton 3.9's interpreter multiplies the bits of bfloat16
operands as integers.
"""

import pytest
import torch
from hypothesis import given, settings

from kernels.shared_prefix_attention import cuda
from kernels.shared_prefix_attention.sharing_plan import SharingPlan
from tests.kernels import attention_reference
from tests.kernels.attention_reference import Step
from tests.kernels.decode_steps import HYDRAGEN, Levels, Shape, nothing_shared, rounded, step_of
from tests.kernels.tree_strategies import Drawn, random_values
from tests.kernels.work_lists import Inputs, work_list

DTYPE, CLOSE = torch.float16, 3e-3
TREE: Levels = [[40], [33, 64], [5, 70, 1, 31]]


def assert_right(
    plan: SharingPlan,
    step: Step,
    shape: Shape,
    *,
    query_tokens: int = 1,
    num_processors: int = 2,
) -> None:
    step = rounded(step, DTYPE)
    work = work_list(
        shape,
        num_rows=len(step.seq_lens),
        query_tokens=query_tokens,
        num_processors=num_processors,
        device="cpu",
    )
    assert work.fill(plan, step.seq_lens.numpy() - plan.suffix_starts)
    got = Inputs(step, DTYPE, "cpu").run_decode(work).double()
    torch.testing.assert_close(got, attention_reference.full_attention(step)[0], atol=CLOSE, rtol=0)


@pytest.mark.parametrize("head_size", cuda.HEAD_SIZES)
def test_head_sizes(head_size: int) -> None:
    shape = Shape(head_size=head_size)
    assert_right(*step_of(TREE, shape), shape)


@pytest.mark.parametrize("levels", HYDRAGEN[:3], ids=str)
def test_hydragen_sizes(levels: Levels) -> None:
    shape = Shape(num_heads=8, num_kv_heads=1)
    assert_right(*step_of(levels, shape), shape)


def test_long_prefix_is_cut_into_items() -> None:
    shape = Shape(num_heads=2, num_kv_heads=1)
    plan, step = step_of([[1500], [1, 600]], shape)
    assert_right(plan, step, shape, num_processors=16)


def test_nothing_shared_is_attention_row_by_row() -> None:
    shape = Shape()
    _, step = step_of(TREE, shape)
    assert_right(nothing_shared(len(step.seq_lens)), step, shape)


@settings(deadline=None, max_examples=5)
@given(random_values(longest=70, most_query_tokens=4))
def test_any_tree(case: Drawn) -> None:
    plan, step = step_of(case.levels, case.shape, query_tokens=case.query_tokens, seed=case.seed)
    assert_right(plan, step, case.shape, query_tokens=4)


def test_work_list_buffers_serve_several_plans_and_growing_rows() -> None:
    """As with a captured graph: the same buffers, other contents."""
    shape = Shape()
    work = work_list(shape, num_rows=4, device="cpu")
    for levels in (TREE, [[64], [3, 4]], TREE):
        plan, step = step_of(levels, shape)
        lengths = step.seq_lens.numpy() - plan.suffix_starts
        assert work.fill(plan, lengths // 3)  # made when the suffixes were shorter
        step = rounded(step, DTYPE)
        got = Inputs(step, DTYPE, "cpu").run_decode(work).double()
        torch.testing.assert_close(
            got, attention_reference.full_attention(step)[0], atol=CLOSE, rtol=0
        )


def test_plan_that_does_not_fit_is_refused() -> None:
    shape = Shape()
    plan, step = step_of([[64], [1] * 9], shape)
    work = work_list(shape, num_rows=8, device="cpu")
    assert not work.fill(plan, step.seq_lens.numpy() - plan.suffix_starts)
