"""Keys moved to other positions, in torch: three passes over them, which memory bounds.

Written in C++ it would be one pass; beside the copies from the arena and into the cache's packed
order, which take most of a load's time, that was not worth a library.
"""

import torch

from kernels.rope_shift.rope_params import RotaryParams


def shift_keys(keys: torch.Tensor, shift: int, rotary: RotaryParams) -> torch.Tensor:
    """[.., D] `shift` positions later, in their own type, computed in float32; a new tensor.

    Moved by nothing they are the same bits.
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
