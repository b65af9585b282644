"""Both passes of the GPU attention and their merge on a GPU, against the reference."""

from functools import partial
from typing import Any

import pytest
import torch

from kernels.shared_prefix_attention import cuda
from kernels.shared_prefix_attention.sharing_plan import SharingPlan
from tests.kernels import attention_reference
from tests.kernels.attention_reference import Step
from tests.kernels.decode_steps import Levels, Shape, rounded, step_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

CLOSE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
TREE: Levels = [[1024], [320, 640], [5, 200, 32, 1]]


def run(plan: SharingPlan, step: Step, dtype: torch.dtype) -> torch.Tensor:
    from vllm.v1.attention.backends import fa_utils

    device = torch.device("cuda")
    query, keys, values = (x.to(device, dtype) for x in (step.query, step.keys, step.values))
    starts = step.query_start_loc.to(device)
    lists = cuda.StepLists.of(plan, step.query_start_loc.numpy(), device)
    suffixes = cuda.SuffixTable.of(
        lists,
        block_table=step.block_table.to(device),
        seq_lens=step.seq_lens.to(device),
        max_len=int((step.seq_lens.numpy() - plan.suffix_starts).max()),
        block_size=keys.shape[1],
    )
    flash: Any = partial(
        fa_utils.flash_attn_varlen_func,
        k=keys,
        v=values,
        softmax_scale=step.scale,
        fa_version=fa_utils.get_flash_attn_version(head_size=keys.shape[-1]),
    )
    out = torch.full_like(query, torch.nan)
    cuda.attend(
        flash,
        lists,
        suffixes,
        query=query,
        query_starts=starts,
        max_query_len=int(step.query_start_loc.diff().max()),
        out=out,
        node_options={},
        suffix_options={},
    )
    return out


def assert_right(
    levels: Levels, shape: Shape, dtype: torch.dtype, query_tokens: list[int] | int = 1
) -> None:
    plan, step = step_of(levels, shape, query_tokens=query_tokens)
    # Blocks that no row has written hold NaN, which FlashAttention may multiply by zero.
    step = rounded(step, dtype)
    for cache in (step.keys, step.values):
        cache.nan_to_num_(0.0)
    got = run(plan, step, dtype).double().cpu()
    want = attention_reference.full_attention(step)[0]
    torch.testing.assert_close(got, want, atol=CLOSE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", cuda.DTYPES, ids=str)
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 192, 256])
def test_head_sizes(head_size: int, dtype: torch.dtype) -> None:
    assert_right(TREE, Shape(num_heads=32, num_kv_heads=8, head_size=head_size), dtype)


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("num_kv_heads", [1, 8])
def test_block_sizes_and_grouped_query_heads(num_kv_heads: int, block_size: int) -> None:
    shape = Shape(num_heads=8, num_kv_heads=num_kv_heads, head_size=128, block_size=block_size)
    assert_right(TREE, shape, torch.bfloat16)


@pytest.mark.parametrize("suffixes", [[1, 128, 256], [16, 16, 16]], ids=str)
def test_long_prefix(suffixes: list[int]) -> None:
    shape = Shape(num_heads=8, num_kv_heads=1, head_size=128)
    assert_right([[16384], suffixes], shape, torch.float16)


def test_several_query_tokens_per_row() -> None:
    shape = Shape(num_heads=8, num_kv_heads=2, head_size=128)
    assert_right([[704], [5, 130, 64]], shape, torch.bfloat16, query_tokens=[1, 40, 5])


def test_many_groups() -> None:
    levels: Levels = [[256] * 16, list(range(1, 129))]
    assert_right(levels, Shape(num_heads=32, num_kv_heads=8, head_size=128), torch.bfloat16)


def test_merge_kernel_equals_its_reference() -> None:
    from tests.engine.attention.second_runner import merge

    plan, step = step_of(TREE, Shape(num_heads=8, num_kv_heads=2))
    device = torch.device("cuda")
    lists = cuda.StepLists.of(plan, step.query_start_loc.numpy(), device)
    generator = torch.Generator(device).manual_seed(0)
    num_parts, num_tokens = len(lists.query_tokens), len(step.seq_lens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    parts, part_lses = random(num_parts, 8, 64), 5 * random(8, num_parts)
    outs, lses = random(num_tokens, 8, 64), 5 * random(8, num_tokens)
    want = outs.clone()
    merge(lists, parts, part_lses, want, lses)
    cuda.merge(lists, parts, part_lses, outs, lses)
    torch.testing.assert_close(outs, want, atol=1e-5, rtol=1e-5)
