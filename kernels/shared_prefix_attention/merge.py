"""Partial softmaxes over disjoint positions put together, weighed by exp(lse - highest)."""

import torch
from torch import Tensor


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """outs[pieces, ..., D] with the logarithms lses[pieces, ...] of their sums -> (out, lse).

    A piece without positions has the logarithm -inf and counts for nothing, whatever its output;
    where all pieces are without, the output is zero.
    """
    highest = lses.amax(dim=0)
    highest = torch.where(highest.isneginf(), 0.0, highest)
    weights = (lses - highest).exp()
    total = weights.sum(dim=0)
    parts = torch.where(weights.unsqueeze(-1) > 0, outs * weights.unsqueeze(-1), 0.0)
    out = parts.sum(dim=0) / torch.where(total > 0, total, 1.0).unsqueeze(-1)
    return out, total.log() + highest
