"""Keys moved to other positions by Triton, in place. Run in Triton's interpreter, never on a GPU.

One program turns a run of rows, each a token's keys of one head, every one by the same angles.
"""

import torch
import triton
import triton.language as tl

from kernels.rope_shift.rope_params import Rotary

ROWS = 32


def shift_keys_(keys: torch.Tensor, shift: int, rotary: Rotary) -> None:
    """[.., D], contiguous, to `shift` positions later; computed in float32."""
    assert keys.is_contiguous(), "rows lie side by side"
    if not shift or not keys.numel():
        return
    half, head_dim = len(rotary.frequencies), keys.shape[-1]
    cosines, sines = (part.to(keys.device, non_blocking=True) for part in rotary.turn(shift))
    num_rows = keys.numel() // head_dim
    _turn[(triton.cdiv(num_rows, ROWS),)](
        keys,
        cosines,
        sines,
        num_rows,
        head_dim,
        half,
        ROWS=ROWS,
        PAIRS=triton.next_power_of_2(half),
    )


@triton.jit
def _turn(keys, cosines, sines, num_rows, head_dim, half, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    pairs = tl.arange(0, PAIRS)
    mask = (rows < num_rows)[:, None] & (pairs < half)[None, :]
    firsts = keys + rows[:, None] * head_dim + pairs[None, :]
    cosine = tl.load(cosines + pairs, mask=pairs < half, other=1.0)[None, :]
    sine = tl.load(sines + pairs, mask=pairs < half, other=0.0)[None, :]
    first = tl.load(firsts, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(firsts + half, mask=mask, other=0.0).to(tl.float32)
    moved_first = first * cosine - second * sine
    moved_second = second * cosine + first * sine
    tl.store(firsts, moved_first.to(keys.dtype.element_ty), mask=mask)
    tl.store(firsts + half, moved_second.to(keys.dtype.element_ty), mask=mask)
