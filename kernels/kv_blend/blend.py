"""Keys and values of a text behind another prefix, predicted from how others were changed there.

A text alone has its base; behind a prefix it was observed to be something else. The difference is
taken over from the texts whose bases are nearest, token by token, keys apart from values. Keys are
compared and subtracted where they were computed, and turned to where they are to stand afterwards:
turning is linear. The first layer has seen nothing but the token, and is taken as it is.

[L, 2, H, T, D]: L layers, keys and values, H heads, T tokens, D head_dim. In float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.rotary_shift.cpu import shift_keys
from kernels.rotary_shift.rotary import Rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """`real` is to be moved by `shift`; `base`, if there is one, stands where the source does.
    `weights` [2, T] are those of keys and of values."""

    real: torch.Tensor
    shift: int
    base: torch.Tensor | None
    weights: torch.Tensor


def token_weights(source: torch.Tensor, bases: Sequence[torch.Tensor]) -> torch.Tensor:
    """[A, 2, T], summing to one over the A bases: by how near each is to the source, over all
    layers, heads and channels of a token. A norm, not a mean: a base that is the source itself
    leaves nothing to the others."""
    squares = [(base.float() - source.float()).square().sum((0, 2, 4)) for base in bases]
    return torch.softmax(-torch.stack(squares).sqrt(), dim=0)


def predicted(
    source: torch.Tensor, shift: int, observed: Sequence[Observation], rotary: Rotary | None
) -> torch.Tensor:
    """[L, 2, H, T, D], its keys moved by `shift` as the source's are."""
    out = turned(source.float(), shift, rotary)
    if any(seen.base is not None for seen in observed):
        out[1:] -= turned(_weighted_bases(source, observed), shift, rotary)
    else:
        out[1:] = 0
    for moved_by in dict.fromkeys(seen.shift for seen in observed):
        there = [seen for seen in observed if seen.shift == moved_by]
        out[1:] += turned(_weighted_reals(source, there), moved_by, rotary)
    return out


def turned(values: torch.Tensor, shift: int, rotary: Rotary | None) -> torch.Tensor:
    """A copy whose keys are moved."""
    copy = values.clone()
    if shift:
        assert rotary is not None, "nothing is moved that cannot be"
        copy[:, 0] = shift_keys(values[:, 0], shift, rotary)
    return copy


def _weighted_bases(source: torch.Tensor, observed: Sequence[Observation]) -> torch.Tensor:
    total = torch.zeros_like(source[1:], dtype=torch.float32)
    for seen in observed:
        if seen.base is not None:
            total += seen.base[1:].float() * seen.weights[None, :, None, :, None]
    return total


def _weighted_reals(source: torch.Tensor, observed: Sequence[Observation]) -> torch.Tensor:
    total = torch.zeros_like(source[1:], dtype=torch.float32)
    for seen in observed:
        total += seen.real[1:].float() * seen.weights[None, :, None, :, None]
    return total
