"""Merge of partial attention results over disjoint positions by their log-sum-exps."""

import torch
from torch import Tensor


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge outs[pieces, ..., D] and lses[pieces, ...] into (out, lse).

    A piece without positions has an lse of -inf and is ignored, whatever its output is. If all
    pieces are empty, the output is zero.
    """
    highest = lses.amax(dim=0)
    highest = torch.where(highest.isneginf(), 0.0, highest)
    weights = (lses - highest).exp()
    total = weights.sum(dim=0)
    parts = torch.where(weights.unsqueeze(-1) > 0, outs * weights.unsqueeze(-1), 0.0)
    out = parts.sum(dim=0) / torch.where(total > 0, total, 1.0).unsqueeze(-1)
    return out, total.log() + highest
