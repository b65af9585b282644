"""The Triton kernels on a GPU: against the reference, and replayed from a captured graph."""

import pytest
import torch

from kernels.shared_prefix_attention import cuda
from kernels.shared_prefix_attention.gpu_work_list import WorkList
from tests.kernels import attention_reference
from tests.kernels.decode_steps import HYDRAGEN, Levels, Shape, rounded, step_of
from tests.kernels.work_lists import Inputs, work_list

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

CLOSE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
TREE: Levels = [[1000], [300, 640], [5, 200, 32, 1]]


def on_gpu(shape: Shape, num_rows: int, query_tokens: int = 1) -> WorkList:
    return work_list(
        shape,
        num_rows=num_rows,
        query_tokens=query_tokens,
        num_processors=torch.cuda.get_device_properties(0).multi_processor_count,
        device="cuda",
    )


def assert_right(levels: Levels, shape: Shape, dtype: torch.dtype, query_tokens: int = 1) -> None:
    plan, step = step_of(levels, shape, query_tokens=query_tokens)
    step = rounded(step, dtype)
    work = on_gpu(shape, len(step.seq_lens), query_tokens)
    assert work.fill(plan, step.seq_lens.numpy() - plan.suffix_starts)
    got = Inputs(step, dtype, "cuda").run_decode(work).double().cpu()
    torch.testing.assert_close(
        got, attention_reference.full_attention(step)[0], atol=CLOSE[dtype], rtol=0
    )


@pytest.mark.parametrize("dtype", cuda.DTYPES, ids=str)
@pytest.mark.parametrize("head_size", cuda.HEAD_SIZES)
def test_head_sizes_on_a_gpu(head_size: int, dtype: torch.dtype) -> None:
    assert_right(TREE, Shape(num_heads=32, num_kv_heads=8, head_size=head_size), dtype)


@pytest.mark.parametrize("levels", HYDRAGEN, ids=str)
@pytest.mark.parametrize("num_kv_heads", [1, 8])
def test_hydragen_sizes_on_a_gpu(levels: Levels, num_kv_heads: int) -> None:
    shape = Shape(num_heads=8, num_kv_heads=num_kv_heads, head_size=128)
    assert_right(levels, shape, torch.float16)


def test_several_query_tokens_on_a_gpu() -> None:
    levels: Levels = [[700], [5, 130, 64]]
    assert_right(levels, Shape(num_heads=8, num_kv_heads=2), torch.bfloat16, query_tokens=5)


def test_captured_graph_serves_later_plans_and_lengths() -> None:
    shape = Shape(num_heads=8, num_kv_heads=2, head_size=128)
    plan, step = step_of(TREE, shape)
    work, inputs = on_gpu(shape, 4), Inputs(step, torch.bfloat16, "cuda")
    assert work.fill(plan, step.seq_lens.numpy() - plan.suffix_starts)
    inputs.run_decode(work)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inputs.run_decode(work)
    for levels in (TREE, [[900], [200, 540], [5, 1, 32, 1]]):
        plan, step = step_of(levels, shape)
        assert work.fill(plan, step.seq_lens.numpy() - plan.suffix_starts)
        step = rounded(step, torch.bfloat16)
        later = Inputs(step, torch.bfloat16, "cuda")
        inputs.key_cache[: len(later.key_cache)] = later.key_cache
        inputs.value_cache[: len(later.value_cache)] = later.value_cache
        inputs.block_table[:, : later.block_table.shape[1]] = later.block_table
        inputs.seq_lens.copy_(later.seq_lens)
        inputs.query.copy_(later.query)
        graph.replay()
        got = inputs.out.double().cpu()
        torch.testing.assert_close(
            got, attention_reference.full_attention(step)[0], atol=2e-2, rtol=0
        )
