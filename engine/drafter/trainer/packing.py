"""Samples of any length in one row, each seeing itself only.

Shape suffixes: T tokens of the row, R places where the likeliest tokens were recorded, K of them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple

import torch

from engine.drafter.trainer.messages import Sample
from engine.drafter.trainer.soft_targets import decode_top_k

ROW_TOKENS: Final = 1024
IGNORE_INDEX: Final = -100


class SoftTargets(NamedTuple):
    """What could have come at some of the labels, instead of what did."""

    positions_R: torch.Tensor
    tokens_RK: torch.Tensor
    probs_RK: torch.Tensor


class PackedBatch(NamedTuple):
    """One row of tokens, on the CPU. `labels_T` is what comes next, where that is a response's."""

    tokens_T: torch.Tensor
    labels_T: torch.Tensor
    positions_T: torch.Tensor
    sample_index_T: torch.Tensor  # which sample each token is of
    soft_targets: SoftTargets | None

    def mask_TT(self) -> torch.Tensor:
        """Block-diagonal and causal: True where a token may look."""
        same = self.sample_index_T[:, None] == self.sample_index_T[None, :]
        return same & torch.ones_like(same).tril()


def pack(draw: Callable[[], Sample], num_tokens: int = ROW_TOKENS) -> PackedBatch:
    """Samples until one does not fit any more; one that is longer than the row alone loses the
    beginning of its prompt, or the end of its response."""
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
    """`first`: the place whose label is the response's first token."""
    tokens, probs = (part[: len(sample.response)] for part in decode_top_k(sample.top_logprobs))
    return SoftTargets(
        positions_R=torch.arange(first, first + len(tokens)),
        tokens_RK=torch.tensor(tokens, dtype=torch.long),
        probs_RK=torch.tensor(probs),
    )


def _truncate(sample: Sample, num_tokens: int) -> Sample:
    """At least one token of the prompt stays: the first of the response is foretold from it."""
    response = sample.response[: num_tokens - 1]
    prompt = sample.prompt[-(num_tokens - len(response)) :]
    return replace(sample, prompt=prompt, response=response)
