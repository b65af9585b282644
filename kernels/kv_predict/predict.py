"""Keys and values of a text behind another prefix, predicted from how others were changed there.

A text alone has its base; behind a prefix it was observed to be something else. The difference is
taken over from texts the more the nearer their bases are, token by token, keys apart from values,
and the less the fewer or the farther they are. Keys are
compared and subtracted where they were computed, and turned to where they are to stand afterwards:
turning is linear. The first layer has seen nothing but the token, and is taken as it is.

[L, 2, H, T, D]: L layers, keys and values, H heads, T tokens, D head_dim. Computed in float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from kernels.rope_shift.cpu import shift_keys
from kernels.rope_shift.rope_params import RotaryParams

MIN_SQUARED_DISTANCE: Final = 1e-30
"""The square of a distance that is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """`real` is to be moved by `shift`; `base`, if there is one, stands where the source does.
    `weights` [2, T] are those of keys and of values."""

    real: torch.Tensor
    shift: int
    base: torch.Tensor | None
    weights: torch.Tensor


def token_weights(source: torch.Tensor, bases: Sequence[torch.Tensor]) -> torch.Tensor:
    """[A, 2, T]: how much each of the A bases tells of each token of the source, by the inverse
    square of their distance over all layers, heads and channels; a softmax of its logarithm, which
    does not ask how large a model's values are. Nothing tells as much as what is as far as nought
    is: what is missing to one is no offset at all. A base that is the source itself tells all.
    """
    shape = (len(bases) + 1, 2, source.shape[3])
    squares = torch.zeros(shape, dtype=torch.float32, device=source.device)
    for layer, own in enumerate(source):
        ours = own.float()
        squares[-1] += torch.mul(ours, ours).sum((1, 3))
        for square, base in zip(squares, bases, strict=False):
            difference = ours - base[layer]
            square += torch.mul(difference, difference, out=difference).sum((1, 3))
    return torch.softmax(-squares.clamp_(min=MIN_SQUARED_DISTANCE).log_(), dim=0)[:-1]


def predict(
    source: torch.Tensor,
    shift: int,
    observations: Sequence[Observation],
    rotary: RotaryParams | None,
    out: torch.Tensor,
) -> None:
    """`out` in its own type; its keys are moved by `shift` as the source's are. Layer by layer, so
    that what is added up stays in the processor's caches."""
    out[0] = _shift_layer(source[0].float(), shift, rotary)
    for layer in range(1, len(source)):
        total = _shift_layer(_source_residual(source, observations, layer), shift, rotary)
        for moved_by in dict.fromkeys(seen.shift for seen in observations):
            there = [seen for seen in observations if seen.shift == moved_by]
            total += _shift_layer(_weighted_sum(source, there, layer), moved_by, rotary)
        out[layer] = total


def shift_keys_of_layers(
    values: torch.Tensor, shift: int, rotary: RotaryParams | None
) -> torch.Tensor:
    """[L, 2, H, T, D], with moved keys."""
    return torch.stack([_shift_layer(layer, shift, rotary) for layer in values])


def _source_residual(
    source: torch.Tensor, observations: Sequence[Observation], layer: int
) -> torch.Tensor:
    """[2, H, T, D] of the source without the observed texts' own bases; nothing without those."""
    if any(seen.base is None for seen in observations):
        return _zeros_like_layer(source)
    left = source[layer].to(torch.float32, copy=True)
    for seen in observations:
        if seen.base is not None:
            left.addcmul_(seen.base[layer].float(), _broadcast_weights(seen.weights), value=-1)
    return left


def _weighted_sum(
    source: torch.Tensor, observations: Sequence[Observation], layer: int
) -> torch.Tensor:
    total = _zeros_like_layer(source)
    for seen in observations:
        total.addcmul_(seen.real[layer].float(), _broadcast_weights(seen.weights))
    return total


def _zeros_like_layer(source: torch.Tensor) -> torch.Tensor:
    return torch.zeros(source.shape[1:], dtype=torch.float32, device=source.device)


def _broadcast_weights(weights: torch.Tensor) -> torch.Tensor:
    return weights[:, None, :, None]


def _shift_layer(layer: torch.Tensor, shift: int, rotary: RotaryParams | None) -> torch.Tensor:
    """[2, H, T, D] with moved keys; itself where nothing moves."""
    if not shift:
        return layer
    assert rotary is not None, "nothing is moved that cannot be"
    return torch.stack([shift_keys(layer[0], shift, rotary), layer[1]])
