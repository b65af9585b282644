"""Rotation of keys to other positions in PyTorch: three memory-bound passes over the keys.

C++ would need one pass. Most of a load's time is spent on the copies from the arena and into the
cache's packed order, so that did not justify a library.
"""

import torch

from kernels.rope_shift.rope_params import RotaryParams


def shift_keys(keys: torch.Tensor, shift: int, rotary: RotaryParams) -> torch.Tensor:
    """Copy of keys [.., D] rotated by `shift` positions.

    Computed in float32 and returned in the keys' dtype. A shift of zero is bitwise exact.
    """
    if not shift:
        return keys.clone()
    half = len(rotary.frequencies)
    cosines, sines = (part.to(keys.device) for part in rotary.cos_sin(shift))
    first, second = keys[..., :half].float(), keys[..., half : 2 * half].float()
    moved = torch.empty_like(keys)
    moved[..., :half] = first * cosines - second * sines
    moved[..., half : 2 * half] = second * cosines + first * sines
    moved[..., 2 * half :] = keys[..., 2 * half :]
    return moved
