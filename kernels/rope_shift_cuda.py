"""In-place rotation of cached keys to other positions (RoPE), in Triton.

One program rotates a range of rows; a row is the key of one token and head. All rows are rotated by
the same angles. Tested in Triton's interpreter.
"""

import torch
import triton
import triton.language as tl

from kernels.rope_shift import RotaryParams

ROWS_PER_PROGRAM = 32


def shift_keys_(keys: torch.Tensor, shift: int, rotary: RotaryParams) -> None:
    """Rotate contiguous keys [.., D] by `shift` positions in place; computed in float32."""
    assert keys.is_contiguous(), "rows must be contiguous"
    if not shift or not keys.numel():
        return
    half, head_dim = len(rotary.frequencies), keys.shape[-1]
    cosines, sines = (part.to(keys.device, non_blocking=True) for part in rotary.cos_sin(shift))
    num_rows = keys.numel() // head_dim
    _rotate_kernel[(triton.cdiv(num_rows, ROWS_PER_PROGRAM),)](
        keys,
        cosines,
        sines,
        num_rows,
        head_dim,
        half,
        ROWS_PER_PROGRAM=ROWS_PER_PROGRAM,
        NUM_PAIRS=triton.next_power_of_2(half),
    )


@triton.jit
def _rotate_kernel(
    keys,
    cosines,
    sines,
    num_rows,
    head_dim,
    half,
    ROWS_PER_PROGRAM: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS_PER_PROGRAM + tl.arange(0, ROWS_PER_PROGRAM)
    pairs = tl.arange(0, NUM_PAIRS)
    mask = (rows < num_rows)[:, None] & (pairs < half)[None, :]
    firsts = keys + rows[:, None] * head_dim + pairs[None, :]
    cosine = tl.load(cosines + pairs, mask=pairs < half, other=1.0)[None, :]
    sine = tl.load(sines + pairs, mask=pairs < half, other=0.0)[None, :]
    first = tl.load(firsts, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(firsts + half, mask=mask, other=0.0).to(tl.float32)
    rotated_first = first * cosine - second * sine
    rotated_second = second * cosine + first * sine
    tl.store(firsts, rotated_first.to(keys.dtype.element_ty), mask=mask)
    tl.store(firsts + half, rotated_second.to(keys.dtype.element_ty), mask=mask)
