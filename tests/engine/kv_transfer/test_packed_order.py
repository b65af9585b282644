"""The learned packing order against vLLM's own cache-write operation, bit for bit."""

import pytest
import torch

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

BLOCKS, HEADS = 5, 3


def instruction_sets(dtype: torch.dtype, block: int, head_dim: int) -> list[str]:
    """The instruction set that this machine selects, and the baseline of every x86 processor."""
    from vllm.platforms import CpuArchEnum, current_platform
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    chosen = [_get_attn_isa(dtype, block, head_dim)]
    if current_platform.get_cpu_architecture() == CpuArchEnum.X86:
        chosen += ["vec16"] + ["vec"] * (block % 32 == 0 and head_dim % 32 == 0)
    return sorted(set(chosen))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("block", "head_dim"), [(16, 64), (32, 32), (32, 80), (64, 128)])
def test_packed_values_are_restored_bit_for_bit(
    block: int, head_dim: int, dtype: torch.dtype
) -> None:
    from vllm import _custom_ops

    from engine.kv_transfer.worker.cache_blocks import derive_order
    from kernels.kv_block_copy import unpack

    num_tokens, ids = 2 * block + 5, [3, 0, 4]
    for isa in instruction_sets(dtype, block, head_dim):
        keys, values = torch.randn(2, num_tokens, HEADS, head_dim).to(dtype)
        cache = torch.zeros(BLOCKS, HEADS, block, 2 * head_dim, dtype=dtype)
        halves = cache.view(BLOCKS, HEADS, 2 * block, head_dim).chunk(2, dim=2)
        slots = torch.tensor([ids[i // block] * block + i % block for i in range(num_tokens)])
        _custom_ops.cpu_attn_reshape_and_cache(
            keys, values, halves[0], halves[1], slots, isa, 1.0, 1.0, "auto"
        )
        out = torch.empty(1, 2, HEADS, num_tokens, head_dim, dtype=dtype)
        unpack([cache], ids, derive_order(block, head_dim, dtype, isa), out)
        assert torch.equal(out[0, 0], keys.transpose(0, 1)), isa
        assert torch.equal(out[0, 1], values.transpose(0, 1)), isa
