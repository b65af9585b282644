"""Logit bias and penalties of a rollout request, applied to the trainer's logits as in sampling.

Shapes: C tokens of a response, V vocabulary, M token ids that have a bias or may have a penalty.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor


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

    def apply(self, logits: Tensor, bias: Tensor, counts: Tensor, in_prompt: Tensor) -> Tensor:
        """Adjusted logits, elementwise; `counts` counts a token id in the response so far."""
        logits = logits + bias.to(logits)
        if not self.has_penalties:
            return logits
        counts, penalty = counts.to(logits), self.repetition_penalty
        is_seen = counts > 0
        repeated = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = torch.where(is_seen | in_prompt, repeated, logits)
        return logits - self.frequency_penalty * counts - self.presence_penalty * is_seen.to(logits)


NO_ADJUSTMENTS = LogitAdjustments()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseAdjustments:
    """Adjustments of the logits of one response, only for token ids that may change.

    `columns_V` has the index of a token id in `ids_M`, or -1.
    """

    adjustments: LogitAdjustments
    tokens: Tensor
    num_earlier: int
    ids_M: Tensor
    columns_V: Tensor
    bias_M: Tensor
    in_prompt_M: Tensor

    @classmethod
    def of(
        cls,
        adjustments: LogitAdjustments,
        *,
        response: Tensor,
        prompt: Tensor,
        earlier: Tensor,
        vocab_size: int,
    ) -> Self:
        """Builds them on the response's device; `earlier` are response tokens before these."""
        device, prompt = response.device, prompt.to(response)
        tokens = torch.cat([earlier.to(response), response])
        biased = torch.tensor(list(adjustments.logit_bias), dtype=torch.int64, device=device)
        biases = torch.tensor(list(adjustments.logit_bias.values()), dtype=torch.float64)
        seen = (prompt, tokens) if adjustments.has_penalties else ()
        ids_M = torch.cat([biased, *seen]).unique()  # type: ignore[no-untyped-call]
        columns_V = torch.full((vocab_size,), -1, device=device)
        columns_V[ids_M] = torch.arange(len(ids_M), device=device)
        bias_M = torch.zeros(len(ids_M), dtype=torch.float64, device=device)
        bias_M[columns_V[biased]] = biases.to(device)
        return cls(
            adjustments=adjustments,
            tokens=tokens,
            num_earlier=len(earlier),
            ids_M=ids_M,
            columns_V=columns_V,
            bias_M=bias_M,
            in_prompt_M=torch.isin(ids_M, prompt),
        )

    @property
    def num_counted(self) -> int:
        """Number of counts per token."""
        return len(self.ids_M) if self.adjustments.has_penalties else 0

    def counts(self, tokens_C: Tensor) -> Tensor:
        """Counts [C, M] of the ids in the response before the tokens at ascending indices."""
        counts_CM = torch.zeros(
            len(tokens_C), len(self.ids_M), dtype=torch.int32, device=tokens_C.device
        )
        if not self.adjustments.has_penalties:
            return counts_CM
        starts_C = tokens_C + self.num_earlier
        before = self.tokens[: starts_C[-1]]
        # A token counts from the first of these tokens after it.
        places = torch.arange(len(before), device=before.device)
        first = torch.searchsorted(starts_C, places, right=True)
        one = torch.ones_like(first, dtype=torch.int32)
        counts_CM.index_put_((first, self.columns_V[before]), one, accumulate=True)
        return counts_CM.cumsum(0, dtype=torch.int32)

    def apply_rows(self, values_CV: Tensor, tokens_C: Tensor) -> Tensor:
        """Adjusted rows of logits of the tokens at ascending indices."""
        adjusted_CM = self.adjustments.apply(
            values_CV[:, self.ids_M], self.bias_M, self.counts(tokens_C), self.in_prompt_M
        )
        return values_CV.index_copy(1, self.ids_M, adjusted_CM)

    def apply_listed(
        self, values_N: Tensor, tokens_C: Tensor, rows_N: Tensor, ids_N: Tensor
    ) -> Tensor:
        """Adjusted logits of single token ids; `rows_N` are indices in `tokens_C`."""
        [changed] = torch.where(self.columns_V[ids_N] >= 0)
        columns = self.columns_V[ids_N[changed]]
        adjusted = self.adjustments.apply(
            values_N[changed],
            self.bias_M[columns],
            self.counts(tokens_C)[rows_N[changed], columns],
            self.in_prompt_M[columns],
        )
        return values_N.index_copy(0, changed, adjusted)
