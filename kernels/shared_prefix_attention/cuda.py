"""Shared-prefix attention on GPUs: two FlashAttention calls per layer and a Triton merge.

The first call reads each shared node once for all query tokens of its rows, without a causal mask,
because a node ends before the first query of each of its rows. The second call reads each row's
suffix through a block table without the node columns. The merge weights the partial results by
their log-sum-exps.

A `StepLists` depends only on the sharing plan and on the number of query tokens per row, so one
upload serves all steps until a row joins, leaves or shares a further block.

The merge is tested in Triton's interpreter, and the whole pass with
a reference implementation of FlashAttention's interface.

Shapes: T query tokens of a step, R rows, N nodes, P query tokens summed over the nodes, Hq and Hkv
query and KV heads, D head size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from kernels.shared_prefix_attention.sharing_plan import Int32s, SharingPlan

DTYPES = (torch.bfloat16, torch.float16)
FlashAttention = Callable[..., Any]
"""vLLM's `flash_attn_varlen_func`, with the arguments that both passes share already bound."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepLists:
    """Device lists of a sharing plan for steps with the same number of query tokens per row."""

    query_tokens: Tensor
    """[P] numbers of the step's query tokens, node by node"""
    node_query_starts: Tensor
    """[N + 1]"""
    node_tokens: Tensor
    """[N]"""
    node_block_table: Tensor
    """[N, blocks of the longest node]"""
    suffix_starts: Tensor
    """[R]"""
    token_part_offsets: Tensor
    """[T + 1] offsets in `token_parts`"""
    token_parts: Tensor
    """[P] positions in `query_tokens` of each query token's partial results"""
    max_node_query_len: int
    max_node_tokens: int
    host_suffix_starts: Int32s

    @classmethod
    def of(cls, plan: SharingPlan, query_starts: Int32s, device: torch.device) -> Self:
        """Lists of a plan, uploaded in one copy that does not block.

        `query_starts` is [R + 1]. The plan covers the first rows; the others share nothing. The
        node lengths must be multiples of the block size.
        """
        suffix_starts = np.zeros(len(query_starts) - 1, np.int32)
        suffix_starts[: len(plan.suffix_starts)] = plan.suffix_starts
        tokens, node_query_starts = _node_queries(plan, query_starts)
        parts = np.argsort(tokens, kind="stable").astype(np.int32)
        counts = np.bincount(tokens, minlength=int(query_starts[-1]))
        lists = (
            tokens,
            node_query_starts,
            plan.node_tokens,
            _node_block_table(plan),
            suffix_starts,
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            parts,
        )
        return cls(
            **dict(zip(_LISTS, _upload(lists, device), strict=True)),
            max_node_query_len=int(np.diff(node_query_starts).max(initial=0)),
            max_node_tokens=int(plan.node_tokens.max(initial=0)),
            host_suffix_starts=suffix_starts,
        )


_LISTS = (
    "query_tokens",
    "node_query_starts",
    "node_tokens",
    "node_block_table",
    "suffix_starts",
    "token_part_offsets",
    "token_parts",
)


def _node_queries(plan: SharingPlan, query_starts: Int32s) -> tuple[Int32s, Int32s]:
    """Query tokens of each node's rows, concatenated, and the offsets of the nodes in them."""
    counts = np.diff(query_starts)[plan.node_rows]
    ends = np.concatenate([[0], np.cumsum(counts)])
    within = np.arange(ends[-1]) - np.repeat(ends[:-1], counts)
    tokens = np.repeat(query_starts[plan.node_rows], counts) + within
    return tokens.astype(np.int32), ends[plan.node_row_offsets].astype(np.int32)


def _node_block_table(plan: SharingPlan) -> Int32s:
    sizes = np.diff(plan.node_block_offsets)
    table = np.zeros((len(sizes), int(sizes.max(initial=1))), np.int32)
    table[np.arange(table.shape[1]) < sizes[:, None]] = plan.node_blocks
    return table


