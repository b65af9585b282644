"""Logprobs under the distribution that tokens were sampled from, with their exact gradient.

The server samples from the model's logits after four steps, in this order: a bias and penalties
change some logits, the temperature divides them, and truncation and constraints exclude token ids.
The support of a token is the set of ids that remained. A trainer that leaves out a step computes
logprobs of another distribution, so the importance ratio of an unchanged policy is not 1.

Shapes: T tokens, C tokens of a chunk, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from coppice.support import Support
from coppice.wire.support import decode_mask

CHUNK_VALUES = 2**23
"""Logits of a chunk: 32 MiB in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitAdjustments:
    """Sampling parameters that change logits; give those of the rollout request.

    Names and effects are those of vLLM. Presence and frequency penalties count the tokens of the
    response, the repetition penalty also those of the prompt.
    """

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def has_penalties(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    def apply(self, logits_CV: Tensor, counts_CV: Tensor, in_prompt_V: Tensor) -> Tensor:
        """Adjusted logits; counts_CV counts the earlier tokens of the response."""
        if self.logit_bias:
            ids = torch.tensor(list(self.logit_bias), device=logits_CV.device)
            biases = torch.tensor(list(self.logit_bias.values())).to(logits_CV)
            logits_CV = logits_CV.index_add(1, ids, biases.expand(len(logits_CV), -1))
        if not self.has_penalties:
            return logits_CV
        seen_CV = counts_CV > 0
        factor_CV = torch.where(logits_CV > 0, 1 / self.repetition_penalty, self.repetition_penalty)
        logits_CV = torch.where(seen_CV | in_prompt_V, logits_CV * factor_CV, logits_CV)
        counts_CV = counts_CV.to(logits_CV)
        penalties_CV = self.frequency_penalty * counts_CV + self.presence_penalty * seen_CV
        return logits_CV - penalties_CV


NO_ADJUSTMENTS = LogitAdjustments()


def sampled_logprobs(
    logits_TV: Tensor,
    response: Tensor,
    *,
    temperature: float = 1.0,
    support: Support | None = None,
    adjustments: LogitAdjustments = NO_ADJUSTMENTS,
    prompt: Tensor | None = None,
    earlier: Tensor | None = None,
) -> Tensor:
    """Logprobs [T] of a response's tokens under the distribution that they were sampled from.

    Logits outside of the supports are masked chunk by chunk, and the backward computes each chunk
    again. So neither a mask nor a copy of all logits is held in memory.

    Args:
        logits_TV: the model's logits at the positions that predict the response.
        response: the response's token ids.
        temperature: sampling temperature.
        support: per token the ids that it was sampled from, `Sample.support`.
        adjustments: parameters of the request that change logits.
        prompt: the prompt's token ids; needed for a repetition penalty.
        earlier: tokens of the response before these, such as those of a tree's earlier segments;
            penalties count them.
    """
    if support is not None and len(support) != len(response):
        raise ValueError("the number of supports differs from the number of tokens")
    if support is not None and support.vocab_size > logits_TV.shape[1]:
        raise ValueError(
            f"the supports are of a vocabulary of {support.vocab_size}, but the model has "
            f"{logits_TV.shape[1]} logits"
        )
    if prompt is None and adjustments.repetition_penalty != 1.0:
        raise ValueError("a repetition penalty needs the prompt")
    before = torch.zeros(0, dtype=torch.int64) if earlier is None else earlier.cpu()
    steps = _Steps(response.cpu(), temperature, support, adjustments, prompt, before)
    size = max(CHUNK_VALUES // logits_TV.shape[1], 1)
    parts, start = [logits_TV.new_zeros(0, dtype=_wide(logits_TV))], 0
    for chunk_CV in torch.split(logits_TV, size) if len(response) else ():
        parts.append(
            checkpoint(
                steps.logprobs, chunk_CV, start, use_reentrant=False, preserve_rng_state=False
            )
        )
        start += len(chunk_CV)
    return torch.cat(parts)


@dataclass(frozen=True, slots=True)
class _Steps:
    """Steps from logits to the distribution of a response's tokens."""

    response: Tensor
    temperature: float
    support: Support | None
    adjustments: LogitAdjustments
    prompt: Tensor | None
    earlier: Tensor

    def logprobs(self, logits_CV: Tensor, start: int) -> Tensor:
        """Logprobs of the response's tokens from `start` on, one per row of logits."""
        scaled_CV = logits_CV.to(_wide(logits_CV))
        if self.adjustments != NO_ADJUSTMENTS:
            scaled_CV = self._adjusted(scaled_CV, start)
        if self.temperature != 1.0:
            scaled_CV = scaled_CV / self.temperature
        excluded_CV = self._excluded(logits_CV, start)
        if excluded_CV is not None:
            scaled_CV = scaled_CV.masked_fill(excluded_CV, -torch.inf)
        targets_C = self.response[start : start + len(logits_CV)].to(logits_CV.device)
        return -F.cross_entropy(scaled_CV, targets_C, reduction="none")

    def _excluded(self, logits_CV: Tensor, start: int) -> Tensor | None:
        """Booleans [C, V], true outside of the supports; None if nothing is excluded."""
        num_logits = logits_CV.shape[1]
        if self.support is None:
            return None
        part = self.support[start : start + len(logits_CV)]
        if part.is_whole and part.vocab_size == num_logits:
            return None
        excluded_CV = np.ones((len(part), num_logits), np.bool_)
        for at, row in enumerate(part.rows):
            np.logical_not(
                decode_mask(row, part.vocab_size), out=excluded_CV[at, : part.vocab_size]
            )
        return torch.from_numpy(excluded_CV).to(logits_CV.device)

    def _adjusted(self, logits_CV: Tensor, start: int) -> Tensor:
        num_tokens, num_logits = logits_CV.shape
        counts_CV = torch.zeros(num_tokens, num_logits, dtype=torch.int32)
        in_prompt_V = torch.zeros(num_logits, dtype=torch.bool)
        if self.adjustments.has_penalties:
            earlier = torch.cat([self.earlier, self.response[:start]])
            counts_CV[0] = torch.bincount(earlier, minlength=num_logits)
            new = self.response[start : start + num_tokens - 1]
            counts_CV[torch.arange(len(new)) + 1, new] = 1
            counts_CV = counts_CV.cumsum(0, dtype=torch.int32)
        if self.prompt is not None:
            in_prompt_V[self.prompt.cpu()] = True
        device = logits_CV.device
        return self.adjustments.apply(logits_CV, counts_CV.to(device), in_prompt_V.to(device))


def _wide(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
