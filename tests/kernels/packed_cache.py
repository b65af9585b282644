"""vLLM's packed `vec` cache: a block's keys transposed, then its values."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.shared_prefix_attention import cpu
from kernels.shared_prefix_attention.sharing_plan import SharingPlan
from tests.kernels.attention_reference import Step


def packed(keys: Tensor, values: Tensor) -> Tensor:
    """[blocks, B, Hkv, D] twice -> [blocks, Hkv, B, 2 * D], the shape of vLLM's tensor."""
    blocks, block_size, num_kv_heads, head_size = keys.shape
    both = torch.stack(
        [keys.permute(0, 2, 3, 1).flatten(2), values.permute(0, 2, 1, 3).flatten(2)], dim=2
    )
    return both.reshape(blocks, num_kv_heads, block_size, 2 * head_size).contiguous()


@dataclass(frozen=True, slots=True)
class Result:
    out: Tensor
    lse: Tensor


def run_decode(
    plan: SharingPlan,
    step: Step,
    dtype: torch.dtype,
    *,
    isa: cpu.Isa | None = None,
    num_threads: int | None = None,
    sinks: Tensor | None = None,
) -> Result:
    """The compiled kernel's result for a step."""
    query = step.query.to(dtype)
    result = Result(torch.full_like(query, torch.nan), torch.empty(query.shape[:2]))
    decoding = cpu.DecodeStep(
        plan,
        block_table=step.block_table,
        seq_lens=step.seq_lens,
        query_start_loc=step.query_start_loc,
        isa=isa,
        num_threads=num_threads,
    )
    decoding.layer(
        query=query,
        cache=packed(step.keys.to(dtype), step.values.to(dtype)),
        scale=step.scale,
        out=result.out,
        lse=result.lse,
        sinks=sinks,
    )
    return result
