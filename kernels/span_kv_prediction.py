"""Estimate of a text span's KV after a new prefix, without prefilling it there.

The source is KV of the span itself that was prefilled elsewhere. The base of another span is its KV
without the prefix, and its observation is its KV prefilled after the prefix. The prediction adds to
the source the weighted differences of observation and base. Weights are per token, separate for
keys and values, and larger for bases that are nearer to the source. If all bases are far away, the
prediction stays close to the source. Keys are compared and subtracted at the positions where they
were prefilled, and rotated to their new positions afterwards, which is valid because rotation is
linear. KV of the first layer depends on the token and its position only, so it is only rotated.

[L, 2, H, T, D]: L layers, keys and values, H heads, T tokens, D head_dim. Computed in float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from kernels.rope_shift import RotaryParams, shift_keys

MIN_SQUARED_DISTANCE: Final = 1e-30
"""Lower bound of squared distances, so that the logarithm of zero is finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """KV of another span that was observed after the prefix, from which a span is predicted.

    `real` is the observed KV, `base` the KV of the same span without the prefix. The keys of `real`
    are moved by `shift` positions. `base`, if any, is at the positions of the source. `weights` [2,
    T] are those of keys and of values.
    """

    real: torch.Tensor
    shift: int
    base: torch.Tensor | None
    weights: torch.Tensor


def token_weights(source: torch.Tensor, bases: Sequence[torch.Tensor]) -> torch.Tensor:
    """Weights [A, 2, T] of A observations in the prediction of each token, by distance of KV.

    A weight is proportional to the inverse squared distance of base and source over all layers,
    heads and channels, so it is invariant to the scale of a model's values. It is computed as a
    softmax of the negative logarithm of the squared distance. A zero vector is included as a
    further base with an offset of zero, so the weights sum to less than one. A base equal to the
    source gets all the weight.
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
    """Predict the KV of a span after a prefix, and write it to `out` in the dtype of `out`.

    The source's keys are moved by `shift` positions. Layers are processed one at a time, so that
    the sums stay in the CPU caches.
    """
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
    """Copy of KV [L, 2, H, T, D] with the keys moved by `shift` positions."""
    return torch.stack([_shift_layer(layer, shift, rotary) for layer in values])


def _source_residual(
    source: torch.Tensor, observations: Sequence[Observation], layer: int
) -> torch.Tensor:
    """Source minus weighted bases in one layer, [2, H, T, D]; zeros if a base is missing."""
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
    """KV [2, H, T, D] of one layer, with the keys moved by `shift` positions.

    A shift of zero returns the same tensor.
    """
    if not shift:
        return layer
    assert rotary is not None, "keys are only moved if they can be rotated"
    return torch.stack([shift_keys(layer[0], shift, rotary), layer[1]])
