"""Reference implementation of shared-prefix decode attention, in the precision of its input.

Shapes: T tokens, R rows, Hq and Hkv query and KV heads, D head size, B block size; q tokens and n
positions of a partial result.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.shared_prefix_attention.sharing_plan import SharingPlan


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge partial attention results outs[parts, ..., D], lses[parts, ...] into (out, lse).

    A part without positions has an lse of -inf and is ignored, whatever its output is. If all parts
    are empty, the output is zero.
    """
    highest = lses.amax(dim=0)
    highest = torch.where(highest.isneginf(), 0.0, highest)
    weights = (lses - highest).exp()
    total = weights.sum(dim=0)
    parts = torch.where(weights.unsqueeze(-1) > 0, outs * weights.unsqueeze(-1), 0.0)
    out = parts.sum(dim=0) / torch.where(total > 0, total, 1.0).unsqueeze(-1)
    return out, total.log() + highest


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Inputs of one attention layer in a decode step."""

    query: Tensor
    """[T, Hq, D]"""
    keys: Tensor
    """[blocks, B, Hkv, D], like the values"""
    values: Tensor
    block_table: Tensor
    """[R, width]"""
    seq_lens: Tensor
    """[R]"""
    query_start_loc: Tensor
    """[R + 1]"""
    scale: float


def full_attention(step: Step) -> tuple[Tensor, Tensor]:
    """Attention of every row over all its positions at once: (out[T, Hq, D], lse[T, Hq])."""
    out, lse = torch.zeros_like(step.query), step.query.new_full(step.query.shape[:2], -torch.inf)
    for row, length in enumerate(step.seq_lens.tolist()):
        tokens = _tokens(step, row)
        keys, values = _read(step, step.block_table[row], 0, 0, length)
        out[tokens], lse[tokens] = attention_over(
            step.query[tokens], keys, values, step.scale, causal=True
        )
    return out, lse


def split_attention(plan: SharingPlan, step: Step) -> tuple[Tensor, Tensor]:
    """Attention computed per node and suffix of a sharing plan, then merged: (out, lse).

    The result equals that of `full_attention`.
    """
    out, lse = torch.zeros_like(step.query), step.query.new_full(step.query.shape[:2], -torch.inf)
    for row, parts in enumerate(partial_results(plan, step)):
        tokens = _tokens(step, row)
        outs, lses = zip(*parts, strict=True)
        out[tokens], lse[tokens] = merge(torch.stack(outs), torch.stack(lses))
    return out, lse


def partial_results(plan: SharingPlan, step: Step) -> list[list[tuple[Tensor, Tensor]]]:
    """Partial attention results (out, lse) of each row: one per node and one of its suffix."""
    parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in step.seq_lens]
    starts = [0] * len(parts)
    block_size = step.keys.shape[1]
    for blocks, num_tokens, rows in _nodes(plan):
        start = starts[rows[0]]
        first = start // block_size * block_size
        keys, values = _read(step, blocks, first, start, start + num_tokens)
        for row in rows:
            query = step.query[_tokens(step, row)]
            parts[row].append(attention_over(query, keys, values, step.scale, causal=False))
            starts[row] += num_tokens
    for row, start in enumerate(plan.suffix_starts.tolist()):
        assert start == starts[row], "a suffix begins where the row's nodes end"
        length = int(step.seq_lens[row])
        keys, values = _read(step, step.block_table[row], 0, start, length)
        query = step.query[_tokens(step, row)]
        parts[row].append(attention_over(query, keys, values, step.scale, causal=True))
    return parts


def attention_over(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention of query[q, Hq, D] over keys and values[n, Hkv, D].

    If `causal`, the last position is that of the last query. A query without visible positions gets
    an output of zeros and an lse of -inf.
    """
    repeats = query.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(repeats, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,nhd->hqn", query, keys) * scale
    if causal:
        behind = len(keys) - len(query)
        unseen = torch.ones_like(scores[0], dtype=torch.bool).triu(behind + 1)
        scores = scores.masked_fill(unseen, -torch.inf)
    lse = scores.logsumexp(dim=-1)
    weights = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
    return torch.einsum("hqn,nhd->qhd", weights, values), lse.T


def _nodes(plan: SharingPlan) -> Iterator[tuple[Tensor, int, Sequence[int]]]:
    for node, num_tokens in enumerate(plan.node_tokens.tolist()):
        blocks = slice(*plan.node_block_offsets[node : node + 2])
        rows = slice(*plan.node_row_offsets[node : node + 2])
        yield torch.from_numpy(plan.node_blocks[blocks]), num_tokens, plan.node_rows[rows].tolist()


def _tokens(step: Step, row: int) -> slice:
    return slice(*step.query_start_loc[row : row + 2].tolist())


def _read(step: Step, blocks: Tensor, first: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
    """Keys and values of positions [begin, end), from blocks that start at position `first`."""
    positions = torch.arange(begin, end) - first
    block_size = step.keys.shape[1]
    at = blocks.long()[positions // block_size], positions % block_size
    return step.keys[at], step.values[at]
