"""Logprobs after bias, temperature and truncation as in sampling, with their exact gradient.

The server samples from the model's logits after four steps, in this order: a bias and penalties
change some logits, the temperature divides them, and truncation and constraints exclude token ids.
The support of a token is the set of ids that remained. A trainer that leaves out a step computes
logprobs of another distribution, so the importance ratio of an unchanged policy is not 1.

Shapes: T tokens, C tokens of a part, V vocabulary, N listed ids and D distinct supports of a part.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from coppice.train.logit_adjustments import NO_ADJUSTMENTS, LogitAdjustments, ResponseAdjustments
from coppice.wire.columns.support import ALL, IDS, Support, decode_ids, decode_mask

CHUNK_VALUES = 2**23
"""Logits of a part: 32 MiB in float32."""
WHOLE_ROW = bytes([ALL])
NOT_IN_SUPPORT = "a token is not in its support: are these the supports of other tokens?"


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

    A support that lists its ids takes the time of these ids and not of the vocabulary. The tokens
    are computed in parts, and the backward computes each part again, so no mask and no copy of all
    logits is held in memory.

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
    _check(logits_TV, response, support, adjustments, prompt)
    vocab_size = logits_TV.shape[1] if support is None else support.vocab_size
    changes = None
    if adjustments != NO_ADJUSTMENTS:
        changes = ResponseAdjustments.of(
            adjustments,
            response=response.to(logits_TV.device),
            prompt=response[:0] if prompt is None else prompt,
            earlier=response[:0] if earlier is None else earlier,
            vocab_size=vocab_size,
        )
    steps = _Steps(
        response=response.cpu(),
        rows=(WHOLE_ROW,) * len(response) if support is None else support.rows,
        vocab_size=vocab_size,
        temperature=temperature,
        adjustments=changes,
        device=logits_TV.device,
    )
    logprobs: Tensor = _SampledLogprobs.apply(logits_TV, steps)  # type: ignore[no-untyped-call]
    return logprobs


def _check(
    logits_TV: Tensor,
    response: Tensor,
    support: Support | None,
    adjustments: LogitAdjustments,
    prompt: Tensor | None,
) -> None:
    if support is not None and len(support) != len(response):
        raise ValueError("the number of supports differs from the number of tokens")
    if support is not None and support.vocab_size > logits_TV.shape[1]:
        raise ValueError(
            f"the supports are of a vocabulary of {support.vocab_size}, but the model has "
            f"{logits_TV.shape[1]} logits"
        )
    if prompt is None and adjustments.repetition_penalty != 1.0:
        raise ValueError("a repetition penalty needs the prompt")


class _SampledLogprobs(torch.autograd.Function):
    """Logprobs of all tokens of a response, part by part."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, steps: "_Steps") -> Tensor:
        ctx.save_for_backward(logits_TV)
        ctx.steps = steps
        logprobs_T = logits_TV.new_empty(len(steps.response), dtype=_wide(logits_TV))
        for part in steps.parts():
            logprobs_T[part.tokens_C] = steps.logprobs(part, part.read(logits_TV))
        return logprobs_T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None]:
        (logits_TV,) = ctx.saved_tensors
        grad_TV = torch.zeros_like(logits_TV)
        for part in ctx.steps.parts():
            values = part.read(logits_TV).requires_grad_()
            with torch.enable_grad():
                logprobs_C = ctx.steps.logprobs(part, values)
            [grad] = torch.autograd.grad(logprobs_C, values, grad_T[part.tokens_C])
            part.write(grad_TV, grad)
        return grad_TV, None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    """Steps from logits to the distributions of a response's tokens."""

    response: Tensor
    rows: Sequence[bytes]
    vocab_size: int
    temperature: float
    adjustments: ResponseAdjustments | None
    device: torch.device

    def parts(self) -> "Iterator[_ListedPart | _DensePart]":
        """Parts of the response, each of about CHUNK_VALUES logits."""
        is_listed = np.array([row[0] == IDS for row in self.rows], np.bool_)
        num_counted = 0 if self.adjustments is None else self.adjustments.num_counted
        # A listed id takes at least one byte.
        for tokens in _chunks(is_listed, [len(row) + num_counted for row in self.rows]):
            yield _ListedPart.of(self, tokens)
        for tokens in _chunks(~is_listed, [self.vocab_size] * len(self.rows)):
            yield _DensePart.of(self, tokens)

    def logprobs(self, part: "_ListedPart | _DensePart", values: Tensor) -> Tensor:
        """Logprobs [C] of a part's tokens from its logits."""
        if self.adjustments is not None:
            values = part.adjusted(values, self.adjustments)
        if self.temperature != 1.0:
            values = values / self.temperature
        return part.logprobs(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ListedPart:
    """Tokens whose supports list their ids, with the logits of these ids, token after token."""

    tokens_C: Tensor
    lengths_C: Tensor
    rows_N: Tensor
    ids_N: Tensor
    places_C: Tensor

    @classmethod
    def of(cls, steps: _Steps, tokens: NDArray[np.int64]) -> Self:
        rows = [steps.rows[at] for at in tokens]
        decoded = {row: decode_ids(row, steps.vocab_size) for row in set(rows)}
        ids = np.concatenate([decoded[row] for row in rows])
        lengths = np.array([len(decoded[row]) for row in rows])
        sampled = np.repeat(steps.response.numpy()[tokens], lengths)
        places = np.flatnonzero(ids == sampled)
        if len(places) != len(tokens):
            raise ValueError(NOT_IN_SUPPORT)
        given = (tokens, lengths, np.repeat(np.arange(len(tokens)), lengths), ids, places)
        tensors = (torch.from_numpy(each).to(steps.device, torch.int64) for each in given)
        return cls(**dict(zip(cls.__slots__, tensors, strict=True)))

    def read(self, logits_TV: Tensor) -> Tensor:
        values_N = logits_TV[self.tokens_C[self.rows_N], self.ids_N]
        return values_N.to(_wide(values_N))

    def write(self, grad_TV: Tensor, grad_N: Tensor) -> None:
        grad_TV[self.tokens_C[self.rows_N], self.ids_N] = grad_N.to(grad_TV)

    def adjusted(self, values_N: Tensor, adjustments: ResponseAdjustments) -> Tensor:
        return adjustments.apply_listed(values_N, self.tokens_C, self.rows_N, self.ids_N)

    def logprobs(self, values_N: Tensor) -> Tensor:
        largest_C = torch.segment_reduce(values_N.detach(), "max", lengths=self.lengths_C)
        powers_N = (values_N - largest_C[self.rows_N]).exp()
        sums_C = torch.segment_reduce(powers_N, "sum", lengths=self.lengths_C)
        return values_N[self.places_C] - largest_C - sums_C.log()


@dataclass(frozen=True, slots=True)
class _DensePart:
    """Tokens with whole rows of logits, because their supports are most of the vocabulary."""

    tokens_C: Tensor
    targets_C: Tensor
    supports_C: Tensor
    excluded_DV: Tensor
    excludes_any: bool = field(kw_only=True)
    at: slice | Tensor = field(kw_only=True)

    @classmethod
    def of(cls, steps: _Steps, tokens: NDArray[np.int64]) -> Self:
        rows = [steps.rows[at] for at in tokens]
        indices = {row: index for index, row in enumerate(dict.fromkeys(rows))}
        excluded = np.stack([~decode_mask(row, steps.vocab_size) for row in indices])
        supports, targets = np.array([indices[row] for row in rows]), steps.response.numpy()[tokens]
        if excluded[supports, targets].any():
            raise ValueError(NOT_IN_SUPPORT)
        given = (tokens, targets, supports, excluded)
        tensors = [torch.from_numpy(each).to(steps.device) for each in given]
        first, end = int(tokens[0]), int(tokens[-1]) + 1
        # A slice is not copied.
        at = slice(first, end) if end - first == len(tokens) else tensors[0]
        return cls(*tensors, excludes_any=bool(excluded.any()), at=at)

    def read(self, logits_TV: Tensor) -> Tensor:
        """Rows of logits, -inf outside of the supports."""
        values_CV = logits_TV[self.at, : self.excluded_DV.shape[1]].to(_wide(logits_TV))
        if not self.excludes_any:
            return values_CV.detach()
        return values_CV.masked_fill(self.excluded_DV[self.supports_C], -torch.inf)

    def write(self, grad_TV: Tensor, grad_CV: Tensor) -> None:
        grad_TV[self.at, : grad_CV.shape[1]] = grad_CV.to(grad_TV)

    def adjusted(self, values_CV: Tensor, adjustments: ResponseAdjustments) -> Tensor:
        return adjustments.apply_rows(values_CV, self.tokens_C)

    def logprobs(self, values_CV: Tensor) -> Tensor:
        return -F.cross_entropy(values_CV, self.targets_C, reduction="none")


def _chunks(selected: NDArray[np.bool_], sizes: Sequence[int]) -> Iterator[NDArray[np.int64]]:
    """Indices of the selected tokens, in runs of about CHUNK_VALUES by their sizes."""
    tokens = np.flatnonzero(selected)
    ends = np.cumsum(np.asarray(sizes, np.int64)[tokens])
    starts = ends - np.asarray(sizes, np.int64)[tokens]
    for chunk in np.unique(starts // CHUNK_VALUES):
        yield tokens[starts // CHUNK_VALUES == chunk]


def _wide(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
