"""Reference implementation of KV prediction, one token's channels at a time in float64."""

import math
from collections.abc import Sequence

import torch

from kernels.rope_shift import RotaryParams
from kernels.span_kv_prediction import Observation
from tests.kernels.rope_shift_reference import slow_shift


def slow_weights(source: torch.Tensor, bases: Sequence[torch.Tensor]) -> torch.Tensor:
    num_tokens = source.shape[3]
    weights = torch.zeros(len(bases), 2, num_tokens, dtype=torch.float64)
    for part in range(2):
        for token in range(num_tokens):
            own = _of(source, part, token)
            distances = [math.dist(own, _of(base, part, token)) for base in bases]
            zero_distance = math.hypot(*own)
            if min(distances) == 0:  # its base is the same text
                shares = [float(distance == 0) for distance in distances]
                total = sum(shares)
            else:
                shares = [distance**-2 for distance in distances]
                total = sum(shares) + zero_distance**-2
            for index, share in enumerate(shares):
                weights[index, part, token] = share / total
    return weights


def slow_predict(
    source: torch.Tensor, shift: int, observations: Sequence[Observation], rotary: RotaryParams
) -> torch.Tensor:
    """Adds each source's offset, shifted to the prediction's position, one after the other."""
    out = _shifted(source, shift, rotary)
    has_no_base = any(seen.base is None for seen in observations)
    for layer in range(1, len(out)):
        if has_no_base:
            out[layer] = 0
        for seen in observations:
            offset = _shifted(seen.real, seen.shift, rotary)[layer]
            if seen.base is not None:
                offset = offset - _shifted(seen.base, shift, rotary)[layer]
            for part in range(2):
                for token in range(source.shape[3]):
                    weight = float(seen.weights[part, token])
                    out[layer, part, :, token] += weight * offset[part, :, token]
    return out


def _shifted(values: torch.Tensor, shift: int, rotary: RotaryParams) -> torch.Tensor:
    out = values.double().clone()
    out[:, 0] = slow_shift(values[:, 0].contiguous(), shift, rotary)
    return out


def _of(values: torch.Tensor, part: int, token: int) -> list[float]:
    return [float(x) for x in values[:, part, :, token].double().flatten()]
