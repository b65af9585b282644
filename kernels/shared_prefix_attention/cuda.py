"""Shared-prefix decode attention on GPUs in Triton, over FlashAttention's paged cache.

One launch computes partial results for all items of the work list, nodes and suffixes alike. A
second, small launch merges them. The grids have the capacity of the list; the number of items and
the sequence lengths are read on the device, so a captured CUDA graph is valid for later steps.
Tested in Triton's interpreter; it has not been run on a GPU.

Shapes: T tokens of a step, R rows, Q tokens of a row at most, Hq and Hkv query and KV heads, D head
size, B block size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.shared_prefix_attention.gpu_work_list import WorkList

HEAD_SIZES = (64, 80, 96, 128, 192, 256)
DTYPES = (torch.bfloat16, torch.float16)
_LOG2_E = tl.constexpr(1.4426950408889634)


def decode(
    work: WorkList,
    *,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    """Run the attention of one layer in a decode step: write out[T, Hq, D] for query[T, Hq, D].

    The caches are [blocks, B, Hkv, D]. block_table [R, width], seq_lens [R] and query_start_loc
    [R + 1] are int32.
    """
    _, num_heads, head_size = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    ratio = num_heads // num_kv_heads
    shape = work.shape
    assert (ratio, head_size) == (shape.ratio, shape.head_size) and num_heads == shape.num_heads
    assert query.stride()[1:] == out.stride()[1:] == (head_size, 1)
    assert key_cache.stride() == value_cache.stride() and key_cache.stride(3) == 1
    padded = triton.next_power_of_2(head_size)
    _attention_kernel[(shape.max_items, num_kv_heads)](
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        query_start_loc,
        work["num_items"],
        work["items"],
        work["node_blocks"],
        work["item_rows"],
        work.outputs,
        work.lses,
        scale * _LOG2_E.value,
        query.stride(0),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        block_table.stride(0),
        block_size=block_size,
        num_heads=num_heads,
        head_size=head_size,
        padded_size=padded,
        ratio=ratio,
        max_query_tokens=shape.max_query_tokens,
        num_queries=shape.queries_per_item,
        num_tokens=_tokens_per_iteration(head_size),
        num_warps=4 if shape.queries_per_item * padded <= 64 * 128 else 8,
        num_stages=2,
    )
    _merge_kernel[(shape.max_rows, shape.max_query_tokens, num_heads)](
        work.outputs,
        work.lses,
        work["num_rows"],
        work["row_slot_offsets"],
        work["row_slots"],
        query_start_loc,
        out,
        out.stride(0),
        num_heads=num_heads,
        head_size=head_size,
        padded_size=padded,
        max_query_tokens=shape.max_query_tokens,
        num_warps=1,
    )


def _tokens_per_iteration(head_size: int) -> int:
    """KV tokens per loop iteration; two pipeline stages of keys and values fit in shared memory."""
    return 64 if head_size <= 128 else 32


@triton.jit
def _attention_kernel(
    query,
    keys,
    values,
    block_table,
    seq_lens,
    query_starts,
    num_items,
    items,
    node_blocks,
    item_rows,
    outputs,
    lses,
    scale,
    query_stride,
    block_stride,
    token_stride,
    head_stride,
    table_stride,
    block_size: tl.constexpr,
    num_heads: tl.constexpr,
    head_size: tl.constexpr,
    padded_size: tl.constexpr,
    ratio: tl.constexpr,
    max_query_tokens: tl.constexpr,
    num_queries: tl.constexpr,
    num_tokens: tl.constexpr,
):
    """Partial attention of one work item and KV head, for up to `num_queries` queries."""
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    if item >= tl.load(num_items):
        return
    # The order of gpu_work_list.ITEM_FIELDS.
    fields = items + item * 6
    begin = tl.load(fields)
    end = tl.load(fields + 1)  # OPEN_END in a suffix's last item, cut to the row's length below
    blocks_at = tl.load(fields + 2)  # index into node_blocks; OWN_BLOCKS: the row's block table
    first_block = tl.load(fields + 3)  # block number in the row of node_blocks[blocks_at]
    rows_at = tl.load(fields + 4)  # index into item_rows, and of the output slots
    num_rows = tl.load(fields + 5)

    m = tl.arange(0, num_queries)
    d = tl.arange(0, padded_size)
    place = m // (max_query_tokens * ratio)
    token = m // ratio % max_query_tokens
    head = kv_head * ratio + m % ratio
    is_row = place < num_rows
    row = tl.load(item_rows + rows_at + place, mask=is_row, other=0)
    query_start = tl.load(query_starts + row, mask=is_row, other=0)
    query_len = tl.load(query_starts + row + 1, mask=is_row, other=0) - query_start
    is_query = is_row & (token < query_len)
    # Causal mask: the last query token attends to the whole row, each earlier one to one less.
    seq_len = tl.load(seq_lens + row, mask=is_query, other=0)
    seen = tl.where(is_query, seq_len - query_len + token + 1, 0)
    end = tl.minimum(end, tl.max(seen))
    # Ends of the positions read through node_blocks and through the block table; one is empty.
    node_end = tl.where(blocks_at < 0, begin, end)
    table_end = tl.where(blocks_at < 0, end, begin)
    q = tl.load(
        query
        + (query_start + token)[:, None] * query_stride
        + (head * head_size)[:, None]
        + d[None],
        mask=is_query[:, None] & (d < head_size)[None],
        other=0.0,
    )

    highest = tl.full([num_queries], -1e30, tl.float32)
    total = tl.zeros([num_queries], tl.float32)
    gathered = tl.zeros([num_queries, padded_size], tl.float32)
    own = tl.load(item_rows + rows_at)  # a suffix has one row
    for start in range(begin, end, num_tokens):
        position = start + tl.arange(0, num_tokens)
        inside = position < end
        number = position // block_size
        in_node = node_blocks + blocks_at + number - first_block
        in_table = block_table + own.to(tl.int64) * table_stride + number
        block = tl.load(in_node, mask=position < node_end, other=0)
        block += tl.load(in_table, mask=position < table_end, other=0)
        at = (
            block.to(tl.int64) * block_stride
            + (position % block_size) * token_stride
            + kv_head * head_stride
        )
        k = tl.load(
            keys + at[None] + d[:, None], mask=inside[None] & (d < head_size)[:, None], other=0.0
        )
        scores = tl.dot(q, k) * scale
        scores = tl.where(inside[None] & (position[None] < seen[:, None]), scores, float("-inf"))
        new = tl.maximum(highest, tl.max(scores, 1))
        decay = tl.exp2(highest - new)
        weights = tl.exp2(scores - new[:, None])
        v = tl.load(
            values + at[:, None] + d[None], mask=inside[:, None] & (d < head_size)[None], other=0.0
        )
        gathered = tl.dot(weights.to(v.dtype), v, gathered * decay[:, None])
        total = total * decay + tl.sum(weights, 1)
        highest = new

    some = total > 0
    slot = (rows_at + place).to(tl.int64) * max_query_tokens + token
    tl.store(
        outputs + (slot * num_heads + head)[:, None] * head_size + d[None],
        gathered / tl.where(some, total, 1.0)[:, None],
        mask=is_query[:, None] & (d < head_size)[None],
    )
    lse = tl.where(some, highest + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
    tl.store(lses + slot * num_heads + head, lse, mask=is_query)


@triton.jit
def _merge_kernel(
    outputs,
    lses,
    num_rows,
    row_slot_offsets,
    row_slots,
    query_starts,
    out,
    out_stride,
    num_heads: tl.constexpr,
    head_size: tl.constexpr,
    padded_size: tl.constexpr,
    max_query_tokens: tl.constexpr,
):
    """Merge the partial results of one token and query head by their base-2 log-sum-exps."""
    row = tl.program_id(0)
    token = tl.program_id(1)
    head = tl.program_id(2)
    if row >= tl.load(num_rows):
        return
    query_start = tl.load(query_starts + row)
    if token >= tl.load(query_starts + row + 1) - query_start:
        return
    d = tl.arange(0, padded_size)
    highest = -1e30
    total = 0.0
    merged = tl.zeros([padded_size], tl.float32)
    for i in range(tl.load(row_slot_offsets + row), tl.load(row_slot_offsets + row + 1)):
        slot = tl.load(row_slots + i).to(tl.int64) * max_query_tokens + token
        at = slot * num_heads + head
        lse = tl.load(lses + at)
        new = tl.maximum(highest, lse)
        decay = tl.exp2(highest - new)
        weight = tl.exp2(lse - new)
        part = tl.load(outputs + at * head_size + d, mask=d < head_size, other=0.0)
        merged = merged * decay + part * weight
        total = total * decay + weight
        highest = new
    merged = merged / tl.where(total > 0, total, 1.0)
    to = out + (query_start + token).to(tl.int64) * out_stride + head * head_size + d
    tl.store(to, merged.to(out.dtype.element_ty), mask=d < head_size)
