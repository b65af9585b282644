"""Both passes of the GPU attention and their merge, in Triton's interpreter.

test_cuda_kernel.py runs this file in a process of its own, because the interpreter must be enabled
before the kernel is imported, and vLLM's Triton kernels must stay compiled in the main process.
FlashAttention is the reference implementation of its interface. Only float16 is tested: Triton
3.9's interpreter reads the bits of bfloat16 values as integers.
"""

from functools import partial

import pytest
import torch
from hypothesis import given, settings

from kernels.shared_prefix_attention import cuda
from kernels.shared_prefix_attention.sharing_plan import SharingPlan
from tests.kernels import attention_reference
from tests.kernels.attention_reference import Step
from tests.kernels.decode_steps import Levels, Shape, nothing_shared, rounded, step_of
from tests.kernels.flash_attention import flash_attn_varlen_func
from tests.kernels.tree_strategies import Drawn, random_values

DTYPE, CLOSE = torch.float16, 3e-3
TREE: Levels = [[64], [32, 64], [5, 70, 1, 31]]


def run(plan: SharingPlan, step: Step, *, longer: int = 0) -> torch.Tensor:
    """The step's attention; the longest suffix may be overestimated, as with rejected drafts."""
    query, keys, values = (x.to(DTYPE) for x in (step.query, step.keys, step.values))
    starts = step.query_start_loc
    lists = cuda.StepLists.of(plan, starts.numpy(), torch.device("cpu"))
    suffix_lens = step.seq_lens.numpy() - plan.suffix_starts
    suffixes = cuda.SuffixTable.of(
        lists,
        block_table=step.block_table.int(),
        seq_lens=step.seq_lens,
        max_len=int(suffix_lens.max()) + longer,
        block_size=keys.shape[1],
    )
    out = torch.full_like(query, torch.nan)
    cuda.attend(
        partial(flash_attn_varlen_func, k=keys, v=values, softmax_scale=step.scale),
        lists,
        suffixes,
        query=query,
        query_starts=starts,
        max_query_len=int(starts.diff().max()),
        out=out,
        node_options={},
        suffix_options={},
    )
    return out


def assert_right(plan: SharingPlan, step: Step, *, longer: int = 0) -> None:
    step = rounded(step, DTYPE)
    torch.testing.assert_close(
        run(plan, step, longer=longer).double(),
        attention_reference.full_attention(step)[0],
        atol=CLOSE,
        rtol=0,
    )


def whole_blocks(levels: Levels, block_size: int) -> Levels:
    """The tree with node lengths rounded down to whole blocks, as the planner's are."""
    *nodes, rows = levels
    return [*([n // block_size * block_size for n in level] for level in nodes), rows]


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 192, 256])
def test_head_sizes(head_size: int) -> None:
    assert_right(*step_of(TREE, Shape(head_size=head_size)))


@pytest.mark.parametrize("num_kv_heads", [1, 8])
def test_grouped_query_heads(num_kv_heads: int) -> None:
    assert_right(*step_of(TREE, Shape(num_heads=8, num_kv_heads=num_kv_heads)))


def test_overestimated_suffixes() -> None:
    assert_right(*step_of(TREE, Shape()), longer=40)


def test_row_without_nodes_beside_rows_with_nodes() -> None:
    assert_right(*step_of([[64, 0], [5, 70, 1, 31]], Shape()))


@settings(deadline=None, max_examples=15)
@given(random_values(longest=130, most_query_tokens=4))
def test_any_tree_of_whole_blocks(case: Drawn) -> None:
    levels = whole_blocks(case.levels, case.shape.block_size)
    plan, step = step_of(levels, case.shape, query_tokens=case.query_tokens, seed=case.seed)
    if len(plan.node_tokens):
        assert_right(plan, step)


def test_a_part_far_above_the_others_decides() -> None:
    """The merge neither overflows nor loses the smaller parts' weights."""
    plan, step = step_of([[64], [3, 4]], Shape())
    lists = cuda.StepLists.of(plan, step.query_start_loc.numpy(), torch.device("cpu"))
    for gap in (-700.0, -20.0, 20.0, 700.0):
        outs, parts = torch.full((2, 1, 64), 1.0), torch.full((2, 1, 64), 2.0)
        lses, part_lses = torch.full((1, 2), 3.0), torch.full((1, 2), 3.0 + gap)
        cuda.merge(lists, parts, part_lses, outs, lses)
        share = torch.sigmoid(torch.tensor(gap))
        torch.testing.assert_close(outs, (1 + share).expand(2, 1, 64), atol=1e-6, rtol=0)


def test_lists_of_a_plan_without_nodes_are_empty() -> None:
    lists = cuda.StepLists.of(
        nothing_shared(2), torch.arange(3, dtype=torch.int32).numpy(), torch.device("cpu")
    )
    assert lists.query_tokens.numel() == 0
    assert lists.token_part_offsets.tolist() == [0, 0, 0]
