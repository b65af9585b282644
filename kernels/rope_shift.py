"""Shift of cached RoPE keys to other positions, in PyTorch.

RoPE rotations are additive: a key prefilled at position p becomes the key of position p + n when
each pair of channels is rotated by n times the pair's frequency. A factor that scales keys, as in
YaRN, is already applied and is unaffected. Only RoPE types that are known to be pure rotations are
supported; all others raise UnsupportedRotary.

The first R channels of a head's D are rotated; pair i is channels i and R / 2 + i.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

_COMMON_PARAMETERS: Final = frozenset({"rope_theta", "rope_type", "type", "partial_rotary_factor"})
_KNOWN_PARAMETERS: Final = {
    "default": _COMMON_PARAMETERS,
    "llama3": _COMMON_PARAMETERS
    | {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": _COMMON_PARAMETERS
    | {"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"}
    | {"truncate", "original_max_position_embeddings"},
}
"""Known parameters of each RoPE type. Any other name is refused, as its meaning is unknown."""


class UnsupportedRotary(Exception):
    """Keys of this model cannot be rotated; the message is the reason."""


@dataclass(frozen=True, slots=True)
class RotaryParams:
    """Rotary frequencies of a model, [R / 2], in radians per position, on the CPU."""

    frequencies: torch.Tensor

    @property
    def num_channels(self) -> int:
        return 2 * len(self.frequencies)

    def cos_sin(self, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [R / 2] of the rotation by `shift` positions.

        They are computed in float64 and returned in float32.
        """
        angles = self.frequencies.double() * shift
        return angles.cos().float(), angles.sin().float()


def parse_rotary(rope: Mapping[str, Any], head_dim: int) -> RotaryParams:
    """Rotary parameters of a model from its RoPE config, in float32 as models compute them.

    Only RoPE types that are known to be pure rotations are supported.

    Raises UnsupportedRotary.
    """
    rope_type = str(rope.get("rope_type", rope.get("type", "default")))
    if rope_type not in _KNOWN_PARAMETERS:
        raise UnsupportedRotary(f"RoPE type {rope_type!r} is not supported")
    unknown = sorted(
        name for name in rope if name not in _KNOWN_PARAMETERS[rope_type] and rope[name] is not None
    )
    if unknown:
        raise UnsupportedRotary(f"RoPE type {rope_type!r} with unknown {', '.join(unknown)}")
    if "rope_theta" not in rope:
        raise UnsupportedRotary("rope_theta is missing")
    channels = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if channels < 2 or channels % 2:
        raise UnsupportedRotary(f"{channels} rotated channels; must be even and at least 2")
    try:
        return RotaryParams(
            _FREQUENCIES_BY_TYPE[rope_type](rope, _base_frequencies(rope, channels))
        )
    except KeyError as error:
        raise UnsupportedRotary(f"RoPE type {rope_type!r} without {error.args[0]}") from error


def _base_frequencies(rope: Mapping[str, Any], channels: int) -> torch.Tensor:
    exponents = torch.arange(0, channels, 2, dtype=torch.float32, device="cpu") / channels
    return 1.0 / (float(rope["rope_theta"]) ** exponents)


def _default(rope: Mapping[str, Any], base: torch.Tensor) -> torch.Tensor:
    return base


def _llama3(rope: Mapping[str, Any], base: torch.Tensor) -> torch.Tensor:
    """Rotary frequencies of Llama 3.1: low ones are divided by the factor, high ones unchanged.

    Frequencies between the thresholds are interpolated. The thresholds are in rotations over the
    original context length.
    """
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    factor, length = float(rope["factor"]), float(rope["original_max_position_embeddings"])
    turns = length * base / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * base / factor + smooth * base


def _yarn(rope: Mapping[str, Any], base: torch.Tensor) -> torch.Tensor:
    """Rotary frequencies of YaRN (arXiv 2309.00071): like Llama 3.1, but a ramp over channels."""
    theta, factor = float(rope["rope_theta"]), float(rope["factor"])
    length, pairs = float(rope["original_max_position_embeddings"]), len(base)

    def pair_of(num_turns: float) -> float:
        return pairs * math.log(length / (num_turns * 2 * math.pi)) / math.log(theta)

    first = pair_of(_get(rope, "beta_fast", 32.0))
    last = pair_of(_get(rope, "beta_slow", 1.0))
    if _get(rope, "truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    places = torch.arange(pairs, dtype=torch.float32, device="cpu")
    slow = ((places - first) / max(last - first, 0.001)).clamp(0, 1)
    return base / factor * slow + base * (1 - slow)


def _get(rope: Mapping[str, Any], name: str, default: float) -> float:
    found = rope.get(name)
    return default if found is None else float(found)


_FREQUENCIES_BY_TYPE: Final[
    dict[str, Callable[[Mapping[str, Any], torch.Tensor], torch.Tensor]]
] = {
    "default": _default,
    "llama3": _llama3,
    "yarn": _yarn,
}


def shift_keys(keys: torch.Tensor, shift: int, rotary: RotaryParams) -> torch.Tensor:
    """Copy of keys [.., D] rotated by `shift` positions.

    Three memory-bound passes over the keys; C++ would need one. Most of the time of loading KV is
    spent on the copies from the arena and into the cache's packed order, so that did not justify a
    library.

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
