"""Keys moved to other positions: against the reference, and against Hugging Face's RoPE."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.rope_shift import RotaryParams, UnsupportedRotary, parse_rotary, shift_keys
from tests.kernels.rope_shift_reference import slow_shift
from tests.sample_sizes import num_examples

HEAD_DIM = 32
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn without truncation": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
        "attention_factor": 1.3,
        "original_max_position_embeddings": 128,
    },
    "a part of the channels": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}


def random_values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rotary(kind: str = "default") -> RotaryParams:
    return parse_rotary(KINDS[kind], HEAD_DIM)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shift", [1, -1, 57, -300])
def test_shift_equals_the_reference(kind: str, shift: int) -> None:
    keys = random_values(2, 5, HEAD_DIM)
    moved = shift_keys(keys, shift, rotary(kind))
    torch.testing.assert_close(
        moved.double(), slow_shift(keys, shift, rotary(kind)), atol=1e-6, rtol=0
    )


@settings(deadline=None, max_examples=num_examples(50))
@given(
    kind=st.sampled_from(sorted(KINDS)),
    shift=st.integers(-(10**5), 10**5),
    shape=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    seed=st.integers(0, 2**16),
)
def test_shift_and_its_inverse_restore_the_keys(
    kind: str, shift: int, shape: list[int], seed: int
) -> None:
    keys = random_values(*shape, HEAD_DIM, seed=seed)
    back = shift_keys(shift_keys(keys, shift, rotary(kind)), -shift, rotary(kind))
    torch.testing.assert_close(back, keys, atol=2e-6, rtol=0)


def test_zero_shift_copies_the_bits() -> None:
    keys = random_values(3, HEAD_DIM, dtype=torch.bfloat16)
    moved = shift_keys(keys, 0, rotary())
    assert torch.equal(moved, keys) and moved.data_ptr() != keys.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_dtypes_are_rounded_once(dtype: torch.dtype) -> None:
    keys = random_values(4, HEAD_DIM, dtype=dtype)
    exact = slow_shift(keys, 9, rotary()).to(dtype)
    torch.testing.assert_close(
        shift_keys(keys, 9, rotary()), exact, atol=torch.finfo(dtype).eps * 4, rtol=0
    )


def rotated(config: Any, keys: torch.Tensor, first: int) -> torch.Tensor:
    """[T, D] as rotated by Hugging Face's Llama from position `first` on."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    positions = torch.arange(first, first + len(keys))[None]
    cosines, sines = LlamaRotaryEmbedding(config)(keys, positions)
    _, turned = apply_rotary_pos_emb(keys[None, None], keys[None, None], cosines, sines)
    return turned[0, 0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["default", "llama3", "yarn", "yarn without truncation"])
@pytest.mark.parametrize(("first", "second"), [(0, 1), (3, 200), (250, 17)])
def test_moved_key_equals_the_one_hugging_face_computes_there(
    kind: str, first: int, second: int
) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=512,
        rope_parameters=dict(KINDS[kind]),
    )
    keys = random_values(20, HEAD_DIM)
    here = rotated(config, keys, first)
    moved = shift_keys(here, second - first, parse_rotary(config.rope_parameters, HEAD_DIM))
    torch.testing.assert_close(moved, rotated(config, keys, second), atol=5e-5, rtol=0)


@pytest.mark.parametrize(
    ("rope", "why"),
    [
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "'dynamic'"),
        ({"rope_type": "longrope", "rope_theta": 1e4}, "'longrope'"),
        ({"rope_theta": 1e4, "mrope_section": [1, 2, 3]}, "mrope_section"),
        ({}, "rope_theta is missing"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.1}, "3 rotated channels"),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}, "original_max_position"),
    ],
)
def test_unsupported_rope_is_refused_by_name(rope: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedRotary, match=why):
        parse_rotary(rope, HEAD_DIM)
