"""Decisions and work lists of the GPU backend, as far as they can be checked without a GPU.

The kernels that read the work list are tested separately, in Triton's interpreter.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention.counters import COUNTERS, Counters
from engine.attention.grouping import StepGrouper
from engine.attention.host_block_tables import record_table
from engine.runtime.feature_guard import FeatureState
from kernels.shared_prefix_attention.gpu_work_list import WorkList, WorkShape
from tests.engine.attention.block_tables import BLOCK, table_of

# Importing vLLM without a GPU emits unrelated warnings.
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

SHAPE = WorkShape(
    num_heads=8,
    num_kv_heads=2,
    head_size=64,
    block_size=BLOCK,
    max_rows=8,
    max_query_tokens=1,
    max_node_blocks=32,
    num_processors=4,
)
SHARED = [[1, 2, 3], [1, 2, 4], [5]]
ALONE = [[1, 2], [3, 4], [5]]


def builder() -> Any:
    """A builder with only the attributes its step needs; without a GPU it cannot be constructed."""
    from engine.attention.cuda_backend import SharedPrefixBuilder

    made = object.__new__(SharedPrefixBuilder)
    made._work = WorkList(SHAPE, torch.device("cpu"))
    made._max_query_tokens = 1
    made._capturing = False
    made.grouper = StepGrouper(
        mode="always", block_size=BLOCK, bytes_per_token=1, max_query_tokens=1, counts=Counters()
    )
    return made


def step(rows: list[list[int]], query_lens: list[int]) -> tuple[Any, Any]:
    """Stock metadata and its inputs; rows beyond `rows` pad a captured graph."""
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

    table = table_of([*rows, *[[0]] * (len(query_lens) - len(rows))])
    device = torch.from_numpy(table.copy())
    record_table(SimpleNamespace(block_table=SimpleNamespace(np=table, gpu=device)))
    lens = torch.tensor([32 * len(r) - 5 for r in rows] + [0] * (len(query_lens) - len(rows)))
    starts = torch.from_numpy(np.cumsum([0, *query_lens], dtype=np.int32))
    fields: dict[str, Any] = {
        "query_start_loc": starts,
        "seq_lens": lens.to(torch.int32),
        "num_actual_tokens": int(starts[-1]),
        "max_query_len": max(query_lens),
        "max_seq_len": 96,
        "slot_mapping": torch.zeros(int(starts[-1]), dtype=torch.int64),
    }
    common = CommonAttentionMetadata(
        **fields,
        query_start_loc_cpu=starts,
        seq_lens_cpu_upper_bound=fields["seq_lens"],
        num_reqs=len(query_lens),
        block_table_tensor=device,
    )
    return FlashAttentionMetadata(**fields, block_table=device), common


def listed(work: WorkList) -> tuple[int, int, list[int]]:
    """Rows, items, and the number of rows of each item."""
    num_items = int(work["num_items"][0])
    items = work["items"].view(-1, 6)[:num_items]
    return int(work["num_rows"][0]), num_items, items[:, 5].tolist()


def test_decode_step_is_listed_without_padding_rows() -> None:
    from engine.attention.cuda_backend import SharedPrefixMetadata

    made = builder()
    metadata = made.grouped_or_stock(*step(SHARED, [1, 1, 1, 0]))
    assert isinstance(metadata, SharedPrefixMetadata)
    assert (metadata.num_grouped_tokens, metadata.tail) == (3, None)
    assert listed(made._work) == (3, 4, [2, 1, 1, 1])


def test_decode_step_without_sharing_is_listed_for_the_graph() -> None:
    from engine.attention.cuda_backend import SharedPrefixMetadata

    made = builder()
    metadata = made.grouped_or_stock(*step(ALONE, [1, 1, 1]))
    assert isinstance(metadata, SharedPrefixMetadata)
    assert listed(made._work) == (3, 3, [1, 1, 1])


def test_graph_capture_knows_no_blocks() -> None:
    made = builder()
    made._capturing = True
    made.grouped_or_stock(*step(SHARED, [1, 1, 1]))
    assert listed(made._work) == (3, 3, [1, 1, 1])


def test_prefill_step_uses_stock_attention() -> None:
    made = builder()
    metadata, common = step(ALONE, [1, 1, 9])
    assert made.grouped_or_stock(metadata, common) is metadata
    metadata, common = step(SHARED, [9, 1, 1])
    assert made.grouped_or_stock(metadata, common) is metadata


def test_after_a_failure_captured_graphs_get_a_list_without_sharing() -> None:
    from engine.attention.host_block_tables import FEATURE

    made = builder()
    made.grouped_or_stock(*step(SHARED, [1, 1, 1]))
    made.grouper = None
    before = COUNTERS.read()["steps_skipped"].get("failed", 0)
    try:
        metadata, common = step(SHARED, [1, 1, 1])
        assert made.grouped_or_stock(metadata, common) is metadata
    finally:
        FEATURE.state = FeatureState(on=True, num_failures=0, reason=None)
    assert listed(made._work) == (3, 3, [1, 1, 1])
    assert COUNTERS.read()["steps_skipped"]["failed"] == before + 1
