"""KV prediction from observed texts, against the reference over edge shapes."""

import pytest
import torch

from kernels.rope_shift import RotaryParams, parse_rotary, shift_keys
from kernels.span_kv_prediction import Observation, predict, token_weights
from tests.kernels.kv_predict_reference import slow_predict, slow_weights

CLOSE = 1e-5
SHAPES = [(1, 2, 1, 1, 8), (2, 2, 2, 5, 16), (3, 2, 1, 4, 12)]


def values(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def turning(head_dim: int) -> RotaryParams:
    return parse_rotary({"rope_theta": 10_000.0}, head_dim)


def predicted(
    source: torch.Tensor,
    shift: int,
    observations: list[Observation],
    rotary: RotaryParams | None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    out = torch.full(source.shape, torch.nan, dtype=dtype)
    predict(source, shift, observations, rotary, out)
    return out


def moved(whole: torch.Tensor, shift: int) -> torch.Tensor:
    keys = shift_keys(whole[:, 0], shift, turning(whole.shape[-1]))
    return torch.stack([keys, whole[:, 1]], dim=1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_weights_equal_the_reference(shape: tuple[int, ...], scale: float) -> None:
    source, *bases = (scale * values(shape, seed) for seed in range(4))
    found = token_weights(source, bases)
    assert (found - slow_weights(source, bases)).abs().max() < CLOSE
    assert (found.sum(0) < 1).all() and (found > 0).all()
    assert (found - token_weights(3 * source, [3 * base for base in bases])).abs().max() < CLOSE


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_identical_text_has_the_whole_weight(scale: float) -> None:
    source, other = (scale * values((2, 2, 1, 6, 8), seed) for seed in range(2))
    found = token_weights(source, [other, source])
    assert (found[1] == 1).all() and (found[0] < 1e-20).all()
    assert (token_weights(source, [source, other, source])[[0, 2]] == 0.5).all()
    assert (found - slow_weights(source, [other, source])).abs().max() < CLOSE


def test_distant_text_has_almost_no_weight() -> None:
    source = values((2, 2, 1, 6, 8), 0)
    assert token_weights(source, [source + 100]).max() < 1e-2


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bases", [True, False])
@pytest.mark.parametrize("shifts", [(0, 0, 0), (7, 0, -3)])
def test_prediction_equals_the_reference(
    shape: tuple[int, ...], dtype: torch.dtype, with_bases: bool, shifts: tuple[int, int, int]
) -> None:
    source = values(shape, 0, dtype)
    bases = [values(shape, 1, dtype), values(shape, 2, dtype)]
    observations = [
        Observation(
            real=values(shape, 3 + i, dtype),
            shift=shifts[1 + i],
            base=base if with_bases else None,
            weights=weights,
        )
        for i, (base, weights) in enumerate(zip(bases, token_weights(source, bases), strict=True))
    ]
    before = [source.clone(), *(seen.real.clone() for seen in observations)]
    found = predicted(source, shifts[0], observations, turning(shape[-1]))
    expected = slow_predict(source, shifts[0], observations, turning(shape[-1]))
    assert (found - expected).abs().max() < CLOSE
    assert all(map(torch.equal, before, [source, *(seen.real for seen in observations)]))


def test_prediction_from_the_same_text_equals_its_kv() -> None:
    shape = (4, 2, 2, 6, 32)
    text, other = values(shape, 0), values(shape, 1)
    real = moved(text, 9) + 0.1 * values(shape, 2)
    real[0] = moved(text, 9)[0]  # which has no context
    weights = token_weights(text, [text, other])
    observations = [
        Observation(real=real, shift=4, base=text, weights=weights[0]),
        Observation(real=values(shape, 3), shift=0, base=other, weights=weights[1]),
    ]
    found = predicted(text, 13, observations, turning(32))
    assert (found - moved(real, 4)).abs().max() < CLOSE


def test_output_is_written_in_cache_dtypes() -> None:
    source, real = values((2, 2, 1, 3, 8), 0), values((2, 2, 1, 3, 8), 1)
    seen = Observation(real=real, shift=3, base=source, weights=torch.ones(2, 3))
    whole = predicted(source, 5, [seen], turning(8))
    small = predicted(source, 5, [seen], turning(8), torch.bfloat16)
    assert torch.equal(small, whole.bfloat16())


def test_kv_that_does_not_move_is_not_rotated() -> None:
    source, real = values((2, 2, 1, 3, 8), 0), values((2, 2, 1, 3, 8), 1)
    whole = torch.ones(2, 3)
    found = predicted(source, 0, [Observation(real=real, shift=0, base=None, weights=whole)], None)
    assert torch.equal(found[0], source[0]) and torch.equal(found[1:], real[1:])
