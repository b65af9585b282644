"""The Triton RoPE shift in Triton's interpreter; run like interpreted_attention.py."""

import pytest
import torch

from kernels.rope_shift import shift_keys
from kernels.rope_shift_cuda import ROWS_PER_PROGRAM, shift_keys_
from tests.kernels.test_rope_shift import HEAD_DIM, KINDS, random_values, rotary


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [1, ROWS_PER_PROGRAM, 2 * ROWS_PER_PROGRAM + 3])
def test_triton_shift_equals_the_torch_one(kind: str, num_rows: int) -> None:
    keys = random_values(num_rows, HEAD_DIM)
    expected = shift_keys(keys, 57, rotary(kind))
    shift_keys_(keys, 57, rotary(kind))
    torch.testing.assert_close(keys, expected, atol=1e-6, rtol=0)


def test_short_dtypes_and_empty_input() -> None:
    keys = random_values(5, 3, HEAD_DIM, dtype=torch.float16)
    expected = shift_keys(keys, -8, rotary())
    shift_keys_(keys, 0, rotary())
    shift_keys_(keys, -8, rotary())
    torch.testing.assert_close(keys, expected, atol=2e-3, rtol=0)
    shift_keys_(random_values(0, HEAD_DIM), 5, rotary())
