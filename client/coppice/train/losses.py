"""GRPO loss over the responses of one micro-batch, and its advantages.

Shapes: T tokens of the micro-batch, G responses of the whole group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coppice.train.normalizers import TokenWeights
from coppice.train.rows import RowLogprobs


def advantages(rewards_G: Tensor, *, by_deviation: bool = True) -> Tensor:
    """Returns [G]: rewards minus their mean, divided by their standard deviation.

    Dr. GRPO omits the division: by_deviation=False.
    """
    centred_G = rewards_G - rewards_G.mean()
    if not by_deviation or len(rewards_G) < 2:
        return centred_G
    return centred_G / (rewards_G.std() + 1e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """Clip range of the probability ratio: 1 - low to 1 + high."""

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
    """GRPO loss of a micro-batch.

    Args:
        rows: logprobs of the micro-batch under the current policy.
        advantages: [G], one per response of the whole group.
        weights: normalizer, the weight of each token in the loss.
        sampled: logprobs that the rollout returned, for the whole group. Tokens are weighted by
            exp(old - sampled), at most max_importance.
        old: logprobs of the policy in the denominator of the ratio, for the whole group. The
            default is the current policy, which is right for the first step on a batch.
        reference: logprobs of the reference policy, for the whole group.
        clip: clip range of the ratio, or None.
        max_importance: upper bound of the importance weights.
        kl: coefficient of the KL penalty towards `reference`.
    """
    old_T = rows.logprobs.detach() if old is None else rows.pick(old)
    gain_T = _clipped(rows.logprobs - old_T, rows.spread(advantages), clip)
    if sampled is not None:
        gain_T = gain_T * torch.exp(old_T - rows.pick(sampled)).clamp(max=max_importance)
    if reference is not None:
        gain_T = gain_T - kl * kl_estimate(rows.logprobs, rows.pick(reference))
    return -(gain_T * _token_weights(rows, weights)).sum()


def kl_estimate(logprobs_T: Tensor, reference_T: Tensor) -> Tensor:
    """Returns [T]: the nonnegative, unbiased estimate of the KL divergence ("k3")."""
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
