"""The loss of GRPO over the responses of one pass, and the advantages that it takes.

Shapes: T tokens of the pass, G responses of the whole group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coppice.train.normalizers import TokenWeights
from coppice.train.rows import RowLogprobs


def advantages(rewards_G: Tensor, *, by_deviation: bool = True) -> Tensor:
    """[G]: rewards less their mean, by their standard deviation unless Dr. GRPO is wanted."""
    centred_G = rewards_G - rewards_G.mean()
    if not by_deviation or len(rewards_G) < 2:
        return centred_G
    return centred_G / (rewards_G.std() + 1e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """The ratio of new to old probability is held between 1 - low and 1 + high."""

    low: float = 0.2
    high: float = 0.2


def grpo_loss(
    rows: RowLogprobs,
    *,
    advantages: Tensor,
    weights: TokenWeights,
    sampled: Sequence[Tensor] | None = None,
    old: Sequence[Tensor] | None = None,
    reference: Sequence[Tensor] | None = None,
    clip: Clip | None = Clip(),
    max_importance: float = 2.0,
    kl: float = 0.0,
) -> Tensor:
    """Of the pass's rows; advantages [G], and logprobs, are those of the whole group.

    sampled: as the rollout returned them; tokens are weighted by exp(old - sampled), at most
    max_importance. old: of the policy that the ratio is to, by default the present one, which is
    right for the first step on a batch. reference: what kl pulls towards.
    """
    old_T = rows.logprobs.detach() if old is None else rows.pick(old)
    gain_T = _clipped(rows.logprobs - old_T, rows.spread(advantages), clip)
    if sampled is not None:
        gain_T = gain_T * torch.exp(old_T - rows.pick(sampled)).clamp(max=max_importance)
    if reference is not None:
        gain_T = gain_T - kl * kl_estimate(rows.logprobs, rows.pick(reference))
    return -(gain_T * _token_weights(rows, weights)).sum()


def kl_estimate(logprobs_T: Tensor, reference_T: Tensor) -> Tensor:
    """[T]: never negative, and on average over samples the divergence from the reference."""
    difference_T = reference_T - logprobs_T
    return torch.exp(difference_T) - difference_T - 1


def _clipped(log_ratio_T: Tensor, advantages_T: Tensor, clip: Clip | None) -> Tensor:
    ratio_T = torch.exp(log_ratio_T)
    if clip is None:
        return ratio_T * advantages_T
    held_T = ratio_T.clamp(1 - clip.low, 1 + clip.high)
    return torch.minimum(ratio_T * advantages_T, held_T * advantages_T)


def _token_weights(rows: RowLogprobs, weights: TokenWeights) -> Tensor:
    lengths = torch.tensor(rows.lengths, device=rows.logprobs.device)
    return weights(lengths).to(rows.logprobs).repeat_interleave(lengths)