def _upload(lists: Sequence[NDArray[np.int32]], device: torch.device) -> list[Tensor]:
    joined = torch.from_numpy(np.concatenate([values.ravel() for values in lists]))
    if device.type == "cuda":
        joined = joined.pin_memory()  # PyTorch frees the memory after the copy
    on_device = torch.split(joined.to(device, non_blocking=True), [values.size for values in lists])
    return [part.view(values.shape) for part, values in zip(on_device, lists, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SuffixTable:
    """Block table and lengths of the rows' suffixes in one step."""

    block_table: Tensor
    """[R, blocks of the longest suffix]"""
    lens: Tensor
    """[R]"""
    max_len: int

    @classmethod
    def of(
        cls,
        lists: StepLists,
        *,
        block_table: Tensor,
        seq_lens: Tensor,
        max_len: int,
        block_size: int,
    ) -> Self:
        """Suffixes of a step's rows; `max_len` is an upper bound of their lengths."""
        columns = torch.arange(-(-max_len // block_size), device=block_table.device)
        first = (lists.suffix_starts // block_size).unsqueeze(1)
        at = (first + columns).clamp_(max=block_table.shape[1] - 1)
        rows = block_table[: len(first)]
        return cls(
            block_table=torch.gather(rows, 1, at.long()),
            lens=seq_lens[: len(first)] - lists.suffix_starts,
            max_len=max_len,
        )


def attend(
    flash: FlashAttention,
    lists: StepLists,
    suffixes: SuffixTable,
    *,
    query: Tensor,
    query_starts: Tensor,
    max_query_len: int,
    out: Tensor,
    node_options: Mapping[str, Any],
    suffix_options: Mapping[str, Any],
) -> None:
    """Run the attention of one layer: write out[T, Hq, D] for query[T, Hq, D].

    The options are further arguments of either call, such as FlashAttention's schedule.
    """
    part_outs, part_lses = flash(
        q=_select(query, lists.query_tokens),
        cu_seqlens_q=lists.node_query_starts,
        max_seqlen_q=lists.max_node_query_len,
        seqused_k=lists.node_tokens,
        max_seqlen_k=lists.max_node_tokens,
        block_table=lists.node_block_table,
        causal=False,
        return_softmax_lse=True,
        **node_options,
    )
    _, lses = flash(
        q=query,
        out=out,
        cu_seqlens_q=query_starts,
        max_seqlen_q=max_query_len,
        seqused_k=suffixes.lens,
        max_seqlen_k=suffixes.max_len,
        block_table=suffixes.block_table,
        causal=True,
        return_softmax_lse=True,
        **suffix_options,
    )
    merge(lists, part_outs, part_lses, out, lses)


def _select(query: Tensor, tokens: Tensor) -> Tensor:
    """The rows of a tensor with these numbers, also of 8-bit floats."""
    if query.element_size() > 1:
        return query.index_select(0, tokens)
    return query.view(torch.uint8).index_select(0, tokens).view(query.dtype)


def merge(
    lists: StepLists, part_outs: Tensor, part_lses: Tensor, outs: Tensor, lses: Tensor
) -> None:
    """Merge part_outs[P, Hq, D] into outs[T, Hq, D] in place.

    The log-sum-exps, to base e, are part_lses[Hq, P] and lses[Hq, T].
    """
    num_tokens, num_heads, head_size = outs.shape
    assert part_outs.stride(2) == outs.stride(2) == part_lses.stride(1) == lses.stride(1) == 1
    _merge_kernel[(num_tokens, num_heads)](
        part_outs,
        part_lses,
        outs,
        lses,
        lists.token_part_offsets,
        lists.token_parts,
        part_outs.stride(0),
        part_outs.stride(1),
        part_lses.stride(0),
        outs.stride(0),
        outs.stride(1),
        lses.stride(0),
        head_size=head_size,
        padded_size=triton.next_power_of_2(head_size),
        num_warps=1,
    )


@triton.jit
def _lse(pointer):
    """Log-sum-exp of a partial result; FlashAttention 2 writes infinity for one without keys."""
    lse = tl.load(pointer)
    return tl.where(lse == float("inf"), float("-inf"), lse)


@triton.jit
def _merge_kernel(
    part_outs,
    part_lses,
    outs,
    lses,
    offsets,
    parts,
    part_stride,
    part_head_stride,
    part_lse_stride,
    out_stride,
    out_head_stride,
    lse_stride,
    head_size: tl.constexpr,
    padded_size: tl.constexpr,
):
    """Merge the partial results of one query token and head. Tokens without nodes are skipped."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first = tl.load(offsets + token)
    last = tl.load(offsets + token + 1)
    if first == last:
        return
    d = tl.arange(0, padded_size)
    inside = d < head_size
    out = outs + token * out_stride + head * out_head_stride + d
    merged = tl.load(out, mask=inside, other=0.0).to(tl.float32)
    highest = _lse(lses + head * lse_stride + token)
    total = 1.0
    for i in range(first, last):
        part = tl.load(parts + i).to(tl.int64)
        lse = _lse(part_lses + head * part_lse_stride + part)
        new = tl.maximum(highest, lse)
        decay = tl.exp(highest - new)
        weight = tl.exp(lse - new)
        values = part_outs + part * part_stride + head * part_head_stride + d
        merged = merged * decay + tl.load(values, mask=inside, other=0.0).to(tl.float32) * weight
        total = total * decay + weight
        highest = new
    tl.store(out, (merged / total).to(outs.dtype.element_ty), mask=inside)
