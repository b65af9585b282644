"""By which angles a model turns its keys, from the rope parameters of its configuration.

Turning by position is additive: a key that was computed at position p becomes the key of position
p + n when every pair of its channels is turned by n times the pair's frequency. A factor that
scales keys, as yarn has one, is in them already and stays. Only what is known to be a plain turn
is turned; everything else is refused by name.

R channels of a head's D are turned, the first ones; pair i is channels i and R / 2 + i.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

_PLAIN: Final = frozenset({"rope_theta", "rope_type", "type", "partial_rotary_factor"})
_NAMES: Final = {
    "default": _PLAIN,
    "llama3": _PLAIN
    | {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": _PLAIN
    | {"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"}
    | {"truncate", "original_max_position_embeddings"},
}
"""What each kind may say. A name that is not here may mean anything."""


class UnsupportedRotary(Exception):
    """Keys of this model cannot be moved; the message says why."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """`frequencies` [R / 2], in radians a position, on the CPU."""

    frequencies: torch.Tensor

    @property
    def num_channels(self) -> int:
        return 2 * len(self.frequencies)

    def turn(self, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [R / 2] of a move by so many positions, float32 from float64."""
        angles = self.frequencies.double() * shift
        return angles.cos().float(), angles.sin().float()


def rotary_of(rope: Mapping[str, Any], head_dim: int) -> Rotary:
    """Frequencies in float32, as models compute them. UnsupportedRotary if there are none."""
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    if kind not in _NAMES:
        raise UnsupportedRotary(f"keys are turned by {kind!r}")
    unknown = sorted(name for name in rope if name not in _NAMES[kind] and rope[name] is not None)
    if unknown:
        raise UnsupportedRotary(f"{kind!r} with {', '.join(unknown)}")
    if "rope_theta" not in rope:
        raise UnsupportedRotary("no rope_theta")
    channels = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if channels < 2 or channels % 2:
        raise UnsupportedRotary(f"{channels} channels are turned")
    try:
        return Rotary(_KINDS[kind](rope, _plain(rope, channels)))
    except KeyError as error:
        raise UnsupportedRotary(f"{kind!r} without {error.args[0]}") from error


def _plain(rope: Mapping[str, Any], channels: int) -> torch.Tensor:
    exponents = torch.arange(0, channels, 2, dtype=torch.float32, device="cpu") / channels
    return 1.0 / (float(rope["rope_theta"]) ** exponents)


def _default(rope: Mapping[str, Any], plain: torch.Tensor) -> torch.Tensor:
    return plain


def _llama3(rope: Mapping[str, Any], plain: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: slow turns slower by the factor, fast ones as they were, smoothly in between."""
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    factor, length = float(rope["factor"]), float(rope["original_max_position_embeddings"])
    turns = length * plain / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * plain / factor + smooth * plain


def _yarn(rope: Mapping[str, Any], plain: torch.Tensor) -> torch.Tensor:
    """YaRN (arXiv 2309.00071): the same, with a ramp over channels instead of over turns."""
    theta, factor = float(rope["rope_theta"]), float(rope["factor"])
    length, pairs = float(rope["original_max_position_embeddings"]), len(plain)

    def pair_of(num_turns: float) -> float:
        return pairs * math.log(length / (num_turns * 2 * math.pi)) / math.log(theta)

    first = pair_of(_given(rope, "beta_fast", 32.0))
    last = pair_of(_given(rope, "beta_slow", 1.0))
    if _given(rope, "truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    places = torch.arange(pairs, dtype=torch.float32, device="cpu")
    slow = ((places - first) / max(last - first, 0.001)).clamp(0, 1)
    return plain / factor * slow + plain * (1 - slow)


def _given(rope: Mapping[str, Any], name: str, usual: float) -> float:
    found = rope.get(name)
    return usual if found is None else float(found)


_KINDS: Final[dict[str, Callable[[Mapping[str, Any], torch.Tensor], torch.Tensor]]] = {
    "default": _default,
    "llama3": _llama3,
    "yarn": _yarn,
}
