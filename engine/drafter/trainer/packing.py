"""Samples of any length in one row, each seeing itself only.

Shape suffixes: T tokens of the row, R places where the likeliest tokens were recorded, K of them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple

import torch

from engine.drafter.trainer.messages import Sample
from engine.drafter.trainer.soft_targets import from_text

ROW_TOKENS: Final = 1024
IGNORED: Final = -100


class Soft(NamedTuple):
    """What could have come at some of the labels, instead of what did."""

    places_R: torch.Tensor
    tokens_RK: torch.Tensor
    masses_RK: torch.Tensor


class Packed(NamedTuple):
    """One row of tokens, on the CPU. `labels_T` is what comes next, where that is a response's."""

    tokens_T: torch.Tensor
    labels_T: torch.Tensor
    positions_T: torch.Tensor
    blocks_T: torch.Tensor  # which sample each token is of
    soft: Soft | None

    def mask_TT(self) -> torch.Tensor:
        """Block-diagonal and causal: True where a token may look."""
        same = self.blocks_T[:, None] == self.blocks_T[None, :]
        return same & torch.ones_like(same).tril()


def pack(draw: Callable[[], Sample], num_tokens: int = ROW_TOKENS) -> Packed:
    """Samples until one does not fit any more; one that is longer than the row alone loses the
    beginning of its prompt, or the end of its response."""
    held: list[Sample] = []
    room = num_tokens
    while room > 0:
        sample = _cut(draw(), num_tokens)
        size = len(sample.prompt) + len(sample.response)
        if size > room:
            break
        held.append(sample)
        room -= size
    return _packed(held)


def _packed(samples: list[Sample]) -> Packed:
    tokens: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    soft: list[Soft] = []
    for number, sample in enumerate(samples):
        if sample.likeliest:
            soft.append(_soft(sample, first=len(tokens) + len(sample.prompt) - 1))
        own = sample.prompt + sample.response
        tokens += own
        labels += [IGNORED] * (len(sample.prompt) - 1) + sample.response + [IGNORED]
        positions += range(len(own))
        blocks += [number] * len(own)
    return Packed(
        tokens_T=torch.tensor(tokens),
        labels_T=torch.tensor(labels),
        positions_T=torch.tensor(positions),
        blocks_T=torch.tensor(blocks),
        soft=Soft(*map(torch.cat, zip(*soft, strict=True))) if soft else None,
    )


def _soft(sample: Sample, first: int) -> Soft:
    """`first`: the place whose label is the response's first token."""
    tokens, masses = (part[: len(sample.response)] for part in from_text(sample.likeliest))
    return Soft(
        places_R=torch.arange(first, first + len(tokens)),
        tokens_RK=torch.tensor(tokens, dtype=torch.long),
        masses_RK=torch.tensor(masses),
    )


def _cut(sample: Sample, num_tokens: int) -> Sample:
    """At least one token of the prompt stays: the first of the response is foretold from it."""
    response = sample.response[: num_tokens - 1]
    prompt = sample.prompt[-(num_tokens - len(response)) :]
    return replace(sample, prompt=prompt, response=response)
