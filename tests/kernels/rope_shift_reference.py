"""Reference implementation of the RoPE shift, one pair of channels at a time in float64."""

import math

import torch

from kernels.rope_shift import RotaryParams


def slow_shift(keys: torch.Tensor, shift: int, rotary: RotaryParams) -> torch.Tensor:
    """[.., D] moved by `shift` positions, in float64."""
    half = len(rotary.frequencies)
    moved = keys.double().clone()
    for before, after in zip(
        keys.double().view(-1, keys.shape[-1]), moved.view(-1, keys.shape[-1]), strict=True
    ):
        for pair in range(half):
            angle = float(rotary.frequencies[pair]) * shift
            real, imaginary = float(before[pair]), float(before[half + pair])
            after[pair] = real * math.cos(angle) - imaginary * math.sin(angle)
            after[half + pair] = imaginary * math.cos(angle) + real * math.sin(angle)
    return moved
