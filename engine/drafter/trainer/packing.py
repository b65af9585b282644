"""Packing of several training samples into one sequence with a block-diagonal mask.

Shape suffixes: T tokens of the row, R positions with recorded top-k tokens, K of them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple

import torch

from engine.drafter.trainer.messages import Sample, decode_top_k

ROW_TOKENS: Final = 1024
IGNORE_INDEX: Final = -100


class SoftTargets(NamedTuple):
    """Recorded distributions that replace the sampled tokens as labels at some positions."""

    positions_R: torch.Tensor
    tokens_RK: torch.Tensor
    probs_RK: torch.Tensor


class PackedBatch(NamedTuple):
    """Training batch: one row of packed samples, on the CPU.

    `labels_T` is the next token if that is in a response, else IGNORE_INDEX.
    """

    tokens_T: torch.Tensor
    labels_T: torch.Tensor
    positions_T: torch.Tensor
    sample_index_T: torch.Tensor  # index of each token's sample
    soft_targets: SoftTargets | None

    def mask_TT(self) -> torch.Tensor:
        """Block-diagonal causal mask: True where a token may attend."""
        same = self.sample_index_T[:, None] == self.sample_index_T[None, :]
        return same & torch.ones_like(same).tril()


def pack(draw: Callable[[], Sample], num_tokens: int = ROW_TOKENS) -> PackedBatch:
    """Draw samples and pack them into one row until one does not fit.

    A sample longer than the row loses the beginning of its prompt, or the end of its response.
    """
    held: list[Sample] = []
    room = num_tokens
    while room > 0:
        sample = _truncate(draw(), num_tokens)
        size = len(sample.prompt) + len(sample.response)
        if size > room:
            break
        held.append(sample)
        room -= size
    return _collate(held)


def _collate(samples: list[Sample]) -> PackedBatch:
    tokens: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    soft_targets: list[SoftTargets] = []
    for number, sample in enumerate(samples):
        if sample.top_logprobs:
            soft_targets.append(
                _soft_targets_of(sample, first=len(tokens) + len(sample.prompt) - 1)
            )
        own = sample.prompt + sample.response
        tokens += own
        labels += [IGNORE_INDEX] * (len(sample.prompt) - 1) + sample.response + [IGNORE_INDEX]
        positions += range(len(own))
        blocks += [number] * len(own)
    return PackedBatch(
        tokens_T=torch.tensor(tokens),
        labels_T=torch.tensor(labels),
        positions_T=torch.tensor(positions),
        sample_index_T=torch.tensor(blocks),
        soft_targets=SoftTargets(*map(torch.cat, zip(*soft_targets, strict=True)))
        if soft_targets
        else None,
    )


def _soft_targets_of(sample: Sample, first: int) -> SoftTargets:
    """Recorded distributions of a sample's response tokens, as labels in the packed row.

    `first` is the position in the row whose label is the first response token.
    """
    tokens, probs = (part[: len(sample.response)] for part in decode_top_k(sample.top_logprobs))
    return SoftTargets(
        positions_R=torch.arange(first, first + len(tokens)),
        tokens_RK=torch.tensor(tokens, dtype=torch.long),
        probs_RK=torch.tensor(probs),
    )


def _truncate(sample: Sample, num_tokens: int) -> Sample:
    """Truncate a sample to `num_tokens`, keeping at least one prompt token to predict from."""
    response = sample.response[: num_tokens - 1]
    prompt = sample.prompt[-(num_tokens - len(response)) :]
    return replace(sample, prompt=prompt, response=response)
