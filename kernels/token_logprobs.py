"""Triton kernel for the logprobs of given tokens of each row of logits, in one pass over the row.

One program reads a row in tiles. It keeps a maximum and a sum of exponentials for each column of a
tile. A column belongs to one thread, so that threads wait for each other only after the last tile.
A row with NaN or plus infinity, or without a finite logit, has the logprob NaN.
"""

from typing import Final

import torch
import triton
import triton.language as tl

NUM_WARPS: Final = 16
TILE_COLUMNS: Final = 4096
"""Eight per thread, as many bfloat16 logits as one load reads."""
TILE_ROWS: Final = 4
"""Loads of a thread that are in flight together."""


def compute_token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Logprobs [n, k] in float32 of the tokens [n, k], under the softmax of the logits [n, v].

    Computed in float32. The logits of a row must be adjacent.
    """
    assert logits.stride(1) == 1, "the logits of a row are adjacent"
    token_ids = token_ids.to(torch.int64).contiguous()
    num_rows, num_ids = token_ids.shape
    logprobs = torch.empty(num_rows, num_ids, dtype=torch.float32, device=logits.device)
    _token_logprobs_kernel[(num_rows,)](
        logits,
        token_ids,
        logprobs,
        logits.stride(0),
        logits.shape[1],
        num_ids,
        tile_rows=TILE_ROWS,
        tile_columns=TILE_COLUMNS,
        num_warps=NUM_WARPS,
    )
    return logprobs


# Otherwise the numbers of logprobs that callers ask for compile variants while requests are served.
@triton.jit(do_not_specialize=["num_ids"])
def _token_logprobs_kernel(
    logits,
    token_ids,
    logprobs,
    row_stride,
    vocab_size,
    num_ids,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * row_stride
    columns = tl.arange(0, tile_columns)
    tile = tl.arange(0, tile_rows)[:, None] * tile_columns + columns[None, :]
    # Finite, so that logits of minus infinity add exp(-inf) instead of exp(-inf + inf).
    highest = tl.full([tile_columns], -3.4e38, tl.float32)
    total = tl.zeros([tile_columns], tl.float32)
    for start in range(0, vocab_size, tile_rows * tile_columns):
        at = start + tile
        values = tl.load(row_logits + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(values, axis=0))
        total = total * tl.exp(highest - higher)
        total += tl.sum(tl.exp(values - higher[None, :]), axis=0)
        highest = higher
    maximum = tl.max(highest, axis=0)
    log_total = tl.log(tl.sum(total * tl.exp(highest - maximum), axis=0))
    for start in range(0, num_ids, tile_columns):
        at = start + columns
        is_id = at < num_ids
        ids = tl.load(token_ids + row * num_ids + at, mask=is_id, other=0)
        values = tl.load(row_logits + ids, mask=is_id, other=0.0).to(tl.float32)
        tl.store(logprobs + row * num_ids + at, values - maximum - log_total, mask=is_id)
