"""GRPO and reverse-KL losses of a micro-batch, with advantages and loss normalizers.

Normalizers are computed over the whole step and fixed before its first micro-batch: the weight of
every token is known before any forward. The gradient thus does not depend on how the tokens are
distributed over micro-batches, groups and ranks.

Shapes: T tokens of the micro-batch, G responses of the whole group.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from coppice.train.training_group import RowLogprobs, TrainingGroup

TokenWeights: TypeAlias = Callable[[Tensor], Tensor]
"""Maps response lengths to the weight of each token of these responses in the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Numbers of responses and of response tokens in a training step."""

    num_responses: int
    num_tokens: int

    @classmethod
    def of(cls, groups: Iterable[TrainingGroup]) -> "Totals":
        """Totals of some groups, on this rank only; context tokens do not count."""
        lengths = [
            num_targets
            for group in groups
            for num_targets, length in zip(group.target_lengths, group.lengths, strict=True)
            if num_targets or not length
        ]
        return cls(num_responses=len(lengths), num_tokens=sum(lengths))

    def over_ranks(self, process_group: dist.ProcessGroup | None = None) -> "Totals":
        """Sums the numbers over all ranks. A collective operation: every rank must call it."""
        both = torch.tensor([self.num_responses, self.num_tokens])
        if dist.get_backend(process_group) == "nccl":
            both = both.cuda()
        dist.all_reduce(both, group=process_group)
        num_responses, num_tokens = both.tolist()
        return Totals(num_responses=num_responses, num_tokens=num_tokens)


def token_mean(totals: Totals) -> TokenWeights:
    """Token weights in the loss: equal for all tokens of the training step."""
    return lambda lengths: torch.full(lengths.shape, 1 / totals.num_tokens, dtype=torch.float64)


def sequence_mean(totals: Totals) -> TokenWeights:
    """Token weights in the loss: equal per response in total, as GRPO was originally published."""
    return lambda lengths: 1 / (totals.num_responses * lengths.double())


def dr_grpo(totals: Totals, *, max_tokens: int) -> TokenWeights:
    """Token weights in the Dr. GRPO loss, constant; max_tokens is the maximum response length."""
    weight = 1 / (totals.num_responses * max_tokens)
    return lambda lengths: torch.full(lengths.shape, weight, dtype=torch.float64)


def advantages(rewards_G: Tensor, *, by_deviation: bool = True) -> Tensor:
    """GRPO advantages [G]: rewards minus their mean, divided by their standard deviation.

    Dr. GRPO omits the division: by_deviation=False.
    """
    centred_G = rewards_G - rewards_G.mean()
    if not by_deviation or len(rewards_G) < 2:
        return centred_G
    return centred_G / (rewards_G.std() + 1e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """Clip range of the ratio of new to old token probability: 1 - low to 1 + high."""

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


def reverse_kl_loss(
    rows: RowLogprobs, *, teacher: Sequence[Tensor], weights: TokenWeights
) -> Tensor:
    """Loss of a micro-batch for on-policy distillation from a teacher.

    Its expected gradient is that of the reverse KL divergence KL(student || teacher) per token, if
    the current policy has sampled the responses. The loss itself is not the divergence.

    Args:
        rows: logprobs of the micro-batch under the current policy, the student.
        teacher: the teacher's logprobs of the response tokens, for the whole group.
        weights: normalizer, the weight of each token in the loss.
    """
    gain_T = rows.pick(teacher) - rows.logprobs.detach()
    return -(gain_T * rows.logprobs * _token_weights(rows, weights)).sum()


def kl_estimate(logprobs_T: Tensor, reference_T: Tensor) -> Tensor:
    """Nonnegative, unbiased estimate ("k3") of the KL divergence per token, [T]."""
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
